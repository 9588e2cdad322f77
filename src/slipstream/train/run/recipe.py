"""A recipe: every setting of a training run in one YAML file; an unknown key is an error."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError
from slipstream.records.schema import SchemaError, read
from slipstream.train.data.generate import GeneratorConfig
from slipstream.train.data.mixture import DataConfig
from slipstream.train.draft.objective import DraftShape
from slipstream.train.draft.target import DRAFT_DTYPES, TARGET_DTYPES
from slipstream.train.run.optimizer import OPTIMIZERS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LENGTHS = ("train.steps", "train.time_budget_s")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run.

    Args:
        steps: how many; None plans them from `time_budget_s` and the speed measured at the start.
        row_length: tokens in a packed row.
        rows_per_step: rows of one step, over all processes.
        unroll: draft steps unrolled; weights fall by `decay` from one to the next.
        first_alone: share of the steps, at the start, that unroll only once: later drafted tokens build on the first,
            and a step of one costs a third of a step of three.
        whole_vocabulary: have the target's best token looked for in its whole vocabulary, and leave out slots where the
            draft does not know it. False looks among the draft's tokens only and leaves out slots whose text goes on
            with another: the same for greedy texts, and the target's head, most of the work of a small one, shrinks.
        hard_share, overlap: see `slipstream.train.draft.objective.Emphasis`; LK losses have 3 for `overlap`.
        optimizer: "adamw", or "muon" for the blocks' matrices with AdamW for the head, the norms and the biases.
        stop_at: leave off after this step though the rate falls as if all `steps` were to come.
        warmup, final_lr: shares of the steps and of the learning rate.
        ema: share of itself that the running average of the weights keeps at each step (0.999); the draft measured and
            written is then that average.
        target_dtype: the target's precision in writing data, training and measuring: bfloat16, float16 or float32; by
            default bfloat16 on a GPU and float32 on a CPU.
        draft_dtype: the precision of the draft's activations in training, bfloat16 or float32, with the same defaults.
    """

    steps: int | None = None
    time_budget_s: float | None = None
    stop_at: int | None = None
    row_length: int = 1024
    rows_per_step: int = 32
    unroll: int = 5
    first_alone: float = 0.0
    whole_vocabulary: bool = True
    decay: float = 0.8
    hard_share: float = 0.0
    overlap: float | None = None
    optimizer: str = "adamw"
    lr: float = 1e-3
    head_lr_scale: float = 1.0
    warmup: float = 0.03
    final_lr: float = 0.05
    clip: float = 1.0
    ema: float | None = None
    target_dtype: str | None = None
    draft_dtype: str | None = None
    seed: int = 0
    log_every: int = 20
    eval_every: int = 0
    checkpoint_every_s: float = 30.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.time_budget_s is None):
            raise ConfigError("Give either steps or time_budget_s, not both and not neither.")
        for name in ("steps", "row_length", "rows_per_step", "unroll", "log_every", "stop_at"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("hard_share", "first_alone"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it lies between 0 and 1.")
        for name in ("time_budget_s", "lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be a number above 0.")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}; it is {' or '.join(OPTIMIZERS)}.")
        if self.overlap is not None and not 0 <= self.overlap < math.inf:
            raise ConfigError(f"overlap is {self.overlap}; it must be a number of 0 or more.")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise ConfigError(f"ema is {self.ema}; it must lie between 0 and 1, such as 0.999.")
        if self.target_dtype is not None and self.target_dtype not in TARGET_DTYPES:
            raise ConfigError(f"target_dtype is {self.target_dtype!r}; it is {', '.join(TARGET_DTYPES)}.")
        if self.draft_dtype is not None and self.draft_dtype not in DRAFT_DTYPES:
            raise ConfigError(f"draft_dtype is {self.draft_dtype!r}; it is {' or '.join(DRAFT_DTYPES)}.")


@dataclass(frozen=True)
class EvalSet:
    """Questions held out, answered greedily by the target; `first` of them (all when None)."""

    name: str
    file: str
    first: int | None = None
    max_new: int = 128

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}; files are named after it, so use letters, digits, '-' and '_'.")
        for key in ("first", "max_new"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}; it must be at least 1.")


@dataclass(frozen=True)
class Files:
    """Data files, relative to the data folder; the evaluation files are always excluded from training too.

    Args:
        prompts: answered by the target, and trained on.
        maths: questions shown to the target, for it to write others like them (`data.maths`); by default `prompts`.
        examples: shown to the target, for it to write user turns like them (`data.tasks`).
        documents: what long user turns are made from (`data.documents`).
        exclude: never trained on.
        evaluate: measured on.
    """

    prompts: tuple[str, ...] = ()
    maths: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    evaluate: tuple[EvalSet, ...] = ()

    def __post_init__(self) -> None:
        names = [item.name for item in self.evaluate]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"evaluate names {', '.join(twice)} twice.")

    def check(self, folder: Path) -> None:
        """Raise unless all of them are in the folder."""
        evaluated = (item.file for item in self.evaluate)
        named = (*self.prompts, *self.maths, *self.examples, *self.documents, *self.exclude, *evaluated)
        if absent := [name for name in dict.fromkeys(named) if not (folder / name).is_file()]:
            raise ConfigError(
                f"{folder}: has no {', '.join(absent)}, which the recipe names. --data is the folder of its files."
            )


@dataclass(frozen=True)
class Recipe:
    """All of a run."""

    train: TrainConfig
    draft: DraftShape = field(default_factory=DraftShape)
    data: DataConfig = field(default_factory=DataConfig)
    generate: GeneratorConfig = field(default_factory=GeneratorConfig)
    files: Files = field(default_factory=Files)

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, for records."""
        return asdict(self)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe ({error}).") from error
    return make_recipe(content, str(path))


def make_recipe(content: Any, where: str) -> Recipe:  # parsed YAML
    """Turn nested mappings into a recipe, refusing keys that mean nothing and values of another type."""
    try:
        return read(Recipe, {"train": {}, **content} if isinstance(content, Mapping) else content, where)
    except SchemaError as error:
        raise ConfigError(str(error)) from error


def change_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Return the recipe with settings changed, each given as SECTION.KEY=VALUE, the value as YAML would have it."""
    content = recipe.as_dict()
    for change in changes:
        name, equals, value = change.partition("=")
        section, _, key = name.partition(".")
        if not equals or not isinstance(content.get(section), dict) or key not in content[section]:
            raise ConfigError(f"{change}: is not SECTION.KEY=VALUE of a recipe, such as train.lr=6e-4.")
        try:
            content[section][key] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{change}: the value cannot be read ({error}).") from error
        if name in _LENGTHS and content[section][key] is not None:  # a run is as long as the one given last says
            content["train"].update({other.partition(".")[2]: None for other in _LENGTHS if other != name})
    return make_recipe(content, "the recipe as changed")


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number it is; YAML 1.1 takes it for text, for want of a dot."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
