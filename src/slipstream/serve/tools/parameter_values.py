"""What a call's parameter stands for that is written as text: a JSON value of a type that the tool's schema names."""

import json
import math
from typing import Any

KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def property_of(schema: Any, key: str) -> Any:  # foreign JSON
    """Return what an object's schema says of one of its properties; None if that is nothing."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None


def kinds_of(schema: dict[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types a property may have; without a word about it, that is a string."""
    return named_kinds(property_of(schema, key), schema) or frozenset({"string"})


def named_kinds(schema: Any, root: Any) -> frozenset[str]:  # foreign JSON
    """Return the JSON types that a schema within another names; none if it names none."""
    return frozenset(_kinds(resolved(schema, root)))


def resolved(schema: Any, root: Any) -> Any:  # foreign JSON
    """Return what a schema stands for that is a reference into its root's definitions; any other as it is."""
    for _ in range(16):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or not isinstance(root, dict) or not isinstance(root.get(parts[1]), dict):
            break
        schema = root[parts[1]].get(parts[2])
    return schema


def read_value(text: str, kinds: frozenset[str]) -> Any:  # any JSON value
    """Return the value that a parameter's text stands for: JSON of a type it may have, otherwise the text itself."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return text
    kind = "null" if value is None else KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else text


def written(value: Any) -> str:  # any JSON value
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _finite(text: str) -> float:
    """Return a number; ValueError for one that JSON has no word for, such as NaN or 1e999."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value


def _kinds(schema: Any) -> set[str]:  # foreign JSON
    """Return the types that a schema names, its alternatives' included."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    for value in listed if isinstance(listed, list) and not kinds else []:
        kinds.add("null" if value is None else KINDS.get(type(value), "string"))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            kinds |= _kinds(option)
    return kinds
