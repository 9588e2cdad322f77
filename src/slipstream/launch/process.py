"""A server process from start to stop: its log is kept, health is awaited, and nothing of it is left behind."""

import asyncio
import ctypes
import http.client
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.errors import SlipstreamError
from slipstream.launch.command import Command

POLL_S = 0.25
STOP_S = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LaunchError(SlipstreamError):
    """A server could not be started, or did not become healthy in time."""


class ServerProcess:
    """One running server and its log file."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self._process = process
        self.url = url
        self.log = log

    @classmethod
    async def start(cls, command: Command, url: str, log: Path) -> "ServerProcess":
        """Start the command in its own process group, its settings over our environment; output goes to `log`."""
        await _refuse_if_taken(url)
        program = _find(command.argv[0])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            output.write(f"$ {command.shell()}\n".encode())
            output.flush()
            process = await asyncio.create_subprocess_exec(
                "env",
                *(f"{name}={value}" for name, value in command.env.items()),
                program,
                *command.argv[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        return cls(process, url, log)

    def is_alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.returncode is None

    async def death_within(self, seconds: float) -> str:
        """Wait a little for the process to end; describe its end, or return nothing when it lives on."""
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return ""
        return self.death()

    def death(self) -> str:
        """Describe how the process ended, with the end of its log."""
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return f"the server ended with {how}; {self.last_words()}"

    def last_words(self, num_lines: int = 5) -> str:
        """Return where the log is and its last lines."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
        return f"log {self.log.name} ends: {' | '.join(line.strip() for line in lines)[-600:]}"

    async def wait_healthy(self, path: str, timeout_s: float) -> None:
        """Wait until the health page answers, the process ends, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            if not self.is_alive():
                raise LaunchError(self.death())
            if await asyncio.to_thread(is_healthy, self.url + path):
                return
            await asyncio.sleep(POLL_S)
        raise LaunchError(f"the server was not healthy within {timeout_s:g} s; {self.last_words()}")

    async def stop(self) -> None:
        """End the whole process group: politely, then not."""
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


def is_healthy(url: str) -> bool:
    """Say whether a health page answers 200 within two seconds."""
    address = urlsplit(url)
    assert address.hostname is not None, url
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=2.0)
    try:
        connection.request("GET", address.path)
        return connection.getresponse().status == 200
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _find(program: str) -> str:
    """Return where a program lies: on the path, or, in an environment nobody activated, beside this Python."""
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        raise LaunchError(f"{program}: cannot be started, there is no such program. Is it installed?")
    return found


async def _refuse_if_taken(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        _refuse_if_held(url, host, int(port))
        return
    writer.close()
    raise LaunchError(f"{url}: something already listens there, and would be measured instead. Stop it or change port.")


def _refuse_if_held(url: str, host: str, port: int) -> None:
    """Refuse a port that a connection of another program has, before a server is started that cannot have it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"{url}: a server cannot listen there: {error.strerror}. Change the server's port in the recipe; "
                "below 32768 none is given to outgoing connections."
            ) from error
