#!/usr/bin/env python3
"""Does what docs/start.md says, command by command, and prints the minutes since its beginning after each:

    deploy/try_start.py [--list]

In a clone of the project, as a user who may use sudo (best in a fresh Debian root: debootstrap --variant=minbase --include=sudo,git,python3,curl).
The sections that need a GPU are left out. A server that the page starts runs until the page's last question to it; its ports must be free. --list only prints the commands.
Exit code 1: a command failed, or the server did not start, and what it said.
"""
import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
PAGE = SOURCE / "docs/start.md"
SERVES, ASKS = "Serve", ("Ask", "See what was read")
SECTIONS = ("Install", SERVES, *ASKS, "Judge it")
PATIENCE = 600


def commands():
    """[(section, command)] of the page: its indented blocks."""
    found = []
    for part in re.split(r"(?m)^## ", PAGE.read_text())[1:]:
        title, _, text = part.partition("\n")
        blocks = re.findall(r"(?m)(?:^    .*\n)+", text)
        found += [(title, "".join(line[4:] + "\n" for line in block.splitlines())) for block in blocks if title in SECTIONS]
    if {title for title, _ in found} != set(SECTIONS):
        sys.exit(f"try_start.py: {PAGE} lacks commands of {sorted(set(SECTIONS) - {title for title, _ in found})}")
    return found


class Server:
    """A command that serves, with all its processes, from its line "listening" until it is closed."""

    def __init__(self, command):
        self.process = subprocess.Popen(["bash", "-euc", command], cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        errors="replace", start_new_session=True)
        impatient = threading.Timer(PATIENCE, self.close)
        impatient.start()
        log = []
        for line in self.process.stdout:  # ends with the server
            log.append(line)
            if "event=listening" in line:
                break
        impatient.cancel()
        if not log or "event=listening" not in log[-1]:
            sys.exit("try_start.py: the server did not start:\n" + "".join(log[-20:]))
        # The rest of its log is nobody's, but must not stand in its way.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=60)


def run(command):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = done.stdout.splitlines()
    print("\n".join("    " + line[:300] for line in lines[-6:]), flush=True)
    # Servers answer errors with an object, and curl with success.
    if done.returncode != 0 or re.match(r'\s*\{\s*"error"', done.stdout):
        sys.exit(f"try_start.py: exit code {done.returncode} of\n{command}" + "\n".join(lines[-40:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    server, begin = None, time.monotonic()
    try:
        for section, command in commands():
            if args.list:
                print(f"{section}: {command}", end="")
                continue
            if server is not None and section not in ASKS:
                server.close()
                server = None
            if section == SERVES:
                server = Server(command)
            else:
                run(command)
            print(f"{(time.monotonic() - begin) / 60:6.1f} min  {section}: {command.splitlines()[0]}", flush=True)
    finally:
        if server is not None:
            server.close()


if __name__ == "__main__":
    main()
