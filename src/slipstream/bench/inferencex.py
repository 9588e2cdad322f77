"""Turns entries of an InferenceX master YAML into recipes, and says what that file leaves unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from slipstream.bench.recipe import Recipe
from slipstream.bench.recipe_file import RecipeError, find_problems, read_yaml
from slipstream.bench.server_line import LineSpeculation, ServerLine
from slipstream.records.schema import SchemaError, read

FRAMEWORKS = {"vllm": "vllm", "sglang": "sglang"}
_NO_DRAFT = ("none",)
_EAGLE3 = ("eagle3", "eagle3_fp8")
_SERVER_SAID = "server flags and environment are those of the line it was imported with."
_SERVER_UNSAID = (
    "server flags and environment live in its scripts and are not included; import with --line to have them."
)
MARGIN = 256
"""InferenceX starts servers with room for input, output and this many tokens more."""


@dataclass(frozen=True)
class Unsaid:
    """What InferenceX keeps in shell scripts instead of its YAML, so that a person has to say it.

    Args:
        method: how rows draft whose `spec-decoding` does not tell (`mtp` is said of EAGLE-3 drafts, too).
        line: the server's own command line, as the script's log shows it: its flags, environment and draft.
    """

    token_range: tuple[int, int]
    gpus: int = 8
    draft: str | None = None
    draft_precision: str = "bf16"
    num_steps: int | None = None
    draft_tp: int | None = None
    method: Literal["eagle3"] | None = None
    line: ServerLine = field(default_factory=ServerLine)


@dataclass(frozen=True)
class Imported:
    """Recipes by name, as YAML, and a sentence for each row that has no counterpart in one."""

    recipes: dict[str, str]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Row:
    """One line of a search space; kebab-case keys are read with underscores."""

    tp: int
    ep: int = 1
    dp_attn: bool = False
    spec_decoding: str = "none"
    conc_list: tuple[int, ...] = ()
    conc_start: int | None = None
    conc_end: int | None = None
    pp: int = 1
    dcp_size: int = 1
    pcp_size: int = 1

    def __post_init__(self) -> None:
        ranged = self.conc_start is not None or self.conc_end is not None
        if ranged == bool(self.conc_list) or (ranged and (self.conc_start is None or self.conc_end is None)):
            raise ValueError("give either conc-list, or both conc-start and conc-end")

    def refusal(self, unsaid: Unsaid) -> str:
        """Say why this row cannot be a part of a recipe; empty if it can."""
        if self.dp_attn:
            return "dp-attn: true (data-parallel attention) has no counterpart in a slipstream recipe"
        for name in ("pp", "dcp_size", "pcp_size"):
            if getattr(self, name) != 1:
                return f"{name.replace('_', '-')}: {getattr(self, name)} has no counterpart in a slipstream recipe"
        if self.spec_decoding in _NO_DRAFT:
            return ""
        if self.spec_decoding not in _EAGLE3 and unsaid.method is None and unsaid.line.speculation is None:
            return (
                f"spec-decoding: {self.spec_decoding} says neither method nor draft; where it stands for an EAGLE-3 "
                "draft (as for MiniMax-M3), add --method eagle3, or the server's own line with --line"
            )
        if unsaid.line.speculation is None and (unsaid.draft is None or unsaid.num_steps is None):
            return (
                f"spec-decoding: {self.spec_decoding}, but neither which draft nor how many tokens it proposes; add "
                "--draft and --num-steps, or the server's own line with --line"
            )
        return ""

    def concurrency(self) -> tuple[int, ...]:
        """Return the listed values, or doublings from start that end exactly on end."""
        if self.conc_list:
            return self.conc_list
        assert self.conc_start is not None and self.conc_end is not None, "checked when built"
        values = []
        value = max(1, self.conc_start)
        while value < self.conc_end:
            values.append(value)
            value *= 2
        return (*values, self.conc_end)


@dataclass(frozen=True)
class _Lengths:
    isl: int
    osl: int
    search_space: tuple[_Row, ...]


@dataclass(frozen=True)
class _Scenarios:
    fixed_seq_len: tuple[_Lengths, ...] = ()
    agentic_coding: object = None


@dataclass(frozen=True)
class _Entry:
    image: str
    model: str
    model_prefix: str
    precision: str
    framework: str
    runner: str
    multinode: bool
    scenarios: _Scenarios | None = None
    seq_len_configs: tuple[_Lengths, ...] = ()
    disagg: bool = False
    router: object = None
    kv_p2p_transfer: object = None


@dataclass(frozen=True)
class Master:
    """A master file: its name and its entries as YAML has them."""

    name: str
    entries: Mapping[str, Any]


def read_master(path: Path) -> Master:
    """Read a master file."""
    value = read_yaml(path)
    if not isinstance(value, Mapping):
        raise RecipeError(f"{path.name}: an InferenceX master file maps keys to entries.")
    return Master(path.name, {str(key): entry for key, entry in value.items()})


def import_entry(master: Master, key: str, unsaid: Unsaid) -> Imported:
    """Return recipes: one for each group of rows that share topologies and concurrencies.

    Nothing is dropped: a row that has no counterpart is named, and an entry without any other is an error.
    """
    if key not in master.entries:
        raise RecipeError(f"{master.name}: no entry {key!r}.")
    entry = _read_entry(master.entries[key], f"{master.name}: {key}", key)
    groups, left_out = _groups(entry, unsaid)
    if not groups:
        raise RecipeError("\n".join(f"{key}: {sentence}" for sentence in left_out or ("has no fixed-seq-len rows.",)))
    recipes = {}
    for number, (shape, topologies) in enumerate(groups.items(), 1):
        name = key.replace(".", "-") if len(groups) == 1 else f"{key.replace('.', '-')}-{number}"
        recipe = _recipe(name, key, entry, unsaid, shape, topologies)
        try:
            problems = find_problems(read(Recipe, recipe, key))
        except SchemaError as error:
            raise RecipeError(str(error)) from error
        if problems:
            raise RecipeError("\n".join(f"{key}: {problem}" for problem in problems))
        recipes[name] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)
    return Imported(recipes, left_out)


def _read_entry(value: Any, where: str, key: str) -> _Entry:  # YAML of any shape
    fields = _underscored(value)
    if isinstance(fields, Mapping):
        for name in ("multinode", "disagg", "router", "kv_p2p_transfer"):
            if fields.get(name) not in (None, False):
                raise RecipeError(
                    f"{key}: {name.replace('_', '-')}: {fields[name]}: serving over several machines or in several "
                    "parts has no counterpart in a slipstream recipe."
                )
        if fields.get("framework") not in FRAMEWORKS:
            raise RecipeError(
                f"{key}: framework: {fields.get('framework')} has no launcher; there are {', '.join(FRAMEWORKS)}."
            )
    try:
        return read(_Entry, fields, where)
    except SchemaError as error:
        raise RecipeError(str(error)) from error


def _groups(entry: _Entry, unsaid: Unsaid) -> tuple[dict[tuple[Any, ...], list[tuple[int, int]]], tuple[str, ...]]:
    """Group topologies that run the same lengths at the same concurrencies with the same speculation."""
    lengths = (entry.scenarios.fixed_seq_len if entry.scenarios else ()) + entry.seq_len_configs
    cells: dict[tuple[int, int, str, tuple[int, ...]], list[tuple[int, int]]] = {}
    left_out: list[str] = []
    if entry.scenarios is not None and entry.scenarios.agentic_coding is not None:
        left_out.append("agentic-coding: traces of agents have no counterpart in a slipstream recipe.")
    for item in lengths:
        for row in item.search_space:
            where = f"{item.isl}/{item.osl}, tp {row.tp}, ep {row.ep}"
            if refusal := row.refusal(unsaid):
                left_out.append(f"{where}: {refusal}.")
                continue
            cell = cells.setdefault((row.tp, row.ep, row.spec_decoding, row.concurrency()), [])
            if (item.isl, item.osl) in cell:
                raise RecipeError(f"{where} is given twice.")
            cell.append((item.isl, item.osl))
    groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for (tp, ep, spec, concurrency), pairs in cells.items():
        groups.setdefault((spec, concurrency, tuple(pairs)), []).append((tp, ep))
    return groups, tuple(left_out)


def _recipe(
    name: str, key: str, entry: _Entry, unsaid: Unsaid, shape: tuple[Any, ...], topologies: list[tuple[int, int]]
) -> dict[str, object]:
    spec, concurrency, lengths = shape
    longest = max(isl + osl for isl, osl in lengths) + MARGIN
    recipe: dict[str, object] = {
        "name": name,
        "about": f"{entry.model} {entry.precision} on {entry.runner}, from InferenceX entry {key}",
        "source": f"InferenceX master YAML; {_SERVER_SAID if unsaid.line.is_given() else _SERVER_UNSAID}",
        "machine": {"name": entry.runner, "gpus": unsaid.gpus},
        "target": {
            "id": entry.model,
            "precision": entry.precision,
            "context": longest,
            "token_range": list(unsaid.token_range),
        },
        "servers": {FRAMEWORKS[entry.framework]: _server(entry, unsaid.line)},
        "baseline": "no-spec",
        "arms": {"no-spec": {}},
        "topologies": [{"tp": tp, "ep": ep} for tp, ep in topologies],
        "workloads": {
            f"{_short(isl)}{_short(osl)}": {
                "kind": "random",
                "input_tokens": isl,
                "output_tokens": osl,
                "range_ratio": 0.8,
                "context": isl + osl + MARGIN,
            }
            for isl, osl in lengths
        },
        "concurrency": list(concurrency),
        "seeds": [0, 1, 2],
        "traffic": {"requests_per_stream": 10, "warmups_per_stream": 2},
    }
    if spec not in _NO_DRAFT:
        drafted = _drafted(unsaid)
        recipe["drafts"] = {"draft": {"id": drafted.draft, "precision": unsaid.draft_precision}}
        speculation: dict[str, object] = {"method": drafted.method, "num_steps": drafted.num_steps}
        for field, number in (("topk", drafted.topk), ("num_draft_tokens", drafted.num_draft_tokens)):
            speculation |= {field: number} if number is not None else {}
        draft_tp = unsaid.draft_tp if unsaid.draft_tp is not None else drafted.draft_tp
        speculation |= {"draft_tp": draft_tp} if draft_tp is not None else {}
        recipe["arms"] = {"no-spec": {}, spec.replace("_", "-"): {"draft": "draft", "speculation": speculation}}
    return recipe


def _server(entry: _Entry, line: ServerLine) -> dict[str, object]:
    server: dict[str, object] = {"image": entry.image, "port": 8888}
    server |= {"flags": dict(line.flags)} if line.flags else {}
    return server | ({"env": dict(line.env)} if line.env else {})


def _drafted(unsaid: Unsaid) -> LineSpeculation:
    if unsaid.draft is not None and unsaid.num_steps is not None:
        return LineSpeculation("eagle3", unsaid.draft, unsaid.num_steps)
    assert unsaid.line.speculation is not None, "rows without either were left out"
    return unsaid.line.speculation


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}t"


def _underscored(value: Any) -> Any:  # YAML of any shape goes through
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): _underscored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_underscored(item) for item in value]
    return value
