"""A recipe: every setting of a training run in one YAML file; an unknown key is an error."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError
from slipstream.records.schema import SchemaError, read
from slipstream.train.generate import GeneratorConfig
from slipstream.train.mixture import DataConfig
from slipstream.train.objective import DraftShape
from slipstream.train.trainer import TrainConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LENGTHS = ("train.steps", "train.time_budget_s")


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
        exclude: never trained on.
        evaluate: measured on.
    """

    prompts: tuple[str, ...] = ()
    maths: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    evaluate: tuple[EvalSet, ...] = ()

    def __post_init__(self) -> None:
        names = [item.name for item in self.evaluate]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"evaluate names {', '.join(twice)} twice.")


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
