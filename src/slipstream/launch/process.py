"""One process of a server, here or on a node, from start to stop: its log is kept, and nothing of it is left behind."""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.launch.command import Command
from slipstream.launch.nodes import Node, Nodes, node_script

STOP_S = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOST = 255  # what ssh ends with when its connection does


class LaunchError(SlipstreamError):
    """A server could not be started, or did not become healthy in time."""


class ServerProcess:
    """A running process and its log file; `what` names it and where it runs."""

    def __init__(self, process: asyncio.subprocess.Process, what: str, log: Path) -> None:
        self._process = process
        self._what = what
        self.log = log

    @classmethod
    async def start(cls, command: Command, log: Path, what: str = "the server") -> "ServerProcess":
        """Start the command in its own process group, its settings over our environment; output goes to `log`."""
        program = _find(command.argv[0])
        settings = (f"{name}={value}" for name, value in command.env.items())
        return cls(await _start(("env", *settings, program, *command.argv[1:]), command, log), what, log)

    @classmethod
    async def start_on(
        cls, nodes: Nodes, node: Node, command: Command, files: Sequence[str], log: Path
    ) -> "ServerProcess":
        """Start the command on a node; it ends there when this process ends or no longer reaches the node."""
        reach = nodes.reach(node)
        process = await _start((_find(reach[0]), *reach[1:]), command, log, asyncio.subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(node_script(command.argv, command.env, files).encode())
        return cls(process, f"node {node.name}: {Path(command.argv[0]).name}", log)

    def is_alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.returncode is None

    async def wait(self) -> None:
        """Wait for the process to end by itself."""
        await self._process.wait()

    def death(self) -> str:
        """Describe how the process ended, with the end of its log."""
        code = self._process.returncode
        how = f"exit status {code}"
        if code == _LOST and self._process.stdin is not None:
            how += ", as when the connection to its node is lost"
        elif code is not None and (code < 0 or code > 128):
            number = -code if code < 0 else code - 128  # a shell's way to say it
            how = f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else how
        return f"{self._what} ended with {how}; {self.last_words()}"

    def last_words(self, num_lines: int = 5) -> str:
        """Return where the log is and its last lines."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
        return f"log {self.log.name} ends: {' | '.join(line.strip() for line in lines)[-600:]}"

    async def stop(self) -> None:
        """End the process and all it started: politely, then not."""
        if self._process.stdin is not None:  # on a node, whose shell takes this as the sign to end it
            self._process.stdin.close()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                pass  # the node does not answer; what runs there ends when it notices the same
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                continue
            if number == signal.SIGTERM:
                continue  # the leader is gone; workers it left behind get SIGKILL
        await self._process.wait()


async def _start(
    argv: Sequence[str], shown: Command, log: Path, stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {shown.shell()}\n".encode())
        output.flush()
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child runs first so that it ends when this process is killed, and does not keep its port."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def run() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before that
            os._exit(1)

    return run


def _find(program: str) -> str:
    """Return where a program lies: on the path, or, in an environment nobody activated, beside this Python."""
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        raise LaunchError(f"{program}: cannot be started, there is no such program. Is it installed?")
    return found
