"""How ranks speak beside their tensors: the first tells the others what to run, and everybody sees who dies.

Each of the others holds a socket to the first. The kernel closes it when a process ends, however it ends, so a death
is seen at once, by the thread that listens, even where the engine's own thread is stuck waiting for a dead peer.
"""

import io
import logging
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import RankLostError
from slipstream.models.parallel import Ranks

logger = logging.getLogger(__name__)

_GRACE_S = 3.0
ORPHANED = 71
"""Exit code of a rank that lost the first (EX_OSERR, as shells know it)."""


@dataclass(frozen=True)
class _Failed:
    """A rank's last words."""

    reason: str


@dataclass(frozen=True)
class _End:
    """The first rank is done; the others end once they have run what came before."""


@dataclass(frozen=True)
class _Abandon:
    """A rank was lost; the others end at once."""


class Leader:
    """The first rank's end: sends to all others, collects their answers, and notices when one is lost.

    Args:
        processes: those of the others that this process started, by rank; their exit codes are known.
        elsewhere: the addresses of those on other hosts, by rank.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        processes: Mapping[int, BaseProcess],
        elsewhere: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._connections = dict(connections)
        self._processes = dict(processes)
        self._elsewhere = dict(elsewhere)
        self._group: dist.ProcessGroup | None = None
        self._answers: dict[int, queue.SimpleQueue[Any]] = {rank: queue.SimpleQueue() for rank in connections}
        self._lost: RankLostError | None = None
        self._is_lost = threading.Event()
        self._closed = False
        self._callbacks: list[Callable[[RankLostError], None]] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    def free_on_loss(self, group: dist.ProcessGroup) -> None:
        """Abort the group's exchanges when a rank is lost, so that nobody waits for the dead."""
        self._group = group

    def send(self, message: object) -> None:
        """Tell every other rank; raises RankLostError if one is gone."""
        if self._lost is not None:
            raise self._lost
        try:
            for connection in self._connections.values():
                _send(connection, message)
        except OSError as error:
            raise self.failure(error) from error

    def collect(self) -> list[Any]:
        """Wait for one answer of each other rank and return them in the order of ranks."""
        found = []
        for answers in self._answers.values():
            answer = answers.get()
            if isinstance(answer, RankLostError):
                raise answer
            found.append(answer)
        return found

    @property
    def has_lost(self) -> bool:
        """Whether a rank was lost, and the group with it."""
        return self._is_lost.is_set()

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back once, from another thread, when a rank is lost."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._callbacks.append(callback)
        if lost is not None:
            callback(lost)

    def failure(self, error: Exception) -> RankLostError:
        """Return what a failed exchange means: the rank that died, if one did; whatever it was, the group is over."""
        if not self._is_lost.wait(_GRACE_S):
            self._lose(RankLostError(f"The ranks fell out of step ({type(error).__name__}: {error}). Start again."))
        assert self._lost is not None
        return self._lost

    def close(self) -> None:
        """End the other ranks; nothing is left running."""
        if self._closed:
            return
        self._closed = True
        self._tell(_End())
        self._thread.join(_GRACE_S)  # it sees the others' ends
        self._reap()
        for connection in self._connections.values():
            connection.close()

    def _listen(self) -> None:
        """Collect answers until a connection ends."""
        by_connection = {connection: rank for rank, connection in self._connections.items()}
        while not self._closed and self._lost is None:
            for ready in wait(list(by_connection)):
                assert isinstance(ready, Connection)
                rank = by_connection[ready]
                try:
                    message = _receive(ready)
                except (EOFError, OSError) as error:
                    if not self._closed:
                        self._lose(RankLostError(f"Rank {rank} {self._fate(rank, error)}; the other ranks were ended."))
                    return
                if isinstance(message, _Failed):
                    if not self._closed:  # while all end, nobody is missed
                        reason = message.reason
                        self._lose(RankLostError(f"Rank {rank} failed ({reason}); the other ranks were ended."))
                    return
                self._answers[rank].put(message)

    def _fate(self, rank: int, error: Exception) -> str:
        process = self._processes.get(rank)
        if rank in self._elsewhere:
            host = self._elsewhere[rank]
            if isinstance(error, EOFError | ConnectionResetError):
                return f"on host {host} ended (the log there says why)"
            return f"is lost: host {host} does not answer any more ({error})"
        if process is None:
            return "closed its connection (its launcher's log has its exit code)"
        process.join(_GRACE_S)
        code = process.exitcode
        if code is None:
            return f"(process {process.pid}) closed its connection and hangs"
        if code < 0:
            return f"(process {process.pid}) was killed by {signal.Signals(-code).name}"
        return f"(process {process.pid}) ended with exit code {code}"

    def _lose(self, lost: RankLostError) -> None:
        """Note the loss, free whoever waits for the dead rank, end the others, and tell."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
            callbacks, self._callbacks = self._callbacks, []
        self._is_lost.set()
        logger.error("%s", lost)
        for answers in self._answers.values():
            answers.put(lost)
        if self._group is not None:
            self._group.abort()
        self._tell(_Abandon())
        for callback in callbacks:
            callback(lost)
        self._reap()

    def _tell(self, last: _End | _Abandon) -> None:
        for connection in self._connections.values():
            try:
                _send(connection, last)
            except OSError:  # it is gone already, which is what was wanted
                continue

    def _reap(self) -> None:
        for process in self._processes.values():
            process.join(_GRACE_S)
            if process.exitcode is None:
                process.kill()
                process.join()


class Follower:
    """Another rank's end: takes what the first sends, in order; ends the process when the first is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    def receive(self) -> Any | None:
        """Return the next message (whatever the first rank sent); None when it is done."""
        message = self._messages.get()
        return None if isinstance(message, _End) else message

    def answer(self, message: object) -> None:
        """Answer the first rank."""
        _send(self._connection, message)

    def fail(self, error: BaseException) -> None:
        """Tell the first rank why this one cannot go on."""
        try:
            _send(self._connection, _Failed(f"{type(error).__name__}: {error}"))
        except OSError:
            logger.error("the first rank is gone; nobody can be told of: %s", error)

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                message = _receive(self._connection)
            except Exception as error:  # noqa: BLE001 (the main thread may wait for the first rank inside a collective)
                logger.error("the first rank is gone, and this rank ends as well (%s: %s)", type(error).__name__, error)
                os._exit(ORPHANED)  # nothing less frees the main thread
            if isinstance(message, _Abandon):
                os._exit(ORPHANED)
            if isinstance(message, _End):
                self._over.set()
            self._messages.put(message)


