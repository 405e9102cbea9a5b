#!/usr/bin/env python3
"""Asks many questions about one document at once, with asyncio: many.py HOST:PORT DOCUMENT QUESTION..."""
import asyncio
import pathlib
import sys

from winnow_client import AsyncClient, WinnowError


async def main(address, document, questions):
    async with AsyncClient(address, timeout=300) as client:
        async def ask(question):
            try:
                return (await client.generate(document + question, max_tokens=16)).text
            except WinnowError as error:
                return f"({error})"

        for question, answer in zip(questions, await asyncio.gather(*map(ask, questions))):
            print(f"{question} -> {answer!r}")


asyncio.run(main(sys.argv[1], pathlib.Path(sys.argv[2]).read_text(), sys.argv[3:]))
