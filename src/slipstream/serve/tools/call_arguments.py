"""Grammars of a call's arguments: JSON that follows the tool's schema, or MiniMax's elements of the same values."""

import json
import re
from typing import Any

from slipstream.serve.closed_schemas import closed
from slipstream.serve.grammar_trial import WHITE_SPACE
from slipstream.serve.tools.minimax import NAME_END, PARAMETER, PARAMETER_END, kinds_of, resolved

Schema = dict[str, Any]  # foreign JSON

_SHAPES = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_SPACED = {"whitespace_pattern": WHITE_SPACE}


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
    return {**closed(found), "x-guidance": _SPACED}


def minimax_arguments(rule: str, schema: Schema | None) -> str:
    """Return a rule for a sequence of parameters: those a tool needs, and in their places those it may have."""
    properties = (schema or {}).get("properties")
    required = (schema or {}).get("required")
    names = list(properties) if isinstance(properties, dict) else []
    needed = set(required) if isinstance(required, list) else set()
    order = " ".join(f"{rule}_{i}" + ("" if name in needed else "?") for i, name in enumerate(names))
    rules = [f"{rule}: {order or literal('')}\n"]
    for i, name in enumerate(names):
        value, more = _minimax_value(f"{rule}_{i}", schema or {}, name)
        rules.append(f"{rule}_{i}: {literal(PARAMETER + name + NAME_END)} {value} {literal(chr(10))}\n{more}")
    return "".join(rules)


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _minimax_value(rule: str, schema: Schema, name: str) -> tuple[str, str]:
    """Return what follows a parameter's name up to its end marker, and the rules that needs."""
    one = resolved(schema["properties"][name], schema)
    end = literal(PARAMETER_END)
    if "string" not in kinds_of(schema, name) or not isinstance(one, dict):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        inner = {**shared, **one} if isinstance(one, dict) else one
        return f"{rule}_value {end}", f"{rule}_value: %json {json.dumps(inner)}\n"
    listed = [one["const"]] if "const" in one else one.get("enum")
    if isinstance(listed, list) and listed:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in listed]
        return f"({' | '.join(map(literal, texts))}) {end}", ""
    if isinstance(pattern := one.get("pattern"), str):
        return f"/{_searched(pattern)}/ {end}", ""
    if "minLength" in one or "maxLength" in one:
        return f"/[^<]{{{int(one.get('minLength', 0))},{one.get('maxLength', '')}}}/ {end}", ""
    # One lexeme up to the end marker, so that it ends at the first.
    return f"{rule}_text", f"{rule}_text[lazy]: /(.|\\n)*{re.escape(PARAMETER_END).replace('/', chr(92) + '/')}/\n"


def _searched(pattern: str) -> str:
    """Return a regular expression for a whole text in which a schema's pattern is found."""
    before = "" if pattern.startswith("^") else "[^<]*"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "[^<]*"
    inner = pattern.removeprefix("^")
    inner = inner if after else inner.removesuffix("$")
    return re.sub(r"(?<!\\)/", r"\\/", f"{before}({inner}){after}")


def _references(value: Any) -> list[str]:  # any JSON value
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in _references(item)]
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    return []
