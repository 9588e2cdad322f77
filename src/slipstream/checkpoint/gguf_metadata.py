"""Typed access to a GGUF file's metadata; a wrong or missing value is a clear error."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.checkpoint.fields import LARGEST, MOST_LAYERS
from slipstream.checkpoint.files import shown
from slipstream.errors import CheckpointError

_ARCHITECTURE = "general.architecture"


class GgufMetadata:
    """A GGUF file's key-value pairs. Keys are given without the architecture they begin with, but for `value`."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path
        kind = values.get(_ARCHITECTURE)
        if not isinstance(kind, str):
            raise self.error(f"metadata key {_ARCHITECTURE!r} is missing or not a string.")
        self.kind = kind

    def error(self, problem: str) -> CheckpointError:
        """Return an error that names the file and the problem."""
        return CheckpointError(f"{self.path}: {problem}")

    def has(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return f"{self.kind}.{key}" in self.values

    def value(self, key: str) -> Any:
        """Return any key's value, foreign data, hence Any; None where it is absent."""
        return self.values.get(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; float32 is all the precision a GGUF has."""
        value = self.values.get(f"{self.kind}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise self.error(f"metadata key '{self.kind}.{key}' is {shown(value)} where a number is needed.")
        return value if isinstance(value, int) else _short(value)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST) -> int:
        """Return a whole number within bounds."""
        value = self.number(key, default)
        if value != int(value) or not minimum <= value <= maximum:
            raise self.error(
                f"metadata key '{self.kind}.{key}' is {shown(value)} where a whole number from {minimum} to {maximum} "
                f"is needed."
            )
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(f"{self.kind}.{key}", default)
        if not isinstance(value, bool):
            raise self.error(f"metadata key '{self.kind}.{key}' is {shown(value)} where true or false is needed.")
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers, one for each layer at most."""
        value = self.values.get(f"{self.kind}.{key}")
        if (
            not isinstance(value, list)
            or len(value) > MOST_LAYERS
            or any(not isinstance(item, int) or abs(item) > LARGEST for item in value)
        ):
            raise self.error(f"metadata key '{self.kind}.{key}' is {shown(value)} where whole numbers are needed.")
        return [int(item) for item in value]


def _short(value: float) -> float:
    """Return the shortest decimal that is this float32, as the original config had it (1e-05)."""
    return float(str(np.float32(value)))
