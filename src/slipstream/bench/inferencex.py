"""Turns entries of an InferenceX master YAML into recipes, and says what that file leaves unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.bench.recipe import Recipe
from slipstream.bench.recipe_file import RecipeError, find_problems, read_yaml
from slipstream.records.schema import SchemaError, read

FRAMEWORKS = {"vllm": "vllm", "sglang": "sglang"}
MARGIN = 256
"""InferenceX starts servers with room for input, output and this many tokens more."""


@dataclass(frozen=True)
class Unsaid:
    """What InferenceX keeps in shell scripts instead of its YAML, so that a person has to say it."""

    token_range: tuple[int, int]
    gpus: int = 8
    draft: str | None = None
    draft_precision: str = "bf16"
    num_steps: int | None = None


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
        for name in ("dp_attn", "pp", "dcp_size", "pcp_size"):
            if getattr(self, name) not in (False, 1):
                raise ValueError(f"{name.replace('_', '-')} has no counterpart in a slipstream recipe")

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

    def __post_init__(self) -> None:
        if self.multinode or self.disagg or self.router is not None:
            raise ValueError("multinode or disaggregated serving has no counterpart in a slipstream recipe")


def entry_keys(path: Path) -> list[str]:
    """List the entries of a master file."""
    value = read_yaml(path)
    if not isinstance(value, Mapping):
        raise RecipeError(f"{path.name}: an InferenceX master file maps keys to entries.")
    return [str(key) for key in value]


def import_entry(path: Path, key: str, unsaid: Unsaid) -> dict[str, str]:
    """Return recipes (name to YAML text): one for each group of rows that share topologies and concurrencies."""
    value = read_yaml(path)
    if not isinstance(value, Mapping) or key not in value:
        raise RecipeError(f"{path.name}: no entry {key!r}.")
    try:
        entry = read(_Entry, _underscored(value[key]), f"{path.name}: {key}")
    except SchemaError as error:
        raise RecipeError(str(error)) from error
    if entry.framework not in FRAMEWORKS:
        raise RecipeError(f"{key}: framework {entry.framework!r} has no launcher; there are {', '.join(FRAMEWORKS)}.")
    groups = _groups(entry)
    if not groups:
        raise RecipeError(f"{key}: holds no fixed-seq-len rows, and nothing else can be imported.")
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
    return recipes


def _groups(entry: _Entry) -> dict[tuple[Any, ...], list[tuple[int, int]]]:
    """Group topologies that run the same lengths at the same concurrencies with the same speculation."""
    lengths = (entry.scenarios.fixed_seq_len if entry.scenarios else ()) + entry.seq_len_configs
    cells: dict[tuple[int, int, str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for item in lengths:
        for row in item.search_space:
            cell = cells.setdefault((row.tp, row.ep, row.spec_decoding, row.concurrency()), [])
            if (item.isl, item.osl) in cell:
                raise RecipeError(f"{item.isl}/{item.osl} tp {row.tp} ep {row.ep} is given twice.")
            cell.append((item.isl, item.osl))
    groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for (tp, ep, spec, concurrency), pairs in cells.items():
        groups.setdefault((spec, concurrency, tuple(pairs)), []).append((tp, ep))
    return groups


def _recipe(
    name: str, key: str, entry: _Entry, unsaid: Unsaid, shape: tuple[Any, ...], topologies: list[tuple[int, int]]
) -> dict[str, object]:
    spec, concurrency, lengths = shape
    longest = max(isl + osl for isl, osl in lengths) + MARGIN
    recipe: dict[str, object] = {
        "name": name,
        "about": f"{entry.model} {entry.precision} on {entry.runner}, from InferenceX entry {key}",
        "source": "InferenceX master YAML; server flags and environment live in its scripts and are not included.",
        "machine": {"name": entry.runner, "gpus": unsaid.gpus},
        "target": {
            "id": entry.model,
            "precision": entry.precision,
            "context": longest,
            "token_range": list(unsaid.token_range),
        },
        "servers": {FRAMEWORKS[entry.framework]: {"image": entry.image, "port": 8888}},
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
    if spec != "none":
        if unsaid.draft is None or unsaid.num_steps is None:
            raise RecipeError(
                f"{key}: says spec-decoding {spec!r} but neither which draft nor how many tokens it proposes. "
                "Add --draft and --num-steps."
            )
        recipe["drafts"] = {"draft": {"id": unsaid.draft, "precision": unsaid.draft_precision}}
        speculation = {"method": "eagle3", "num_steps": unsaid.num_steps}
        recipe["arms"] = {"no-spec": {}, spec.replace("_", "-"): {"draft": "draft", "speculation": speculation}}
    return recipe


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}t"


def _underscored(value: Any) -> Any:  # YAML of any shape goes through
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): _underscored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_underscored(item) for item in value]
    return value
