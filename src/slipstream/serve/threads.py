"""Work on a request that would hold the event loop up: in threads, a bounded queue of it, and memory handed back."""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.serve.errors import HttpError

T = TypeVar("T")

_TINY_BYTES = 1 << 10  # parsed in a tenth of a millisecond
SHORT_BYTES = 1 << 13  # rendered and tokenized within a few milliseconds
_TURN_BYTES = 1 << 16  # parsed in a millisecond or two
_MAX_WAITING = 64
_LARGE_BYTES = 1 << 18


class Threads:
    """Threads for the parts of requests that take time; so few that they leave the engine its cores.

    What is short has a thread of its own, and does not wait for what is long.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._long = ThreadPoolExecutor(num_threads, name)
        self._short = ThreadPoolExecutor(1, f"short-{name}")
        self._num_open = 0
        self._turn = asyncio.Lock()

    async def run(self, num_bytes: int, work: Callable[[], T], holds_lock: bool = False) -> T:
        """Do work on that many bytes of a request.

        Args:
            holds_lock: the work never lets go of Python's lock. A thread then holds the event loop up as much, and
                again at every write, for which the loop lets go of the lock; so the loop does it itself, one request
                at a time, unless it is long.
        """
        if holds_lock and num_bytes <= _TINY_BYTES:
            return work()
        if holds_lock and num_bytes <= _TURN_BYTES:
            async with self._turn:
                await asyncio.sleep(0)  # streams have their turn between two requests that came together
                return work()
        loop = asyncio.get_running_loop()
        if num_bytes <= SHORT_BYTES:
            return await loop.run_in_executor(self._short, work)
        if self._num_open >= _MAX_WAITING:
            raise HttpError(429, "The server has too many large requests to read; try again.", retry_after_s=2)
        self._num_open += 1
        try:
            return await loop.run_in_executor(self._long, _done, num_bytes, work)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """End the threads once they have nothing left to do."""
        for pool in (self._long, self._short):
            pool.shutdown(wait=False, cancel_futures=True)


def _done(num_bytes: int, work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        if num_bytes > _LARGE_BYTES and sys.platform == "linux":
            _trim()


def _trim() -> None:
    """Have glibc return freed memory: a tokenizer takes 300 bytes for every byte of a text made for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps little
    if trim is not None:
        trim(0)
