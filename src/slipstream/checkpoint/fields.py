"""Typed access to the fields of a foreign config.json; a wrong or missing one is a clear error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import shown
from slipstream.errors import CheckpointError

LARGEST = 1 << 24
"""More than any width, vocabulary or context; a damaged number must not be tried."""
_SMALLEST = 1e-30  # beyond, and beyond its inverse, float32 ends
_LONGEST_TEXT = 1000
MOST_LAYERS = 1000
MOST_EXPERTS = 4096
WIDEST_HEAD = 1024


class Fields:
    """A JSON object, the file it came from, and the place inside it; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], file: Path, place: str = "") -> None:
        self.values = values
        self.file = file
        self._place = place

    def name(self, key: str) -> str:
        """Return a field's full name, as messages spell it."""
        return f"{self._place}{key}"

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return an error that names the file, the field and the problem."""
        return CheckpointError(f"{self.file}: field {self.name(key)!r} {problem}")

    def has(self, key: str) -> bool:
        """Whether the field is there with a value other than null."""
        return self.values.get(key) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the same object with values for fields it lacks."""
        present = {key: value for key, value in self.values.items() if value is not None or key not in defaults}
        return Fields({**defaults, **present}, self.file, self._place)

    def nested(self, key: str) -> "Fields":
        """Return an object inside this one; an absent one is empty."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {shown(value)} where an object is needed.")
        return Fields(value, self.file, f"{self.name(key)}.")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST) -> int:
        """Return a whole number of at least `minimum`; without a default the field must be there."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"is {shown(value)} where a whole number of at least {minimum} is needed.")
        if value > maximum:
            raise self.error(
                key, f"is {shown(value)}, which no model has (at most {maximum} is read); fetch the file again."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value <= 1 / _SMALLEST:
            raise self.error(key, f"is {shown(value)} where a positive number is needed.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {shown(value)} where true or false is needed.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            raise self.error(key, f"is {shown(value)} where a string is needed, one of a few words.")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers; one bare number is a list of one, an absent field an empty list."""
        value = self.values.get(key)
        items = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if len(items) > MOST_LAYERS or any(
            isinstance(item, bool) or not isinstance(item, int) or abs(item) > LARGEST for item in items
        ):
            raise self.error(key, f"is {shown(value)} where a list of whole numbers is needed.")
        return tuple(items)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers; an absent field is an empty list."""
        value = self.values.get(key)
        items = [] if value is None else value
        if not isinstance(items, list | tuple) or len(items) > WIDEST_HEAD:
            raise self.error(key, f"is {shown(value)} where a list of positive numbers is needed.")
        return tuple(Fields({key: item}, self.file, self._place).number(key) for item in items)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; an absent field is an empty list."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, str) and len(item) <= _LONGEST_TEXT for item in value
        ):
            raise self.error(key, f"is {shown(value)} where a list of strings is needed.")
        return tuple(value)

    def _get(self, key: str, default: Any) -> Any:  # checked by each caller above
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing.")
        return value


def config_file(source: Path) -> Path:
    """Return the file that messages about a checkpoint's config should name."""
    return source if source.suffix in (".json", ".gguf") else source / "config.json"


def check_activation(fields: Fields) -> None:
    """Refuse a feed-forward part that is gated by anything but SiLU."""
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.error("hidden_act", f"is {activation!r}; slipstream computes 'silu' only.")


def dtype_name(fields: Fields, default: str) -> str:
    """Return the dtype the weights are meant to be in, from either transformers' old or new field."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.text(key, default).removeprefix("torch.")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a config.json says of quantization, at its top or in the text part of a model that also sees."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := place.get(key), Mapping):
                return found
    return None
