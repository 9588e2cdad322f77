"""Reads plain values (from YAML or JSON) into frozen dataclasses and refuses what they do not declare."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slipstream.errors import ConfigError, SlipstreamError

T = TypeVar("T")


class SchemaError(SlipstreamError):
    """A value does not have the declared shape; the message names the field and what would be right."""


def read(cls: type[T], value: object, where: str) -> T:
    """Build `cls` from `value`, checking every nested field; errors name `value` by `where` ("embedded.yaml")."""
    return cast(T, _read(cls, value, where))


# Any below: annotations at run time are classes, unions, generic aliases and literals, which share no useful type.
def _read(kind: Any, value: object, where: str) -> object:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(kind), value, where)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool) != isinstance(get_args(kind)[0], bool):
            raise SchemaError(f"{where}: {value!r} is not one of {', '.join(map(repr, get_args(kind)))}.")
        return value
    if origin is tuple:
        return _read_tuple(get_args(kind), value, where)
    if origin is dict:
        mapping = _mapping(value, where)
        key_kind, item_kind = get_args(kind)
        return {
            _read(key_kind, key, f"{where}: key {key!r}"): _read(item_kind, item, f"{where}.{key}")
            for key, item in mapping.items()
        }
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if kind in (object, Any):
        return value
    return _read_scalar(kind, value, where)


def _read_dataclass(kind: Any, value: object, where: str) -> object:
    mapping = _mapping(value, where)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in mapping:
        if key not in fields:
            near = get_close_matches(str(key), fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It may hold {', '.join(fields)}."
            raise SchemaError(f"{where}: unknown key {key!r}.{hint}")
    hints = get_type_hints(kind)
    built = {}
    for name, field in fields.items():
        if name in mapping:
            built[name] = _read(hints[name], mapping[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SchemaError(f"{where}: key {name!r} is missing.")
    try:
        return kind(**built)
    except (ValueError, ConfigError) as error:
        raise SchemaError(f"{where}: {error}") from error


def _read_union(kinds: Sequence[Any], value: object, where: str) -> object:
    if value is None:
        if type(None) in kinds:
            return None
        raise SchemaError(f"{where}: a value is missing.")
    errors = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _read(kind, value, where)
        except SchemaError as error:
            errors.append(error)
    # The alternative that got furthest explains best; a lone alternative explains itself.
    raise max(errors, key=lambda error: len(str(error)))


def _read_tuple(kinds: Sequence[Any], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{where}: expected a list, found {value!r}.")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(value) != len(kinds):
        raise SchemaError(f"{where}: expected {len(kinds)} items, found {len(value)}.")
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _read_scalar(kind: Any, value: object, where: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    remedy = " Put it in quotes." if kind is str and isinstance(value, int | float) else ""
    raise SchemaError(f"{where}: expected {_NAMES.get(kind, kind.__name__)}, found {value!r}.{remedy}")


def _mapping(value: object, where: str) -> Mapping[Any, object]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where}: expected a mapping of keys to values, found {value!r}.")
    return value


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
