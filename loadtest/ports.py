"""Ports for servers that cannot choose their own (of peers, of routers, of proxies). Needs Python only."""
import pathlib
import random
import socket

LOWEST = 10000  # below it lie well-known services
EPHEMERAL = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


def first_ephemeral():
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768  # Linux's default


_given = set()  # by this process: their servers may not listen yet


def unused_port():
    """A port on loopback that nobody listens on, below the range from which the system gives ports to outgoing connections and to sockets
    bound to port 0: between this call and the server's start none of those can take it. Where the system's range leaves no room below
    it, the port is one of that range. No port is given twice."""
    end = first_ephemeral()
    if end <= LOWEST:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]
    for port in random.SystemRandom().sample(range(LOWEST, end), min(1000, end - LOWEST)):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody has it
            _given.add(port)
            return port
    raise OSError(f"no port from {LOWEST} to {end - 1} is free on 127.0.0.1")
