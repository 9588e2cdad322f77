"""What a server needs to be started, and how settings become arguments; each server kind spells them its own way."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slipstream.launch.nodes import Nodes, Place
from slipstream.launch.settings import Draft, FlagValue, ServerName, Speculation, Topology
from slipstream.records.store import sha256_of


@dataclass(frozen=True)
class Launch:
    """One server, fully resolved: nothing is looked up after this."""

    server: ServerName
    program: tuple[str, ...]
    model: str
    revision: str | None
    port: int
    host: str | None
    topology: Topology
    context: int | None
    draft: Draft | None
    speculation: Speculation | None
    flags: dict[str, FlagValue]
    env: dict[str, str]
    image: str
    start_timeout_s: float
    nodes: Nodes | None = None

    def url(self) -> str:
        """Return where the client reaches this server: on its first node, or from the same machine."""
        anywhere = "127.0.0.1" if self.nodes is None else self.nodes.all()[0].address
        host = anywhere if self.host is None or self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Command:
    """A rendered command: what runs, in which environment, in which image."""

    argv: tuple[str, ...]
    env: dict[str, str]
    image: str = ""

    def shell(self) -> str:
        """Return the command as a person would type it."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "\n".join([*exports, shell_line(self.argv)])

    def sha256(self) -> str:
        """Identify the server: equal commands may share one process."""
        return sha256_of([self.argv, self.env, self.image])


class NodePart(NamedTuple):
    """What a server's command has on one of its nodes besides what it has on all."""

    flags: tuple[str, ...]
    env: dict[str, str]


class ServerKind(Protocol):
    """One kind of server: how it is started, and asked how it is."""

    health_path: str
    version_path: str

    def command(self, launch: Launch) -> Command:
        """Render the start command."""
        ...

    def node_part(self, nodes: Nodes, place: Place) -> NodePart:
        """Return what the command has besides on one of several nodes, in this engine's own words."""
        ...

    def refusal(self, launch: Launch) -> str:
        """Say what this engine cannot do of a launch, and what to do instead; nothing when it can do it all."""
        ...

    def version(self, document: Mapping[str, object]) -> str:
        """Read the server's version from what `version_path` answers."""
        ...


def render_flags(flags: Mapping[str, FlagValue], repeat: bool = False) -> list[str]:
    """Turn a mapping of flags into arguments, in its order.

    Args:
        repeat: give a flag again for each of its values, instead of once before all of them.
    """
    arguments: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        if repeat and isinstance(value, tuple):
            arguments += [word for item in value for word in (f"--{name}", str(item))]
            continue
        arguments.append(f"--{name}")
        if isinstance(value, tuple):
            arguments += [str(item) for item in value]
        elif value is not True:
            arguments.append(str(value))
    return arguments


def compact_json(value: object) -> str:
    """Render JSON the way it is written on a command line: no spaces, keys in the given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def shell_line(argv: tuple[str, ...]) -> str:
    """Lay a command out as one flag a line."""
    words = [shlex.quote(word) for word in argv]
    lines = [""]
    for word, quoted in zip(argv, words, strict=True):
        if word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] = f"{lines[-1]} {quoted}".strip()
    return " \\\n    ".join(lines)
