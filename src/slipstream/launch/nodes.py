"""The machines a server runs on, and how a command gets to each: by a remote shell, tied to this process's life."""

import ipaddress
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.launch.settings import Topology

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=2 -o ServerAliveCountMax=3 {node}"
"""Notices within 6 s that a node has gone, and asks nobody for a password."""
ABSENT = 66
"""Exit status of a node that lacks a file (EX_NOINPUT)."""
_GRACE_S = 20


@dataclass(frozen=True)
class Node:
    """One machine: what the remote shell calls it, and the address the other machines reach it by."""

    name: str
    address: str


@dataclass(frozen=True)
class Nodes:
    """The machines that one server is spread over; the first has its address.

    Args:
        hosts: names, or NAME=ADDRESS where the others reach a machine by another address than the remote shell does.
        rsh: the words that run a program on a node; {node} is its name. `kubectl exec -i {node} --` would do, too.
        cluster: `own` starts the engine's processes by its own multi-node flags, `ray` starts Ray and lets it.
        port: of the first node, where the others find it.
        interface: network interface for the engine's exchanges, where its own choice is wrong.
    """

    hosts: tuple[str, ...]
    rsh: str = SSH
    cluster: Literal["own", "ray"] = "own"
    port: int = 29500
    interface: str | None = None

    def __post_init__(self) -> None:
        names = [node.name for node in self.all()]
        if len(names) < 2 or len(set(names)) < len(names) or not all(node.name and node.address for node in self.all()):
            raise ConfigError(f"nodes are {', '.join(self.hosts) or 'none'}; name at least two, each once.")
        if "{node}" not in self.rsh:
            raise ConfigError(f"rsh is {self.rsh!r}; it must say {{node}} where the node's name belongs.")
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port} of the nodes does not exist.")

    def all(self) -> tuple[Node, ...]:
        """Return the machines in their order."""
        pairs = (host.partition("=") for host in self.hosts)
        return tuple(Node(name.strip(), (address or name).strip()) for name, _, address in pairs)

    def check(self, topology: Topology) -> None:
        """Raise ConfigError unless every node gets as many of the engine's processes."""
        if topology.devices() % len(self.hosts):
            raise ConfigError(
                f"{topology.name()} takes {topology.devices()} devices in all, which {len(self.hosts)} nodes cannot "
                "share evenly. Change tp or pp, or the nodes."
            )

    def reach(self, node: Node) -> tuple[str, ...]:
        """Return the command that runs a shell on a node; what it runs is read from its standard input."""
        return tuple(word.replace("{node}", node.name) for word in (*shlex.split(self.rsh), "sh"))


@dataclass(frozen=True)
class Place:
    """One node's part in a server, as the engine's flags say it; text, for a manifest fills it in when it runs."""

    rank: str
    count: int
    address: str
    first: str
    port: int
    is_first: bool

    @property
    def has_address(self) -> bool:
        """Whether the address is one, or a job's variable that will hold one, and not a name."""
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            return self.address.startswith("@")
        return True


def places(nodes: Nodes) -> tuple[Place, ...]:
    """Return every node's part."""
    first = nodes.all()[0].address
    return tuple(
        Place(str(rank), len(nodes.hosts), node.address, first, nodes.port, rank == 0)
        for rank, node in enumerate(nodes.all())
    )


def exchange_interface(nodes: Nodes) -> dict[str, str]:
    """Return the variables by which gloo and NCCL (and RCCL) are told their interface."""
    return (
        {} if nodes.interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), nodes.interface)
    )


def node_script(argv: Sequence[str], env: dict[str, str], files: Sequence[str]) -> str:
    """Return what a node's shell runs: the command, until it ends or the shell's standard input does.

    The input is held open by this process. When it closes, because the server is stopped, because this process was
    killed or because the network went, the node ends the command and everything it started.

    Args:
        files: what has to be there before the command may start.
    """
    absent = " ".join(map(shlex.quote, files))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines = [
        "{",  # read whole before it runs, so that the watcher reads nothing of it
        f"for file in {absent}; do" if files else "for file in; do",
        f'  [ -e "$file" ] || {{ echo "$file: is not on this node. Every node needs it under this name." >&2; '
        f"exit {ABSENT}; }}",
        "done",
        *exports,
        "exec 3<&0",
        f"setsid {shlex.join(argv)} </dev/null 3<&- &",
        "server=$!",
        "{",
        "  while read -r line <&3; do :; done",
        "  kill -s TERM -- -$server",
        f"  for second in $(seq {_GRACE_S}); do kill -s 0 -- -$server || break; sleep 1; done",
        "  kill -s KILL -- -$server",
        "} >/dev/null 2>&1 &",
        "watcher=$!",
        "exec 3<&- </dev/null",
        "wait $server",
        "status=$?",
        "kill -s KILL -- -$server 2>/dev/null",  # what it left behind
        "kill -s KILL $watcher 2>/dev/null",
        "exit $status",
        "}",
    ]
    return "\n".join(lines) + "\n"
