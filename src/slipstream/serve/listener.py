"""Listening: addresses, a bound on connections, and what happens when the system has no more descriptors.

asyncio's own listener takes everything that waits at once and logs each failure to; one at a time can be bounded.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.serve.connection import Connection
from slipstream.serve.errors import HttpError, too_many_connections

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_RESERVED = 16  # descriptors kept for files, pipes of child processes, and connections on their way in or out
_GRACE_S = 0.25  # for a request on its way: most clients send it as soon as they are connected
_PAUSE_S = 0.2
_QUIET_S = 60.0


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host, not listening yet; raises ConfigError if there is none to be had."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_bound(socket.socket(family, kind, protocol), address))
            except OSError as error:
                # localhost has an IPv6 address also where nothing speaks IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(found) == 1:
                    raise
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): choose another --port or --host, or "
            "stop the program that has it."
        ) from error
    return sockets


def connections_that_fit(wanted: int) -> int:
    """Return how many connections the process may have, at most `wanted`; raises its limit on descriptors if it can."""
    num_used = _num_open_files()
    needed = num_used + _RESERVED + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # a container may refuse what its hard limit allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    fitting = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - num_used - _RESERVED)
    if fitting < 1:
        raise ConfigError(
            f"The process may open {soft} files and has {num_used} open, which leaves no room for clients: raise the "
            "limit (ulimit -n)."
        )
    if fitting < wanted:
        logger.warning("at most %d connections: the limit on open files is %d (ulimit -n)", fitting, soft)
    return fitting


class Listener:
    """Accepts clients. At the bound, the connection that has kept the server waiting longest makes way for the next."""

    def __init__(
        self, make: Callable[[HttpError | None], Connection], connections: Collection[Connection], limit: int
    ) -> None:
        """Keep what is needed to accept.

        Args:
            make: returns the protocol of a new connection, which answers everything with the error, if there is one.
            connections: those that are open, kept up by their protocols.
            limit: the most of them.
        """
        self._make = make
        self._connections = connections
        self._limit = limit
        self._said: dict[str, float] = {}
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets that are bound."""
        for bound in sockets:
            bound.listen(_BACKLOG)
            bound.setblocking(False)
            self._sockets.append(bound)
            self._tasks.append(asyncio.create_task(self._accept(bound)))

    async def stop(self) -> None:
        """Accept nobody more; who calls from now on is told by the system that nobody listens."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bound in self._sockets:
            bound.close()

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(bound)
            except OSError as error:
                self._warn("clients cannot be accepted for now: %s (said once a minute)", error.strerror or error)
                self._make_way()
                await asyncio.sleep(_PAUSE_S)
                continue
            refusal = None if await self._has_room() else too_many_connections(self._limit)
            with contextlib.suppress(OSError):  # the client is gone already
                await loop.connect_accepted_socket(functools.partial(self._make, refusal), client)

    async def _has_room(self) -> bool:
        """Tell whether one more connection is within the bound, once another has made way; False: all have work."""
        while len(self._connections) >= self._limit:
            self._warn("%d connections: those idle longest make way for new ones (said once a minute)", self._limit)
            if not any(connection.waits for connection in self._connections):
                return False
            await asyncio.sleep(0 if self._make_way() else _GRACE_S / 20)
        return True

    def _make_way(self) -> bool:
        """Give up the connection that has waited longest for its client, if that is long enough."""
        waiting = [connection for connection in self._connections if connection.waits]
        oldest = min(waiting, key=lambda connection: connection.waits_since, default=None)
        if oldest is None or asyncio.get_running_loop().time() - oldest.waits_since < _GRACE_S:
            return False
        oldest.make_way(too_many_connections(self._limit))
        return True

    def _warn(self, text: str, value: object) -> None:
        """Say something once a minute at most; a flood of clients is no flood of the log."""
        now = asyncio.get_running_loop().time()
        if now - self._said.get(text, -_QUIET_S) >= _QUIET_S:
            self._said[text] = now
            logger.warning(text, value)


def _bound(made: socket.socket, address: Any) -> socket.socket:  # Any: its form depends on the family
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that listens is in the way all the same
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _num_open_files() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:  # not every container has it
        return 64
