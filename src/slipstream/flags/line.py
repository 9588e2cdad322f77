"""Turns another program's command line into one of ours: flags are renamed, left aside with a word, or refused."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from slipstream.errors import ConfigError
from slipstream.flags.table import Flag, FlagTable, Variable

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_COUNTS_OF_TOKENS = (
    "--max-model-len", "--context-length", "--max-num-batched-tokens", "--chunked-prefill-size", "--max-batch-tokens",
)  # fmt: skip
_OPPOSITES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))
"""How a switch is turned off; vLLM has `--disable-x` beside `--no-enable-x` since 0.33, and `--enable-x` likewise."""
_OTHERS = ("VLLM_", "SGLANG_", "SGL_", "AITER_", "FLYDSL_")


@dataclass(frozen=True)
class OwnFlag:
    """A flag of our own command, as far as reading a line needs to know it."""

    takes_value: bool
    repeatable: bool = False


@dataclass(frozen=True)
class Settled:
    """A line in our own flags, and a sentence for each reason why others were not needed."""

    words: tuple[str, ...]
    notices: tuple[str, ...] = ()


def settle(words: Sequence[str], own: Mapping[str, OwnFlag], table: FlagTable) -> Settled:
    """Return a line in our own flags; all that cannot be honoured is one error.

    A flag that nobody knows is passed on, so that the command line names it.
    """
    line = _Line(_with_config_files(words) if "--config" not in own else words, own, table)
    line.read()
    if line.refused:
        raise ConfigError("\n".join(line.refused))
    return Settled(tuple(line.words()), tuple(_by_reason(line.not_needed)))


def settle_environment(names: Sequence[str], variables: Mapping[str, Variable]) -> tuple[str, ...]:
    """Return a notice for each reason why other servers' variables are not read here."""
    table = variables
    for name in names:
        if name in table and table[name].refused:
            raise ConfigError(f"{name} is set: {table[name].why}.")
    told = [(name, table[name].why) for name in names if name in table]
    told += [
        (name, "other servers' variables are not read here; slipstream serve --help lists the flags")
        for name in names
        if name.startswith(_OTHERS) and name not in table
    ]
    return tuple(_by_reason(told))


def names_another_engine(words: Sequence[str]) -> bool:
    """Say whether a line is for vLLM or SGLang itself, to whom its own flags mean what they say."""
    joined = [word for word in words if word.startswith("--engine=")]
    named = [f"--engine={value}" for word, value in pairwise(words) if word == "--engine"]
    return any(word in ("--engine=vllm", "--engine=sglang") for word in (*joined, *named))


def handed_on(words: Sequence[str], own: Mapping[str, OwnFlag], table: FlagTable) -> list[str]:
    """Return a line in our flags, with those of the engine gathered in --engine-args."""
    kept: list[str] = []
    handed: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, attached = word.partition("=")
        if name == "--engine-args":
            text = attached if equals else left.pop(0) if left else ""
            try:
                handed += shlex.split(text)
            except ValueError as error:
                raise ConfigError(f"{name} {text!r}: {error}.") from error
        elif name in own:
            kept += [word, *([left.pop(0)] if own[name].takes_value and not equals and left else [])]
        elif not name.startswith("--"):
            kept.append(word)
        else:
            handed.append(word)
            arity = "" if equals else _arity(name, table)
            while left and arity and not left[0].startswith("--"):
                handed.append(left.pop(0))
                arity = arity if arity.endswith("*") else ""
    return [*kept, *(["--engine-args", shlex.join(handed)] if handed else [])]


def _arity(name: str, table: FlagTable) -> str:
    """Return what an engine's flag takes; one that the table does not know takes all that is no flag."""
    known = table.flags.get(name)
    if known is None:
        return "" if opposite(name, table) else "V*"
    return known.arity


def opposite(name: str, table: FlagTable) -> Flag | None:
    """Return the switch of the table that another one turns off."""
    found = [table.flags.get(on + name.removeprefix(off)) for off, on in _OPPOSITES if name.startswith(off)]
    return next((flag for flag in found if flag is not None and flag.negatable), None)


