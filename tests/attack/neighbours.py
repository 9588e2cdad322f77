"""Honest clients beside the attack: each knows its text beforehand and asks for it over and over."""

import asyncio
import time
from typing import Any

from benchmarks.serve_client import Json

from tests.attack.wire import Reply, Violation, Wire

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
_COMPLETIONS = "/v1/completions"
PLAIN: tuple[Json, ...] = (
    {"prompt": "The moon is", "max_tokens": 24, "temperature": 0.0, "seed": 1},
    {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 2},
    {"prompt": "A recipe for bread:", "max_tokens": 32, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    {"prompt": "Rivers and bridges. " * 12, "max_tokens": 16, "temperature": 0.0, "seed": 4},
    {"prompt": "List three colours:", "max_tokens": 24, "temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 40},
    {"prompt": "Chess is", "max_tokens": 24, "temperature": 0.0, "seed": 6, "frequency_penalty": 0.8},
    {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.5, "seed": 7, "min_p": 0.05},
    {"prompt": "Why is the sky blue?", "max_tokens": 40, "temperature": 1.0, "seed": 8, "repetition_penalty": 1.2},
)
"""What the offline engine can answer as well."""
WITH_GRAMMAR: tuple[Json, ...] = (
    {"prompt": "A person:", "max_tokens": 32, "temperature": 0.0, "seed": 9, "response_format": _FORM},
    {"prompt": "A person:", "max_tokens": 32, "temperature": 1.0, "seed": 10, "response_format": _FORM},
)


class Neighbours:
    """Some clients that ask in turns, streamed and whole, and keep what went wrong."""

    def __init__(self, wire: Wire, expected: list[str], up: asyncio.Event) -> None:
        """Keep the texts that must come.

        Args:
            up: clear while the server is being started again; nobody asks then.
        """
        self._wire = wire
        self._jobs = (*PLAIN, *WITH_GRAMMAR)
        self._expected = expected
        self._up = up
        self._over = False
        self.num_answers = 0
        self.num_refused = 0
        self.wrong: list[tuple[float, str]] = []

    async def client(self, number: int) -> None:
        """Ask one thing after another until it is over."""
        turn = number
        while not self._over:
            await self._up.wait()
            job = turn % len(self._jobs)
            try:
                await self._ask(job, streamed=turn % 3 == 0)
            except (Violation, OSError) as error:
                if self._up.is_set():
                    self.wrong.append((time.monotonic(), f"a neighbour's request {job}: {error}"))
                await asyncio.sleep(0.5)
            turn += 1

    def stop(self) -> None:
        """Let each client end after the answer it waits for."""
        self._over = True

    async def _ask(self, job: int, streamed: bool) -> None:
        body = {**self._jobs[job], "stream": streamed}
        while True:
            reply = await self._wire.post(_COMPLETIONS, body)
            if reply.status != 429:
                break
            self.num_refused += 1
            await asyncio.sleep(0.3)
        if reply.statuses != [200]:
            raise Violation(f"status {reply.statuses}")
        if (text := _text(reply)) != self._expected[job]:
            raise Violation(f"{text!r} instead of {self._expected[job]!r}")
        self.num_answers += 1


async def quiet_texts(wire: Wire) -> list[str]:
    """Return what the server says to every neighbour while nothing else happens, without its draft."""
    texts = []
    for job in (*PLAIN, *WITH_GRAMMAR):
        reply = await wire.post(_COMPLETIONS, {**job, "speculate": False})
        if reply.status != 200:
            raise Violation(f"an ordinary request got {reply.status}: {reply.body[:200]!r}")
        texts.append(reply.text())
    return texts


async def ordinary_requests(wire: Wire, count: int) -> None:
    """Ask what people ask, one after another."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12, "seed": 1}
    long = {"prompt": "Much to read. " * 100, "max_tokens": 4, "seed": 1}
    several = {"prompt": "x", "n": 4, "logprobs": 5, "max_tokens": 12, "temperature": 1, "seed": 1, "stream": True}
    kinds = [(_COMPLETIONS, {**job, "seed": 1}) for job in (*PLAIN, *WITH_GRAMMAR)]
    kinds += [("/v1/chat/completions", chat), (_COMPLETIONS, long), (_COMPLETIONS, several)]
    for number in range(count):
        path, body = kinds[number % len(kinds)]
        reply = await wire.post(path, body)
        if reply.status != 200:
            raise Violation(f"an ordinary request got {reply.status}: {reply.body[:200]!r}")


def _text(reply: Reply) -> str:
    try:
        return reply.text()
    except (ValueError, KeyError) as error:
        raise Violation(f"an answer that cannot be read ({error!r})") from error
