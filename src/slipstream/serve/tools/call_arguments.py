"""Grammars of a call's arguments that are JSON, which follows the tool's schema."""

import json
from typing import Any

from slipstream.serve.closed_schemas import closed
from slipstream.serve.grammar_trial import WHITE_SPACE

Schema = dict[str, Any]  # foreign JSON

_SHAPES = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const")
SPACED = {"whitespace_pattern": WHITE_SPACE}


def json_arguments(rule: str, schema: Schema | None) -> str:
    """Return a rule for JSON that follows a schema; without one, any object will do."""
    return f"{rule}: %json {json.dumps(prepared(schema))}\n"


def prepared(schema: Schema | None) -> Schema:
    """Return a schema of arguments as llguidance takes it: of an object, and without a name that it cannot resolve."""
    found = dict(schema or {})
    if not any(key in found for key in _SHAPES):
        found["type"] = "object"
    if "$id" in found and all(reference.startswith("#") for reference in _references(found)):
        del found["$id"]  # it says what relative references are relative to, and there are none
    return {**closed(found), "x-guidance": SPACED}


def _references(value: Any) -> list[str]:  # any JSON value
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in _references(item)]
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    return []
