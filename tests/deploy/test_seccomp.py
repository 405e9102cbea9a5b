#!/usr/bin/env python3
"""The seccomp profile of the overlay io-uring lets winnow serve, store and resume with io_uring; the same profile without
io_uring's calls lets it serve with threads, which its metrics say, and makes --io uring an error.
"""
import contextlib
import ctypes
import json
import os
import sys
import unittest
import urllib.request

import manifests

sys.path.insert(0, str(manifests.SOURCE / "tests/e2e"))
import harness  # noqa: E402

LAUNCHER = str(manifests.SOURCE / "tests/deploy/seccomp.py")


@contextlib.contextmanager
def server(*launcher, io="auto"):
    """Of `winnow serve` with a store, under the profile."""
    with harness.temporary_directory() as directory:
        wrapper = directory / "winnow"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {LAUNCHER} {" ".join(launcher)} {harness.BIN} "$@"\n')
        wrapper.chmod(0o755)
        before, harness.BIN = harness.BIN, str(wrapper)
        try:
            with harness.Server("--disk-bytes", "64MiB", "--kv-bytes", "24MiB", "--max-running", "4", "--max-context", "8192", "--store-dir", directory / "store", "--io", io) as running:
                yield running
        finally:
            harness.BIN = before


def ask(running, text):
    body = json.dumps({"prompt": text, "max_tokens": 8}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{running.http_port}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=harness.PATIENCE) as answer:
        return json.load(answer)["usage"]


def machine_has_io_uring():
    """Whether the kernel, and what this runs in, allow it at all."""
    descriptor = ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))  # io_uring_setup
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


class Seccomp(unittest.TestCase):
    def serves(self, running, io):
        self.assertEqual(running.metric(f'winnow_store_info{{io="{io}"}}'), 1)
        text = "The quick brown fox jumps over the lazy dog. " * 120
        self.assertEqual(ask(running, text)["completion_tokens"], 8)
        harness.eventually(lambda: running.metric("winnow_store_blocks") > 0, "a stored block")
        self.assertGreater(ask(running, text + "Again.")["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(running.metric("winnow_store_state"), 0)
        self.assertEqual(running.terminate(), 0)

    def test_the_profile_allows_io_uring(self):
        with server(io="uring") as running:
            self.serves(running, "uring")

    def test_without_io_uring_there_are_threads(self):
        with server("--without-io-uring") as running:
            self.serves(running, "threads")

    def test_without_io_uring_it_cannot_be_asked_for(self):
        with self.assertRaisesRegex(RuntimeError, "io_uring|uring"):
            with server("--without-io-uring", io="uring"):
                pass


if __name__ == "__main__":
    if not machine_has_io_uring():
        print("LEFT OUT: io_uring is forbidden here, whatever the profile says")
        sys.exit(77)
    harness.main()