class _Line:
    """Reads words from left to right."""

    def __init__(self, words: Sequence[str], own: Mapping[str, OwnFlag], table: FlagTable) -> None:
        self._left = list(words)
        self._own = own
        self._table = table
        self._kept: list[str] = []
        self._objects: dict[str, dict[str, object]] = {}
        self._model_named = any(word.split("=")[0] in ("--model", "--model-path") for word in words)
        self.not_needed: list[tuple[str, str]] = []
        self.refused: list[str] = []

    def read(self) -> None:
        """Settle every word."""
        while self._left:
            word = self._left.pop(0)
            if word == "--":
                self._kept += [word, *self._left]
                self._left.clear()
            elif word.startswith("-") and len(word) > 1 and not word[1].isdigit():
                self._flag(word)
            else:
                self._model_named = True
                self._kept.append(word)

    def words(self) -> list[str]:
        """Return what is left, in our own flags."""
        merged = [part for flag, value in self._objects.items() for part in (flag, json.dumps(value))]
        return [*merged, *self._kept]

    def _flag(self, word: str) -> None:
        name, attached = _named(word, self._table.short)
        if name.startswith("--disable-") and (negated := f"--no-enable-{name.removeprefix('--disable-')}") in self._own:
            name = negated
        head, dot, key = name.partition(".")
        flag = self._table.flags.get(head)
        if name in self._own:
            self._take_own(name, attached)
        elif dot and head in self._own:
            self._put(name, self._needed(name, "V", attached)[0])
        elif dot and flag is not None:
            self._settle(flag, [f"{key}={value}" for value in self._needed(name, "V", attached)])
        elif (flag := flag or self._abbreviated(name)) is not None:
            needed = flag.fate == "mapped" and flag.arity in ("V", "V*")
            self._settle(
                flag,
                self._needed(name, flag.arity, attached) if needed else self._values(flag.arity, attached),
            )
        elif not self._asks_for_nothing(name):
            self._kept.append(word)

    def _abbreviated(self, name: str) -> Flag | None:
        """Return the one flag of the table that begins so."""
        begun = [flag for known, flag in self._table.flags.items() if known.startswith(name)]
        return begun[0] if self._table.abbreviations and len(begun) == 1 else None

    def _take_own(self, name: str, attached: str | None) -> None:
        own, flag = self._own[name], self._table.flags.get(name)
        if not own.takes_value:
            self._kept.append(name if attached is None else f"{name}={attached}")
            return
        # Our own lines may name the model last; theirs have named it by then, or do not name it so.
        many = flag is not None and flag.arity == "V*" and own.repeatable and self._model_named
        for value in self._needed(name, "V*" if many else "V", attached):
            self._give(name, value, flag)

    def _settle(self, flag: Flag, values: list[str]) -> None:
        shown = " ".join([flag.name, *values])
        if flag.fate == "mapped":
            for value in _listed(flag, values) if flag.arity else [None]:
                self._give(flag.ours, value, flag)
        elif flag.fate == "not_needed":
            self.not_needed.append((shown, flag.why))
        elif not flag.asks_for_nothing(values):
            # Other values may be secrets: a key's password, a token.
            self.refused.append(f"{shown if flag.nothing else flag.name} cannot be honoured here: {flag.why}.")

    def _give(self, name: str, value: str | None, flag: Flag | None) -> None:
        if value is None:
            self._kept.append(name)
            return
        value = value if flag is None else flag.values.get(value, value)
        if flag is not None and flag.values and not value:
            return
        if "." in name:
            self._put(name, value)
            return
        if name in _COUNTS_OF_TOKENS and (size := _SIZE.fullmatch(value)):
            value = str(int(float(size[1]) * _MULTIPLES[size[2]]))
        several = flag is not None and value in flag.values.values()
        self._kept += [*([name] if name else []), *(value.split() if several else [value])]

    def _put(self, dotted: str, value: str) -> None:
        """Set a key of a flag that takes a JSON object."""
        name, _, key = dotted.partition(".")
        try:
            meant = json.loads(value)
        except ValueError:
            meant = value
        self._objects.setdefault(name, {})[key] = meant

    def _needed(self, name: str, arity: str, attached: str | None) -> list[str]:
        """Return a flag's values; one that came without, as `--api-key $UNSET` does, must not pass for absent."""
        values = self._values(arity, attached)
        if not values:
            raise ConfigError(f"{name} needs a value.")
        return values

    def _values(self, arity: str, attached: str | None) -> list[str]:
        if attached is not None:
            return [attached]
        values: list[str] = []
        most = {"": 0, "V": 1, "V?": 1}.get(arity, len(self._left))
        ends = self._is_known if arity == "V" else _is_flag
        while self._left and len(values) < most and not ends(self._left[0]):
            values.append(self._left.pop(0))
        return values

    def _is_known(self, word: str) -> bool:
        name = word.partition("=")[0]
        return name.startswith("--") and (name in self._own or name in self._table.flags)

    def _asks_for_nothing(self, name: str) -> bool:
        """Tell whether this is the opposite of a switch that is off unless named."""
        flag = opposite(name, self._table)
        if flag is not None and flag.fate == "not_needed":
            self.not_needed.append((name, flag.why))
        ours = [self._own.get(on + name.removeprefix(off)) for off, on in _OPPOSITES[:2] if name.startswith(off)]
        return flag is not None or any(own is not None and not own.takes_value for own in ours)


def _named(word: str, short: Mapping[str, str]) -> tuple[str, str | None]:
    """Return a flag's long name and the value that is attached to it, if one is."""
    if word.startswith("-O") and word[2:3].isdigit():
        return short["-O"], word[2:]
    name, equals, value = word.partition("=")
    head, dot, key = name.partition(".")
    if word.startswith("--"):
        head = head.replace("_", "-")
    return short.get(head, head) + dot + key, value if equals else None


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _listed(flag: Flag, values: list[str]) -> list[str]:
    if not flag.json_list:
        return values
    try:
        listed = json.loads(values[0]) if values else []
    except ValueError:
        listed = None
    if not isinstance(listed, list):
        raise ConfigError(f"{flag.name} is {' '.join(values)!r}; it is a JSON list.")
    return [str(one) for one in listed]


def _by_reason(found: Sequence[tuple[str, str]]) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for shown, why in found:
        grouped.setdefault(why, []).append(shown)
    return [f"not needed here: {', '.join(shown)} ({why})" for why, shown in grouped.items()]


def _with_config_files(words: Sequence[str]) -> list[str]:
    """Put the flags of `--config FILE` (YAML, as both servers read it) before the line's own, which then win."""
    line: list[str] = []
    given: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, attached = word.partition("=")
        if name == "--config":
            given += _flags_in(Path(attached if equals else next(left, "")))
        else:
            line.append(word)
    return given + line


def _flags_in(path: Path) -> list[str]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}).") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path}: holds no flags; write `name: value`, one a line.")
    words: list[str] = []
    for name, value in settings.items():
        flag = f"--{str(name).replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words
