"""Prompts written as text and as templates: a YAML file whose templates are filled in as far as is worth it."""

import itertools
import math
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from slipstream.records.schema import SchemaError, read
from slipstream.train.errors import DataError

MOST_OF_ONE = 96
"""Prompts made of one template, however many combinations its slots have."""


@dataclass(frozen=True)
class Template:
    """A prompt with slots, such as "Write a {tone} note.", and the values of each slot."""

    text: str
    slots: dict[str, tuple[str, ...]]

    def filled(self, seed: int) -> Iterator[str]:
        """Yield prompts, no combination twice; the same ones for the same seed."""
        names = list(self.slots)
        sizes = [len(self.slots[name]) for name in names]
        total = math.prod(sizes)
        chosen = np.random.default_rng(seed).permutation(total)[:MOST_OF_ONE] if total > MOST_OF_ONE else range(total)
        for number in map(int, chosen):
            places = np.unravel_index(number, sizes)
            yield self.text.format(**{name: self.slots[name][at] for name, at in zip(names, places, strict=True)})


@dataclass(frozen=True)
class PromptFile:
    """What a file holds: prompts to take as they are, and templates."""

    prompts: tuple[str, ...] = ()
    templates: tuple[Template, ...] = ()


def read_templates(path: Path) -> list[str]:
    """Return a file's prompts, then those of its templates."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        file = read(PromptFile, content, str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: is no YAML in UTF-8 ({error}).") from error
    except SchemaError as error:
        raise DataError(str(error)) from error
    for number, template in enumerate(file.templates):
        _check(template, f"{path}: templates[{number}]")
    made = (template.filled(number) for number, template in enumerate(file.templates))
    prompts = [prompt for prompt in (*file.prompts, *itertools.chain.from_iterable(made)) if prompt.strip()]
    if not prompts:
        raise DataError(f"{path}: holds no prompts; it needs `prompts`, a list of texts, or `templates`.")
    return prompts


def _check(template: Template, where: str) -> None:
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(template.text) if name is not None}
    except ValueError as error:
        raise DataError(f"{where}: its text cannot be filled in ({error}); braces stand for slots alone.") from error
    if named != set(template.slots) or not named:
        raise DataError(
            f"{where}: its text names the slots {sorted(named)} and `slots` gives values for {sorted(template.slots)}."
        )
    if empty := sorted(name for name, values in template.slots.items() if not values):
        raise DataError(f"{where}: the slot {empty[0]!r} has no values.")
