"""What becomes of other servers' flags and environment variables, read from `launch_flags.toml`."""

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

Fate = Literal["mapped", "not_needed", "refused"]
Arity = Literal["", "V", "V?", "V*"]
"""The words behind a flag: none, one, one or none, any number."""


@dataclass(frozen=True)
class Flag:
    """One flag of another server.

    Args:
        negatable: `--no-...` exists, too; it asks for nothing that is not done anyway.
        why: the end of a sentence about a flag that is not needed or refused.
        nothing: values of a refused flag that ask for nothing.
        ours: the flag it becomes; a dotted one is a key of that flag's JSON object.
        values: values that have another name here; an empty one leaves the flag out.
        json_list: the value is a JSON list, and ours is repeated.
    """

    name: str
    arity: Arity
    fate: Fate
    negatable: bool = False
    why: str = ""
    nothing: tuple[str, ...] = ()
    ours: str = ""
    values: dict[str, str] = field(default_factory=dict)
    json_list: bool = False

    def asks_for_nothing(self, values: list[str]) -> bool:
        """Tell whether a refused flag's values are what is done anyway."""
        return bool(values) and all(any(_equal(value, known) for known in self.nothing) for value in values)


@dataclass(frozen=True)
class Variable:
    """One environment variable of published launch lines."""

    name: str
    why: str
    refused: bool = False


@dataclass(frozen=True)
class LaunchTable:
    """All of them: flags by name, short flags' long names, and environment variables by name."""

    flags: dict[str, Flag]
    short: dict[str, str]
    variables: dict[str, Variable]


@functools.cache
def launch_table() -> LaunchTable:
    """Return the table."""
    text = resources.files("slipstream.serve").joinpath("launch_flags.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    flags = [_flag(fate, block, entry) for fate in _FATES for block in data[fate] for entry in block["flags"]]
    variables = [
        Variable(name, block["why"], block.get("refused", False))
        for block in data["environment"]
        for name in block["names"]
    ]
    table = LaunchTable({flag.name: flag for flag in flags}, data["short"], {one.name: one for one in variables})
    assert len(table.flags) == len(flags), "a flag has one fate"
    return table


_FATES: tuple[Fate, ...] = ("mapped", "not_needed", "refused")


def _flag(fate: Fate, block: dict[str, Any], entry: str) -> Flag:  # TOML holds anything
    head, _, nothing = entry.partition(" = ")
    name, _, arity = head.partition(" ")
    assert arity in ("", "V", "V?", "V*"), entry
    return Flag(
        name.replace("[no-]", ""),
        arity,  # type: ignore[arg-type]  # checked above
        fate,
        "[no-]" in name,
        block.get("why", ""),
        tuple(nothing.split()),
        block.get("ours", ""),
        block.get("values", {}),
        block.get("json_list", False),
    )


def _equal(value: str, known: str) -> bool:
    try:
        return float(value) == float(known)
    except ValueError:
        return value.casefold() == known.casefold()
