"""Connections that are half open, slow, broken off or full of nonsense."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attack.kinds import ANY, COMPLETIONS, NO_ANSWER, Attack, raw, require
from tests.attack.wire import Reply, Wire, request

_STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 48, "ignore_eos": True, "stream": True, "seed": 1}
_SMALL = b'{"prompt": "x", "max_tokens": 1}'
_CLOSED = frozenset({NO_ANSWER})
_HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
GIVEN_UP_S = 240.0
"""By when a reader that reads nothing must be gone: after twice the server's 60 s where the kernel holds the bytes."""
_TIME_WAIT = "06"


def attacks(seed: int) -> list[Attack]:
    """Return every attack of this kind."""
    return [*_garbage(seed), *_disconnects(), *_pipelines(), *_slow(), *_floods()]


def _garbage(seed: int) -> list[Attack]:
    draw = random.Random(seed)
    noise = [raw(f"random bytes, {n}", draw.randbytes(n) + b"\r\n\r\n") for n in (1, 100, 10_000, 1_000_000)]
    hello = bytes.fromhex("16030100c8010000c40303") + draw.randbytes(193)
    return [
        *noise,
        raw("a TLS greeting", hello + b"\r\n\r\n", in_short=True),
        raw("HTTP/2 without asking", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64), (*ANY, 505, NO_ANSWER)),
        raw("NULs", bytes(4096) + b"\r\n\r\n"),
        raw("empty lines", b"\r\n" * 50_000 + b"x\r\n\r\n"),
        raw("a megabyte without a line", b"A" * (1 << 20) + b"\r\n\r\n", in_short=True),
        raw("a head of a megabyte of lines", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 170_000 + b"\r\n"),
    ]


def _disconnects() -> list[Attack]:
    """Return what clients that go away do, in every phase of a request and in three manners."""
    whole = request("POST", COMPLETIONS, _STREAM)
    unstreamed = request("POST", COMPLETIONS, {**_STREAM, "stream": False})
    long = request("POST", COMPLETIONS, {**_STREAM, "prompt": "a " * 1500})
    head = len(whole) - 40
    phases: dict[str, tuple[bytes, bytes]] = {
        "before a byte": (b"", b""),
        "within the head": (whole[:60], b""),
        "within the body": (whole[:head], b""),
        "at once after asking": (whole, b""),
        "at once, not streamed": (unstreamed, b""),
        "while its prompt is read": (long, b"HTTP/1.1"),
        "after the head of the answer": (whole, b"\r\n\r\n"),
        "after the first event": (whole, b"data: "),
        "after the last event": (whole, b"[DONE]"),
    }
    return [
        _leaving(f"goes away {phase}: {manner}", sent, until, leave, 8)
        for phase, (sent, until) in phases.items()
        for manner, leave in (("close", _close), ("reset", _reset), ("half", _half_close))
    ] + [_leaving("64 streams broken off at their first event", whole, b"data: ", _close, 64, True)]


def _leaving(
    name: str, sent: bytes, until: bytes, leave: Callable[[asyncio.StreamWriter], None], count: int, short: bool = False
) -> Attack:
    async def one(wire: Wire) -> int:
        async with wire.connection() as (reader, writer):
            writer.write(sent)
            await writer.drain()
            received = b""
            while until and until not in received:
                part = await reader.read(4096)
                if not part:
                    return Reply(received).status  # 429, say
                received += part
            leave(writer)
            return Reply(received).status

    async def send(wire: Wire) -> list[int]:
        return list(await asyncio.gather(*(one(wire) for _ in range(count))))

    return Attack(name, send, frozenset((*ANY, NO_ANSWER)), 60, short)


def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    own: socket.socket = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _half_close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write_eof()


