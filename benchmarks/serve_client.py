"""A small HTTP client for the server's benchmarks: one connection a request, events as they come, little CPU."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass
class Answer:
    """What came back."""

    status: int
    body: Json = field(default_factory=dict)


async def post(port: int, path: str, body: Json, request_id: str = "bench") -> Answer:
    """Send a request and read its whole JSON answer."""
    reader, writer = await _send(port, path, json.dumps(body).encode(), request_id)
    try:
        status, _ = await _head(reader)
        return Answer(status, json.loads(await reader.read()))
    finally:
        writer.close()


async def stream(port: int, path: str, body: Json, request_id: str = "bench") -> AsyncIterator[Json | None]:
    """Send a request and yield the events of its answer; None stands for the end mark. Closing it disconnects."""
    reader, writer = await _send(port, path, json.dumps({**body, "stream": True}).encode(), request_id)
    try:
        status, _ = await _head(reader)
        if status != 200:
            raise RuntimeError(f"status {status}: {(await reader.read()).decode()}")
        while line := await reader.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield None if data == b"[DONE]" else json.loads(data)
    finally:
        writer.close()


async def _send(
    port: int, path: str, content: bytes, request_id: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"X-Request-ID: {request_id}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    await writer.drain()
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), head


def get(port: int, path: str) -> str:
    """Return what a GET answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return str(response.read().decode())


def metrics(port: int) -> dict[str, float]:
    """Return the server's metrics by name and labels."""
    lines = [line for line in get(port, "/metrics").splitlines() if line and line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@dataclass(frozen=True)
class Hosting:
    """How a server's process is run.

    Args:
        port: where it listens; None takes a free one.
        log: a file for its log, which then has a line for every request; None shows warnings only.
        max_files: descriptors it may have open; None leaves it at the system's limit.
    """

    port: int | None = None
    log: Path | None = None
    max_files: int | None = None


@contextmanager
def server(arguments: list[str], hosting: Hosting | None = None) -> Any:  # a context manager over (process, port)
    """Run `slipstream serve` until the block ends, in a process group of its own."""
    hosting = hosting or Hosting()
    port = hosting.port or free_port()
    code = "import typer; from slipstream.cli.serve import serve; typer.run(serve)"
    if hosting.max_files is not None:
        code = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({hosting.max_files}, {hosting.max_files})); {code}"
    level = "warning" if hosting.log is None else "info"
    command = [sys.executable, "-c", code, *arguments, "--port", str(port), "--log-level", level]
    with nullcontext(None) if hosting.log is None else hosting.log.open("ab") as log:
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        for _ in range(1200):
            try:
                get(port, "/health")
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
