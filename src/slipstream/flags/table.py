"""What becomes of another program's flags and environment variables here, read from a table in this folder."""

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

TableName = Literal["serve", "quark", "sglang_bench", "vllm_bench"]
Fate = Literal["mapped", "not_needed", "refused"]
Arity = Literal["", "V", "V?", "V*"]
"""The words behind a flag: none, one, one or none, any number."""


@dataclass(frozen=True)
class Flag:
    """One flag of another program.

    Args:
        negatable: `--no-...` exists, too; it asks for nothing that is not done anyway.
        why: the end of a sentence about a flag that is not needed or refused.
        nothing: values of a refused flag that ask for nothing.
        ours: the flag it becomes; a dotted one is a key of that flag's JSON object, an empty one an argument.
        values: values that have another name here; an empty one leaves the flag out, one of several words is a flag's
            value and further flags.
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
        """Tell whether a refused flag's values, each one or several between commas, are what is done anyway."""
        parts = [part for value in values for part in value.split(",")]
        return bool(parts) and all(any(_equal(part, known) for known in self.nothing) for part in parts)


@dataclass(frozen=True)
class Variable:
    """One environment variable of published launch lines."""

    name: str
    why: str
    refused: bool = False


@dataclass(frozen=True)
class FlagTable:
    """All of them: flags by name, short flags' long names, and environment variables by name.

    Args:
        abbreviations: a flag may be cut short where only one begins so, as argparse has it.
    """

    flags: dict[str, Flag]
    short: dict[str, str]
    variables: dict[str, Variable]
    abbreviations: bool = False


@functools.cache
def flag_table(name: TableName) -> FlagTable:
    """Return a table: of vLLM's and SGLang's launchers (serve), of their clients, or of Quark's script."""
    data = tomllib.loads(resources.files("slipstream.flags").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    flags = [_flag(fate, block, entry) for fate in _FATES for block in data.get(fate, ()) for entry in block["flags"]]
    variables = [
        Variable(name, block["why"], block.get("refused", False))
        for block in data.get("environment", ())
        for name in block["names"]
    ]
    table = FlagTable(
        {flag.name: flag for flag in flags},
        data.get("short", {}),
        {one.name: one for one in variables},
        data.get("abbreviations", False),
    )
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
