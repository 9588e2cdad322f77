"""A running server, on this machine or several: started, awaited until healthy, watched, and stopped as one."""

import asyncio
import http.client
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.launch import SERVERS
from slipstream.launch.command import Command, Launch
from slipstream.launch.process import LaunchError, ServerProcess
from slipstream.launch.spread import Process, beside_program, files_of, spread

POLL_S = 0.25
_ACTIVE = re.compile(r"^Active:\n((?: .*\n)*)", re.MULTILINE)


class Server:
    """The processes of one server; it lives while all of them do."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._launch = launch
        self._log = log
        self._running: list[ServerProcess] = []
        self._ended: list[ServerProcess] = []  # in the order in which they did
        self._watchers: list[asyncio.Task[None]] = []
        self.url = launch.url()

    @classmethod
    async def start(
        cls, launch: Launch, log: Path, placed: Callable[[Command], Command] = lambda command: command
    ) -> "Server":
        """Start every process, each with a log of its own beside `log`; LaunchError if one cannot be.

        Args:
            placed: returns an engine's command as it is really run, in a container, say.
        """
        processes = spread(launch)
        await _refuse_if_taken(launch)
        server = cls(launch, log)
        try:
            await server._start(processes.cluster, "-ray")
            if processes.cluster:
                await server._wait_joined(len(processes.cluster))
            await server._start([replace(process, command=placed(process.command)) for process in processes.server])
        except BaseException:
            await server.stop()
            raise
        return server

    def is_alive(self) -> bool:
        """Say whether all of it still runs."""
        return all(process.is_alive() for process in self._running)

    async def wait_ended(self) -> None:
        """Wait until the first of its processes ends."""
        await asyncio.wait(self._watchers, return_when=asyncio.FIRST_COMPLETED)

    async def death_within(self, seconds: float) -> str:
        """Wait a little for a process to end; describe its end, or return nothing when all live on."""
        try:
            async with asyncio.timeout(seconds):
                await self.wait_ended()
        except TimeoutError:
            return ""
        return self.death()

    def death(self) -> str:
        """Describe how it ended: the process that was the first to."""
        return self._ended[0].death()

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the health page answers, a process ends, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        page = self.url + SERVERS[self._launch.server].health_path
        while loop.time() < deadline:
            if self._ended:
                raise LaunchError(self.death())
            if await asyncio.to_thread(is_healthy, page):
                return
            await asyncio.sleep(POLL_S)
        raise LaunchError(f"the server was not healthy within {timeout_s:g} s; {self._running[0].last_words()}")

    async def stop(self) -> None:
        """End every process on every node."""
        await asyncio.gather(*(process.stop() for process in self._running))
        await asyncio.gather(*self._watchers)

    async def _start(self, processes: Sequence[Process], suffix: str = "") -> None:
        for process in processes:
            command, nodes = process.command, self._launch.nodes
            if process.node is None or nodes is None:
                started = await ServerProcess.start(command, self._log)
            else:
                log = self._log.with_stem(f"{self._log.stem}-{process.node.name}{suffix}")
                started = await ServerProcess.start_on(nodes, process.node, command, files_of(self._launch), log)
            self._running.append(started)
            self._watchers.append(asyncio.create_task(self._watch(started)))

    async def _watch(self, process: ServerProcess) -> None:
        await process.wait()
        self._ended.append(process)

    async def _wait_joined(self, count: int) -> None:
        """Wait until Ray has found as many nodes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._launch.start_timeout_s
        joined = 0
        while joined < count:
            if self._ended:
                raise LaunchError(self.death())
            if loop.time() > deadline:
                raise LaunchError(
                    f"{joined} of {count} nodes are in the Ray cluster after {self._launch.start_timeout_s:g} s; "
                    f"{self._running[-1].last_words()}"
                )
            await asyncio.sleep(POLL_S)
            joined = await self._num_joined()

    async def _num_joined(self) -> int:
        nodes = self._launch.nodes
        assert nodes is not None, "Ray is started on nodes only"
        first = nodes.all()[0]
        asking = await asyncio.create_subprocess_exec(
            *nodes.reach(first),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        status = f"exec {beside_program(self._launch, 'ray')} status --address {first.address}:{nodes.port}\n"
        said, _ = await asking.communicate(status.encode())
        return num_active(said.decode(errors="replace"))


def num_active(status: str) -> int:
    """Read from what `ray status` says how many nodes are in the cluster."""
    found = _ACTIVE.search(status)
    return sum(int(line.split()[0]) for line in found[1].splitlines() if line.split()[0].isdigit()) if found else 0


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


async def _refuse_if_taken(launch: Launch) -> None:
    url = launch.url()
    host, port = urlsplit(url).hostname, launch.port
    assert host is not None, url
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        if launch.nodes is None:
            _refuse_if_held(url, host, port)
        return
    writer.close()
    raise LaunchError(f"{url}: something already listens there, and would be measured instead. Stop it or change port.")


def _refuse_if_held(url: str, host: str, port: int) -> None:
    """Refuse a port that a connection of another program has, before a server is started that cannot have it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"{url}: a server cannot listen there: {error.strerror}. Change the server's port in the recipe; "
                "below 32768 none is given to outgoing connections."
            ) from error