def connect(ranks: Ranks) -> Leader | Follower:
    """Open sockets between the first rank and the others, whoever started them; all ranks call this together."""
    hosts: list[str] = [""] * ranks.size
    dist.all_gather_object(hosts, socket.gethostname(), group=ranks.group)
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    key = [secrets.token_bytes(32)]
    dist.broadcast_object_list(key, src=0, group=ranks.group)
    if ranks.rank == 0:
        with Listener((host, 0), backlog=ranks.size, authkey=key[0]) as listener:
            dist.broadcast_object_list([listener.address], src=0, group=ranks.group)
            accepted = [listener.accept() for _ in range(ranks.size - 1)]
        return Leader({_receive(connection): connection for connection in accepted}, {})
    address: list[Any] = [None]
    dist.broadcast_object_list(address, src=0, group=ranks.group)
    connection = Client(address[0], authkey=key[0])
    _send(connection, ranks.rank)
    return Follower(connection)


class _Pickler(pickle.Pickler):
    """Pickles tensors by value. What torch does to multiprocessing's pickles shares memory, for processes it forked."""

    def reducer_override(self, obj: object) -> Any:  # as pickle has it
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.cpu().numpy(),)
        return NotImplemented


def _send(connection: Connection, message: object) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(buffer.getbuffer())


def _receive(connection: Connection) -> Any:
    """Return the next message, from a process that knows the key or that this one started."""
    return pickle.loads(connection.recv_bytes())
