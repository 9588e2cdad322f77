"""Writes docs/launch-flags.md from the server's own table: what becomes of other servers' flags and variables."""

from collections.abc import Iterable
from pathlib import Path

from slipstream.flags.table import Flag, FlagTable, flag_table

PAGE = Path(__file__).parents[1] / "docs" / "launch-flags.md"
_HEAD = """# Flags of other servers

<!-- Written by scripts/launch_flags.py; change src/slipstream/flags/serve.toml, then run it again. -->

A launch line of vLLM or SGLang runs after changing its first words to `slipstream serve`. Every flag of both launchers
is one that `slipstream serve` has itself (`slipstream serve --help`), or stands here: it becomes one of ours, it is not
needed (the log says so, once, with the reason), or it is refused with a sentence. An interop test (`pytest -m interop
tests/peers/test_launch_flags.py`) compares the table with the packages `vllm` and `sglang`. `make published`
starts servers with every flag that is not needed and compares whole answers with a server's that has none.
Underscores for hyphens,
vLLM's short flags, `--flag.key value` for JSON, opposites (`--no-x`, `--disable-x` for `--enable-x`) and `--config`
files are understood.
"""


def page() -> str:
    """Return the page."""
    table = flag_table("serve")
    flags = table.flags.values()
    return "\n".join(
        [
            _HEAD,
            "## Become ours\n",
            "| Theirs | Ours | Values |",
            "|---|---|---|",
            *(f"| `{flag.name}` | `{flag.ours}` | {_values(flag)} |" for flag in _of(flags, "mapped")),
            "\n## Not needed\n",
            *_reasons(_of(flags, "not_needed")),
            "## Refused\n",
            "Values in brackets ask for nothing and are taken.\n",
            *_reasons(_of(flags, "refused")),
            "## Environment variables\n",
            *_variables(table),
        ]
    )


def _of(flags: Iterable[Flag], fate: str) -> list[Flag]:
    return sorted((flag for flag in flags if flag.fate == fate), key=lambda flag: flag.name)


def _reasons(flags: list[Flag]) -> list[str]:
    whys = list(dict.fromkeys(flag.why for flag in flags))
    return [
        f"{why[0].upper()}{why[1:]}: {', '.join(_shown(flag) for flag in flags if flag.why == why)}.\n" for why in whys
    ]


def _shown(flag: Flag) -> str:
    nothing = f" (`{'`, `'.join(flag.nothing)}`)" if flag.nothing else ""
    return f"`{flag.name}`{nothing}"


def _values(flag: Flag) -> str:
    return ", ".join(f"`{theirs}`: {f'`{ours}`' if ours else 'left out'}" for theirs, ours in flag.values.items())


def _variables(table: FlagTable) -> list[str]:
    rows = [
        f"| `{one.name}` | {'refused' if one.refused else 'not read'} | {one.why} |"
        for one in sorted(table.variables.values(), key=lambda one: one.name)
    ]
    return ["| Variable | Fate | Why |", "|---|---|---|", *rows, ""]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
