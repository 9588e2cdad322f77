"""The sampling settings of requests that name none: the model's own, from its generation_config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import find_file, read_json
from slipstream.errors import CheckpointError, ConfigError

FILE_NAME = "generation_config.json"
MODEL, NONE = "auto", "none"  # what --generation-config may say beside a path; vLLM's word for the second is its name
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets that leaves a setting out; these are OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def changed(self) -> dict[str, float]:
        """The settings that are not OpenAI's."""
        plain = SamplingDefaults()
        return {name: value for name in _RANGES if (value := getattr(self, name)) != getattr(plain, name)}


def sampling_defaults(choice: str, model: Path) -> SamplingDefaults:
    """Return the defaults that --generation-config asks for.

    Args:
        choice: "auto" for the model's own, "none" (or vLLM's word for it, "vllm") for OpenAI's, or a folder or file.
        model: the folder or file the model was loaded from.
    """
    if choice in (NONE, "vllm"):
        return SamplingDefaults()
    place = model if choice == MODEL else Path(choice)
    folder, name = (place, FILE_NAME) if place.is_dir() else (place.parent, place.name)
    path = None if choice == MODEL and not place.is_dir() else find_file(folder, name)
    if path is not None:
        return read_defaults(read_json(path), path)
    if choice != MODEL:
        raise ConfigError(
            f"--generation-config {choice}: has no {FILE_NAME}; give a folder that has one, auto or none."
        )
    return SamplingDefaults()


def read_defaults(config: Mapping[str, Any], origin: Path) -> SamplingDefaults:  # foreign JSON
    """Return the settings a generation_config.json names; raises CheckpointError for a value that is none."""
    found: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (name in ("top_p", "repetition_penalty") and value == 0):
            raise CheckpointError(
                f"{origin}: {name} is {value!r}; it must lie between {low} and {high}. Mend the file, or start with "
                "--generation-config none."
            )
        found[name] = max(int(value), 0) if name == "top_k" else float(value)
    return SamplingDefaults(**found)
