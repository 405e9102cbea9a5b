#!/usr/bin/env python3
"""Streams an answer: stream.py HOST:PORT PROMPT"""
import sys

from winnow_client import Client

with Client(sys.argv[1]) as client:
    for piece in client.stream(sys.argv[2], max_tokens=32):
        print(piece.text, end="", flush=True)
        if piece.usage:
            print(f"\n[{piece.finish}, {piece.usage.prompt_tokens} + {piece.usage.generated_tokens} tokens]")
