"""A server for one measurement, asked with `winnow generate`. Needs the winnow program (WINNOW_BIN) and Python only."""
import contextlib
import os
import re
import subprocess
import sys
import threading
import typing

WINNOW = os.environ.get("WINNOW_BIN", "build/cuda/winnow" if os.path.exists("build/cuda/winnow") else "build/release/winnow")


class Ports(typing.NamedTuple):
    address: str  # of gRPC
    metrics_port: int
    http_port: int


@contextlib.contextmanager
def own_server(*flags):
    """`winnow serve FLAG...` on loopback, from its line "listening" on. Ends the program with the server's log
    where it does not start."""
    server = subprocess.Popen([WINNOW, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0", "--retrieval-from", "0",
                               *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        log = []
        for line in server.stdout:  # ends with the server
            log.append(line)
            ports = {name: int(number) for name, number in re.findall(r" (port|metrics_port|http_port)=(\d+)", line)}
            if len(ports) == 3:
                break
        else:
            sys.exit("the server did not start:\n" + "".join(log))
        # What it says from here on is nobody's, but must not stand in its way.
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield Ports(f"127.0.0.1:{ports['port']}", ports["metrics_port"], ports["http_port"])
    finally:
        server.terminate()
        server.wait()
