"""An event loop whose clock jumps over waiting: a simulated minute takes no time and is the same each time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
IN_FLIGHT_S = 0.0001
"""Real time given to bytes on the loopback before the clock may jump."""


class _JumpingSelector(selectors.SelectSelector):  # epoll waits whole milliseconds
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if events or timeout == 0:
            return events
        events = super().select(IN_FLIGHT_S)
        if events:
            return events
        if timeout is None:
            return super().select(None)
        self.now += max(timeout, 0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs on simulated time; sockets are real."""

    def __init__(self):
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