def _pipelines() -> list[Attack]:
    """Return requests sent without waiting for answers; each is to be answered, in order, or the connection closed."""
    health = request("GET", "/health", b"", [("Connection", "keep-alive")])
    ask = request("POST", COMPLETIONS, _SMALL, [("Connection", "keep-alive")])
    bad = request("POST", COMPLETIONS, b"[", [("Connection", "keep-alive")])
    last = request("GET", "/health", b"")
    return [
        raw("50 questions in a row", health * 50 + last),
        raw("20 answers in a row", ask * 20 + last, limit_s=60),
        raw("good and bad in turns", (ask + bad) * 10 + last, limit_s=60),
        raw("a bad one, then nonsense", bad + b"\x00" * 200 + b"\r\n\r\n"),
    ]


def _slow() -> list[Attack]:
    """Return clients that send so slowly that they never end."""

    def dripping(start: bytes, drop: bytes) -> Callable[[Wire], Any]:
        async def send(wire: Wire) -> list[int]:
            async with wire.connection() as (reader, writer):
                writer.write(start)
                received = bytearray()
                while True:
                    try:
                        async with asyncio.timeout(0.5):
                            part = await reader.read(4096)
                    except TimeoutError:
                        writer.write(drop)
                        continue
                    except ConnectionError:
                        part = b""
                    received += part
                    if not part:
                        return [Reply(bytes(received)).status]

        return send

    body = request("POST", COMPLETIONS, b" " * 5000)[:-4990]
    fine = frozenset({408, 400, NO_ANSWER})
    return [
        Attack("a head, a byte at a time", dripping(_HALF_A_HEAD, b"a"), fine, 90),
        Attack("a body, a byte at a time", dripping(body, b" "), fine, 90),
    ]


def _floods() -> list[Attack]:
    """Return more connections than there are descriptors. While they stand, /health is asked as ever."""

    def held(count: int, start: bytes) -> Callable[[Wire], Any]:
        async def send(wire: Wire) -> list[int]:
            async def one() -> int:
                try:
                    async with wire.connection() as (reader, writer):
                        writer.write(start)
                        received = await reader.read(4096)
                        return Reply(received).status
                except OSError:
                    return NO_ANSWER

            return list(await asyncio.gather(*(one() for _ in range(count))))

        return send

    fine = _CLOSED | {400, 408, 503}  # 503: too many connections, which this attack is
    return [
        Attack("300 halves of a head", held(300, _HALF_A_HEAD), fine, 90),
        Attack("300 connections without a byte", held(300, b""), fine, 90),
        Attack("300 halves of a body", held(300, request("POST", COMPLETIONS, b" " * 500)[:-400]), fine, 90),
        Attack("1000 connections, opened and closed", _churn, _CLOSED, 60),
    ]


async def _churn(wire: Wire) -> list[int]:
    for _ in range(20):
        connections = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", wire.port) for _ in range(50)))
        for _, writer in connections:
            writer.close()
    return [NO_ANSWER]


class SilentReaders:
    """Clients that ask for much and read nothing, from the beginning of the attack to its end."""

    def __init__(self, port: int, count: int = 3) -> None:
        body = {**_STREAM, "prompt": "a " * 900, "n": 2, "max_tokens": 4, "prompt_logprobs": 20}  # megabytes
        self._port = port
        self._sockets = [self._ask(port, body) for _ in range(count)]
        self._since = time.monotonic()

    def _ask(self, port: int, body: dict[str, Any]) -> socket.socket:
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.connect(("127.0.0.1", port))
        asking.sendall(request("POST", COMPLETIONS, body))
        return asking

    async def wait_until_given_up(self) -> None:
        """Return once the server has closed every connection; raise Violation if it keeps one."""
        ports = {one.getsockname()[1] for one in self._sockets}
        while held := len(ports & _connected_to(self._port)):
            late = time.monotonic() - self._since > GIVEN_UP_S
            require(not late, f"{held} connections nobody reads are held after {GIVEN_UP_S:.0f} s")
            await asyncio.sleep(0.5)

    def close(self) -> None:
        """Close the clients' side."""
        for one in self._sockets:
            one.close()


def _connected_to(port: int) -> set[int]:
    """Return the ports that a server still has connections to: a client is not told of one its kernel gave up."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [(_port(line[1]), _port(line[2])) for line in lines if line[3] != _TIME_WAIT]
    return {there for here, there in ends if here == port}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
