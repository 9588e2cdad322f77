"""Starting the ranks: torchrun has started them already, or one process on each host starts the others there."""

import atexit
import datetime
import logging
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it, but not to type checkers

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.topology import Topology
from slipstream.ranks.channel import Follower, Leader, connect
from slipstream.ranks.hosts import (
    Hosts,
    accept_ranks,
    gloo_at,
    meet,
    own_address,
    peer_address,
    probe_connections,
    reach_first,
)

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ONE_HOST = Hosts()
_TIMEOUT = datetime.timedelta(seconds=120)
"""How long one exchange of tensors may take. Ranks that die are noticed at once; this is for one that hangs."""

O = TypeVar("O")  # noqa: E741 (the options handed through to a rank's program)


@dataclass(frozen=True)
class Seat:
    """This process's place: its ranks, its device, and its end of the channel (None for a lone rank)."""

    ranks: Ranks
    device: torch.device
    channel: Leader | Follower | None = None


def take_seat(
    topology: Topology, device: torch.device, program: Callable[[O, Seat], None], options: O, hosts: Hosts = _ONE_HOST
) -> Seat:
    """Start or join the ranks, and return this process's place among them.

    Args:
        program: what the other ranks run where this process starts them; an importable function, as is every option.
        hosts: which of several machines this is; each starts the ranks of its own.
    """
    if dist.is_torchelastic_launched():
        if hosts != _ONE_HOST:
            raise ConfigError("torchrun knows the nodes already: leave --nnodes, --node-rank and --rendezvous to it.")
        return _join_torchrun(topology, device)
    local = hosts.local_ranks(topology)
    if topology.tp == 1:
        return Seat(ALONE, device)
    _check_gpus(len(local), device)
    if dist.is_initialized():
        raise ConfigError("This process holds part of a split model already; close that first.")
    threads = max(1, torch.get_num_threads() // len(local))
    torch.set_num_threads(threads)
    if hosts == _ONE_HOST:
        store = TCPStore(_HOST, 0, topology.tp, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    else:
        store = meet(hosts, topology)
    places = [_Place(r, topology, _device_of(device, r - local.start), store.port, threads, hosts) for r in local]
    if hosts.node_rank > 0:
        channel = Follower(reach_first(store, hosts, topology, places[0].rank))
        _start_others(places[1:], program, options)
        channel.answer("up")
        return _sit(places[0], store, channel)
    elsewhere = {} if hosts == _ONE_HOST else accept_ranks(store, hosts, topology)
    here = _start_others(places[1:], program, options)
    addresses = {rank: peer_address(connection) for rank, connection in elsewhere.items()}
    leader = Leader({**here.connections, **elsewhere}, here.processes, addresses)
    atexit.register(leader.close)
    try:
        leader.collect()  # every other rank has come up
        return _sit(places[0], store, leader)
    except BaseException:
        leader.close()
        raise


def leave(seat: Seat) -> None:
    """End the other ranks, if this is the first, and part from them."""
    lost = False
    if isinstance(seat.channel, Leader):
        atexit.unregister(seat.channel.close)
        seat.channel.close()
        lost = seat.channel.has_lost
    # A group whose exchanges were aborted is gone already; to destroy it again may abort the process.
    if seat.ranks.group is not None and dist.is_initialized() and not lost:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Place:
    rank: int
    topology: Topology
    device: torch.device
    port: int
    threads: int
    hosts: Hosts


class _Started(NamedTuple):
    connections: dict[int, Connection]
    processes: dict[int, BaseProcess]


def _start_others(places: list[_Place], program: Callable[[O, Seat], None], options: O) -> _Started:
    spawn = multiprocessing.get_context("spawn")
    connections: dict[int, Connection] = {}
    processes: dict[int, BaseProcess] = {}
    for place in places:
        connections[place.rank], theirs = spawn.Pipe()
        processes[place.rank] = spawn.Process(
            target=_other_rank, args=(place, theirs, program, options), name=f"rank {place.rank}", daemon=True
        )
        processes[place.rank].start()
        theirs.close()  # so that the pipe ends when the process does
        logger.info("rank %d is process %d", place.rank, processes[place.rank].pid)
    return _Started(connections, processes)


def _other_rank(place: _Place, connection: Connection, program: Callable[[O, Seat], None], options: O) -> None:
    """Be one of the other ranks, from start to end; a failure is the first rank's to report."""
    torch.set_num_threads(place.threads)
    if place.hosts.node_rank > 0:  # this host's first process started it, but the first host's leads
        store = meet(place.hosts, place.topology)
        connection = reach_first(store, place.hosts, place.topology, place.rank)
    else:
        store = TCPStore(_HOST, place.port, place.topology.tp, is_master=False, timeout=_TIMEOUT)
    channel = Follower(connection)
    channel.answer("up")
    run_other(_sit(place, store, channel), program, options)


def run_other(seat: Seat, program: Callable[[O, Seat], None], options: O) -> None:
    """Run another rank's program; what it fails with is told to the first rank, and ends this process."""
    assert isinstance(seat.channel, Follower), "the first rank leads"
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the first rank's: it drains, then ends the others
        signal.signal(number, signal.SIG_IGN)
    try:
        program(options, seat)
    except SlipstreamError as error:  # a sentence, which the first rank shows
        seat.channel.fail(error)
        raise SystemExit(1) from error
    except Exception as error:
        seat.channel.fail(error)
        raise
    leave(seat)


def _sit(place: _Place, store: TCPStore, channel: Leader | Follower) -> Seat:
    """Join the process group."""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    if backend == "gloo" and place.hosts != _ONE_HOST:
        backend = gloo_at(own_address(store, place.hosts))
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.topology.tp, timeout=_TIMEOUT)
    if place.hosts != _ONE_HOST:
        probe_connections()
    return _seat(place.topology, place.device, channel)


def _seat(topology: Topology, device: torch.device, channel: Leader | Follower | None) -> Seat:
    group = dist.group.WORLD
    assert group is not None, "the process group was just joined"
    ranks = Ranks(dist.get_rank(), topology.tp, topology.ep, group)
    channel = connect(ranks) if channel is None else channel
    if isinstance(channel, Leader):
        channel.free_on_loss(group)
    return Seat(ranks, device, channel)


def _join_torchrun(topology: Topology, device: torch.device) -> Seat:
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    size = dist.get_world_size()
    if topology.tp != size:
        raise ConfigError(f"tp is {topology.tp}, but torchrun started {size} processes; make them the same.")
    return Seat(ALONE, device) if size == 1 else _seat(topology, device, None)


def _check_gpus(tp: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if ":" in str(device):
        raise ConfigError(f"device is {device}, one GPU, and tp is {tp}; say cuda, and each rank takes a GPU.")
    if tp > count:
        raise ConfigError(f"tp is {tp}, but this machine has {count} GPUs; each rank takes one.")


def _device_of(device: torch.device, rank: int) -> torch.device:
    return torch.device("cuda", rank) if device.type == "cuda" else device
