"""The server under attack as a process: started, watched, and started again if an attack ends it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.serve_client import Hosting, server

from tests.attack.watch import memory_mib

MAX_FILES = 256
_SAMPLE_S = 0.25


class HostedServer:
    """A server that comes back on the same port, because one fault must not hide the others."""

    def __init__(self, flags: list[str], port: int, log: Path, ceiling_mib: float) -> None:
        """Start it.

        Args:
            ceiling_mib: how far its memory may rise over its level before it is ended, to protect the machine.
        """
        self._flags = flags
        self._hosting = Hosting(port, log, MAX_FILES)
        self._ceiling_mib = ceiling_mib
        self._stack = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes]
        self.level_mib = float("inf")
        self.peak_mib = 0.0
        self.ended_for_memory = False
        self.up = asyncio.Event()
        self.down: list[tuple[float, float]] = []

    async def start(self) -> None:
        """Start the process and return when it answers."""
        since = time.monotonic()
        context = server(self._flags, self._hosting)
        self.process, _ = await asyncio.to_thread(self._stack.enter_context, context)
        self.ended_for_memory = False
        self.down.append((since, time.monotonic()))
        self.up.set()

    async def restart(self) -> None:
        """End what is left of the process, and start it again."""
        self.up.clear()
        self.kill()
        await asyncio.to_thread(self._stack.close)
        await self.start()

    def kill(self) -> None:
        """End the process and all it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process as its owner would."""
        self._stack.close()

    def death(self) -> str | None:
        """Say how the process ended, if it did."""
        code = self.process.poll()
        if code is None:
            return None
        if self.ended_for_memory:
            return f"memory rose by more than {self._ceiling_mib:.0f} MiB and the server was ended"
        return f"the server died ({signal.Signals(-code).name if code < 0 else f'status {code}'})"

    def peak_since_last(self) -> float:
        """Return the most memory it had since this was asked, and begin anew."""
        peak, self.peak_mib = self.peak_mib, 0.0
        return peak

    async def watch_memory(self) -> None:
        """Look at its memory until cancelled; end it if it takes too much."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            now = memory_mib(self.process.pid)
            self.peak_mib = max(self.peak_mib, now)
            if now > self.level_mib + self._ceiling_mib:
                self.ended_for_memory = True
                self.kill()
