"""A recipe: every setting of a training run in one YAML file; an unknown key is an error."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from slipstream.errors import ConfigError
from slipstream.train.conversations import DataConfig
from slipstream.train.generate import GeneratorConfig
from slipstream.train.objective import DraftShape
from slipstream.train.trainer import TrainConfig

T = TypeVar("T")
_LENGTHS = ("train.steps", "train.time_budget_s")


@dataclass(frozen=True)
class EvalSet:
    """Questions held out, answered greedily by the target; `first` of them (all when None)."""

    name: str
    file: str
    first: int | None = None
    max_new: int = 128


@dataclass(frozen=True)
class Files:
    """Data files, relative to the data folder; the evaluation files are always excluded from training too."""

    prompts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    evaluate: tuple[EvalSet, ...] = ()


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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe ({error}).") from error
    return make_recipe(content, str(path))


def make_recipe(content: Any, where: str) -> Recipe:  # parsed YAML
    """Turn nested mappings into a recipe, refusing keys that mean nothing."""
    sections = _mapping(content, where)
    files = dict(_mapping(sections.get("files", {}), f"{where}: files"))
    if "evaluate" in files:
        files["evaluate"] = [_build(EvalSet, item, f"{where}: files.evaluate") for item in files["evaluate"]]
    _known(sections, [f.name for f in fields(Recipe)], where)
    return Recipe(
        train=_build(TrainConfig, sections.get("train", {}), f"{where}: train"),
        draft=_build(DraftShape, sections.get("draft", {}), f"{where}: draft"),
        data=_build(DataConfig, sections.get("data", {}), f"{where}: data"),
        generate=_build(GeneratorConfig, sections.get("generate", {}), f"{where}: generate"),
        files=_build(Files, files, f"{where}: files"),
    )


def change_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Return the recipe with settings changed, each given as SECTION.KEY=VALUE, the value as YAML would have it."""
    content = recipe.as_dict()
    for change in changes:
        name, equals, value = change.partition("=")
        section, _, key = name.partition(".")
        if not equals or not isinstance(content.get(section), dict) or key not in content[section]:
            raise ConfigError(f"{change}: is not SECTION.KEY=VALUE of a recipe, such as train.lr=6e-4.")
        try:
            content[section][key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{change}: the value cannot be read ({error}).") from error
        if name in _LENGTHS and content[section][key] is not None:  # a run is as long as the one given last says
            content["train"].update({other.partition(".")[2]: None for other in _LENGTHS if other != name})
    return make_recipe(content, "the recipe as changed")


def _build(kind: type[T], values: Any, where: str) -> T:  # parsed YAML
    given = _mapping(values, where)
    names = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]  # always one of our dataclasses
    _known(given, list(names), where)
    converted = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    for key, value in converted.items():
        # YAML reads 1e-3 as text, for want of a dot.
        if isinstance(value, str) and names[key] in (float, "float", float | None):
            try:
                converted[key] = float(value)
            except ValueError:
                raise ConfigError(f"{where}: {key} is {value!r} where a number is needed.") from None
    try:
        return kind(**converted)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}.") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:  # parsed YAML
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: is {value!r} where named settings are needed.")
    return value


def _known(given: Mapping[str, Any], names: list[str], where: str) -> None:
    if unknown := [str(key) for key in given if key not in names]:
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(names)}.")
