"""A launch as the commands that make it: one process here, or one on each node, and Ray's before them if it is used."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slipstream.errors import ConfigError
from slipstream.launch import SERVERS
from slipstream.launch.command import Command, Launch
from slipstream.launch.nodes import Node, Nodes, Place, places


@dataclass(frozen=True)
class Process:
    """A command and where it runs; `node` is None for this machine."""

    node: Node | None
    command: Command


@dataclass(frozen=True)
class Spread:
    """Every process of one server.

    Args:
        cluster: Ray's, which are started first and have to have found each other.
        server: the engine's.
    """

    cluster: tuple[Process, ...]
    server: tuple[Process, ...]


def spread(launch: Launch) -> Spread:
    """Return the processes of a launch; ConfigError if its engine cannot do what it asks."""
    kind = SERVERS[launch.server]
    if refusal := kind.refusal(launch):
        raise ConfigError(refusal)
    if launch.nodes is None:
        return Spread((), (Process(None, kind.command(launch)),))
    launch.nodes.check(launch.topology)
    parts = tuple(zip(launch.nodes.all(), places(launch.nodes), strict=True))
    if launch.nodes.cluster == "ray":
        cluster = tuple(Process(node, ray_command(launch, place)) for node, place in parts)
        return Spread(cluster, tuple(Process(node, node_command(launch, place)) for node, place in parts[:1]))
    return Spread((), tuple(Process(node, node_command(launch, place)) for node, place in parts))


def node_command(launch: Launch, place: Place) -> Command:
    """Return the engine's command on one node."""
    nodes = _nodes(launch)
    kind = SERVERS[launch.server]
    command = kind.command(dataclasses.replace(launch, host=_host(launch, place)))
    part = kind.node_part(nodes, place)
    return Command((*command.argv, *part.flags), {**command.env, **part.env}, command.image)


def ray_command(launch: Launch, place: Place) -> Command:
    """Return the command that makes a node part of the Ray cluster, and ends when it no longer is."""
    node = ["--node-ip-address", place.address, "--disable-usage-stats", "--block"]
    if place.is_first:
        start = ["--head", "--port", str(place.port), "--include-dashboard", "false"]
    else:
        start = ["--address", f"{place.first}:{place.port}"]
    part = SERVERS[launch.server].node_part(_nodes(launch), place)
    env = {name: value for name, value in {**launch.env, **part.env}.items() if name != "RAY_ADDRESS"}
    return Command((beside_program(launch, "ray"), "start", *start, *node), env, launch.image)


def beside_program(launch: Launch, name: str) -> str:
    """Return a program of the environment that the engine's own program is from."""
    program = PurePosixPath(launch.program[0]) if launch.program else PurePosixPath(name)
    return str(program.with_name(name)) if len(program.parts) > 1 else name


def files_of(launch: Launch) -> tuple[str, ...]:
    """Return the files that every node needs; names of a hub are no files."""
    draft = launch.flags.get("draft") if launch.draft is None else launch.draft.path or launch.draft.id
    return tuple(name for name in (launch.model, draft) if isinstance(name, str) and Path(name).is_absolute())


def _host(launch: Launch, place: Place) -> str:
    """Return where the engine listens on a node: as asked on the first, and elsewhere only where that node can.

    A node's own name may lead to its loopback, so that a node which is only known by name listens everywhere.
    """
    own = place.address if place.has_address else "0.0.0.0"
    return launch.host if launch.host is not None and (place.is_first or launch.host == "0.0.0.0") else own


def _nodes(launch: Launch) -> Nodes:
    assert launch.nodes is not None, "only called for launches over several nodes"
    return launch.nodes
