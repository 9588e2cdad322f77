"""What an attacker has: connections to one port of this machine, and any bytes it likes to send over them."""

import asyncio
import json
import re
from collections.abc import Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.serve_client import Json

JSON_HEAD = (("Content-Type", "application/json"),)
_STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3})", re.MULTILINE)
_EVENT_CODE = re.compile(rb'^data: \{"error":.*"code":(\d{3})', re.MULTILINE)


class Violation(Exception):  # noqa: N818 (a broken promise, not a fault of this program)
    """The server did something it promises not to do; the message is for the report."""


@dataclass(frozen=True)
class Reply:
    """Everything that came back over one connection."""

    received: bytes

    @property
    def status(self) -> int:
        """The first answer's status; 0 if the connection ended without one."""
        found = _STATUS.match(self.received)
        return int(found[1]) if found else 0

    @property
    def statuses(self) -> list[int]:
        """Every status, and the codes of errors that came as events of a stream; [0] if nothing came."""
        codes = [*_STATUS.findall(self.received), *_EVENT_CODE.findall(self.received)]
        return [int(code) for code in codes] or [0]

    @property
    def body(self) -> bytes:
        """What follows the first head."""
        return self.received.partition(b"\r\n\r\n")[2]

    def json(self) -> Json:
        """Return the body of an answer that is not chunked."""
        found = json.loads(self.body)
        return found if isinstance(found, dict) else {}

    def events(self) -> list[Json]:
        """Return the events of a stream, without its end mark."""
        lines = [line[6:] for line in self.body.splitlines() if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]

    def text(self) -> str:
        """Return the text of a completion, streamed or whole."""
        if b"text/event-stream" in self.received.partition(b"\r\n\r\n")[0]:
            return "".join(c.get("text", "") for event in self.events() for c in event.get("choices", []))
        return str(self.json()["choices"][0]["text"])


@dataclass(frozen=True)
class Wire:
    """A way to the server."""

    port: int
    vocab_size: int = 0

    @asynccontextmanager
    async def connection(self) -> Any:  # yields (reader, writer)
        """Open a connection for the length of the block."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes) -> Reply:
        """Send bytes, then read until the server closes; a reset ends it like a close."""
        async with self.connection() as (reader, writer):
            received = bytearray()
            reading = asyncio.ensure_future(_read(reader, received))
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                pass  # it was refused while being sent; what it answered can still be read
            try:
                await reading
            finally:
                reading.cancel()
        return Reply(bytes(received))

    async def post(self, path: str, body: Json | bytes, headers: Iterable[tuple[str, str]] = ()) -> Reply:
        """Send a body, JSON or any bytes, and read the whole answer."""
        return await self.raw(request("POST", path, body, headers))

    async def get(self, path: str, headers: Iterable[tuple[str, str]] = ()) -> Reply:
        """Ask for a path."""
        return await self.raw(request("GET", path, b"", headers))


def request(method: str, path: str, body: Json | bytes, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return a well-formed request, but for what `headers` say; one of them replaces a default of its name."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.lower() for name, _ in headers}
    usual = [("Host", "localhost"), ("Connection", "close")]
    usual += [*JSON_HEAD, ("Content-Length", str(len(content)))] if method == "POST" else []
    fields = [*((name, value) for name, value in usual if name.lower() not in given), *headers]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + content


async def _read(reader: asyncio.StreamReader, into: bytearray) -> None:
    try:
        while part := await reader.read(1 << 16):
            into += part
    except ConnectionError:
        return
