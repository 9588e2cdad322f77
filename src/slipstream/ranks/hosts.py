"""Several machines as one group of ranks: where they meet, how each reaches the first, and how soon a dead one is seen.

The kernel closes a dead process's sockets, but nobody closes those of a machine that lost power or its network. The
sockets between hosts therefore probe each other, and a host that stays silent counts as dead.
"""

import datetime
import json
import logging
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported, but not to type checkers

from slipstream.errors import ConfigError
from slipstream.models.topology import Topology

logger = logging.getLogger(__name__)

MEET_S = 600.0
"""How long hosts wait for each other: images are pulled and jobs queued at different speeds."""
SILENCE_S = 6
"""How long a host may leave probes unanswered."""
_EXCHANGE_SILENCE_S = 8  # of tensors: later, so that the loss is known by its name when an exchange fails
GLOO = "gloo_at_address"
_SHAKE_S = 20
_INVITATION, _ADDRESS = "slipstream/invitation", "slipstream/address"


@dataclass(frozen=True)
class Hosts:
    """Which of several machines this is, in torchrun's words.

    Args:
        nnodes: machines, each with as many of the ranks as the others.
        node_rank: which one this is; 0 has the first rank, and with it the server.
        rendezvous: HOST:PORT of the first machine, where the others find it. Nothing secures it: whoever reaches the
            port may join, as with torchrun.
    """

    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""

    def __post_init__(self) -> None:
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank is {self.node_rank} of {self.nnodes} nodes; they are counted from 0.")
        if self.nnodes > 1:
            host, _, port = self.rendezvous.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(
                    f"rendezvous is {self.rendezvous!r}; with {self.nnodes} nodes it is HOST:PORT of the first, the "
                    "same on all of them."
                )

    @property
    def first(self) -> tuple[str, int]:
        """Where the first host is met."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)

    def local_ranks(self, topology: Topology) -> range:
        """Return the ranks of this host; ConfigError if they cannot be dealt evenly."""
        each, left = divmod(topology.tp, self.nnodes)
        if left or not each:
            raise ConfigError(f"tp is {topology.tp} and nnodes is {self.nnodes}; every node has as many of the ranks.")
        return range(each * self.node_rank, each * (self.node_rank + 1))


def meet(hosts: Hosts, topology: Topology) -> TCPStore:
    """Open the store that all hosts share: the first holds it, the others wait until it is there."""
    host, port = hosts.first
    is_first = hosts.node_rank == 0
    timeout = datetime.timedelta(seconds=MEET_S)
    if not is_first:
        logger.info("looking for the first of %d nodes at %s", hosts.nnodes, hosts.rendezvous)
    try:
        return TCPStore(host, port, topology.tp, is_master=is_first, wait_for_workers=False, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).strip().splitlines()[0]
        if is_first:
            raise ConfigError(f"rendezvous {hosts.rendezvous}: cannot be listened on here ({reason}).") from error
        raise ConfigError(
            f"rendezvous {hosts.rendezvous}: the first node was not there within {MEET_S:g} s ({reason}). Start it "
            "with --node-rank 0, and check that this machine can reach that port."
        ) from error


def accept_ranks(store: TCPStore, hosts: Hosts, topology: Topology) -> dict[int, Connection]:
    """Return the first rank's connections to the ranks of all other hosts, once every one of them has come."""
    missing = set(range(len(hosts.local_ranks(topology)), topology.tp))
    key = secrets.token_bytes(32)
    found: dict[int, Connection] = {}
    family = socket.getaddrinfo(*hosts.first, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server(("", 0), family=family, backlog=topology.tp) as listener:
        says = _Invitation(listener.getsockname()[1], key.hex(), hosts.nnodes, asdict(topology))
        store.set(_INVITATION, json.dumps(asdict(says)))
        logger.info("waiting for %d more nodes at %s (--node-rank 1 and up)", hosts.nnodes - 1, hosts.rendezvous)
        deadline = time.monotonic() + MEET_S
        while missing:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                raise ConfigError(
                    f"Ranks {', '.join(map(str, sorted(missing)))} have not come to {hosts.rendezvous} within "
                    f"{MEET_S:g} s. Start slipstream on every node, with the same options but for --node-rank."
                ) from None
            store.set(_ADDRESS, accepted.getsockname()[0])
            connection = _shaken(accepted, key, first=True)
            if connection is not None:
                rank = int.from_bytes(connection.recv_bytes(), "little")
                missing.discard(rank)
                found[rank] = connection
    return found


def reach_first(store: TCPStore, hosts: Hosts, topology: Topology, rank: int) -> Connection:
    """Return another host's connection to the first rank."""
    says = _Invitation(**json.loads(store.get(_INVITATION)))
    if (says.nnodes, says.topology) != (hosts.nnodes, asdict(topology)):
        raise ConfigError(
            f"The first node splits the model as {_words(says.nnodes, says.topology)}, this one as "
            f"{_words(hosts.nnodes, asdict(topology))}; start all of them with the same options."
        )
    opened = socket.create_connection((hosts.first[0], says.port), timeout=_SHAKE_S)
    connection = _shaken(opened, bytes.fromhex(says.key), first=False)
    if connection is None:
        raise ConfigError(f"{hosts.rendezvous}: the first node did not take this one in. Start all of them again.")
    connection.send_bytes(rank.to_bytes(4, "little"))
    return connection


def own_address(store: TCPStore, hosts: Hosts) -> str:
    """Return the address under which the other hosts reach this one: the one its way to the first host has.

    The first host's own name may lead to its loopback (Debian's does), so it takes the address the others came to.
    """
    if hosts.node_rank == 0:
        return str(store.get(_ADDRESS).decode())
    with socket.create_connection(hosts.first, timeout=_SHAKE_S) as opened:
        return str(opened.getsockname()[0])


def peer_address(connection: Connection) -> str:
    """Return the address of the host at the other end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as opened:
        return str(opened.getpeername()[0])


def gloo_at(address: str) -> str:
    """Return the name of a gloo that listens at the address; torch's own takes whatever the host's name leads to."""

    def create(
        store: Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> dist.ProcessGroupGloo:  # as `register_backend` calls it
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # nothing public names a device
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    if GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(GLOO, create, devices=["cpu"])
    return GLOO


def probe_connections() -> None:
    """Probe whatever this process is connected to by now: the store, and the ranks that gloo exchanges tensors with.

    Gloo cannot abort an exchange: it ends when its sockets do.
    """
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        number = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        except OSError:  # closed since it was listed
            continue
        with socket.socket(fileno=os.dup(number)) as opened:
            is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
            if is_tcp and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):  # others have their limit
                _probe(opened, _EXCHANGE_SILENCE_S)


@dataclass(frozen=True)
class _Invitation:
    """What the first host tells the others through the store."""

    port: int
    key: str
    nnodes: int
    topology: Mapping[str, int]


def _shaken(opened: socket.socket, key: bytes, first: bool) -> Connection | None:
    """Return a connection to a process that knows the key, and that is given up when it falls silent; None for others.

    Args:
        first: whether this side asks first.
    """
    opened.settimeout(None)
    _probe(opened, SILENCE_S)
    _limit(opened, _SHAKE_S)
    connection = Connection(os.dup(opened.fileno()))
    steps = (deliver_challenge, answer_challenge)
    try:
        for step in steps if first else steps[::-1]:
            step(connection, key)
    except (AuthenticationError, EOFError, OSError):
        connection.close()
        return None
    finally:
        _limit(opened, 0)
        opened.close()
    return connection


def _probe(opened: socket.socket, silence_s: int) -> None:
    """Let the kernel ask after the peer every second or two, and report it dead after so long."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence_s - 2)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)  # data on its way


def _limit(opened: socket.socket, seconds: int) -> None:
    """Let reads end after so long (0: never), also those that go past Python's own time-out."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


def _words(nnodes: int, topology: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in {"nnodes": nnodes, **topology}.items())
