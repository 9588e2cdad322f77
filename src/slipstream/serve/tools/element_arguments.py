"""Grammars of a call's arguments that are written as one element a parameter."""

import json
from collections.abc import Mapping
from typing import Any

from slipstream.serve.closed_schemas import closed
from slipstream.serve.tools.call_arguments import SPACED
from slipstream.serve.tools.element_calls import Elements
from slipstream.serve.tools.lark import literal, spelled, string_up_to, text_up_to
from slipstream.serve.tools.parameter_values import kinds_of, resolved

Schema = dict[str, Any]  # foreign JSON

_ANY_KEY = '/[^ \\n<>"]{1,64}/'


def element_arguments(rule: str, schema: Schema | None, spelling: Elements, tokens: Mapping[str, int]) -> str:
    """Return a rule for a sequence of parameters: those a tool needs, and in their places those it may have.

    A tool that says nothing of its parameters takes any.
    """
    schema = schema or {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) and schema.get("additionalProperties") is not False:
        return _any_parameters(rule, spelling, tokens)
    names = list(properties) if isinstance(properties, dict) else []
    needed = set(required) if isinstance(required, list) else set()
    order = " ".join(f"{rule}_{i}" + ("" if name in needed else "?") for i, name in enumerate(names))
    rules = [f"{rule}: {order or literal('')}\n"]
    for i, name in enumerate(names):
        value, more = _value(f"{rule}_{i}", schema, name, spelling, tokens)
        opening = spelled(spelling.key + name + _before_value(spelling), tokens)
        rules.append(f"{rule}_{i}: {opening} {value} {_after_value(spelling)}\n{more}")
    return "".join(rules)


def _any_parameters(rule: str, spelling: Elements, tokens: Mapping[str, int]) -> str:
    text, more = text_up_to(rule, spelling.value_end, tokens)
    opening = f"{spelled(spelling.key, tokens)} {_ANY_KEY} {spelled(_before_value(spelling), tokens)}"
    return f"{rule}: {rule}_any*\n{rule}_any: {opening} {text} {_after_value(spelling)}\n{more}"


def _before_value(spelling: Elements) -> str:
    return spelling.key_end + spelling.between + spelling.value + ("\n" if spelling.padded else "")


def _after_value(spelling: Elements) -> str:
    return literal(spelling.after) if spelling.after else ""


def _value(rule: str, schema: Schema, name: str, spelling: Elements, tokens: Mapping[str, int]) -> tuple[str, str]:
    """Return what follows a parameter's name up to its end marker, and the rules that needs."""
    one = resolved(schema["properties"][name], schema)
    one = one if isinstance(one, dict) else {}
    end = ("\n" if spelling.padded else "") + spelling.value_end
    if "string" in kinds_of(schema, name):
        return string_up_to(rule, one, end, tokens)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    inner = {**closed({**shared, **one}), "x-guidance": SPACED}
    return f"{rule}_value {spelled(end, tokens)}", f"{rule}_value: %json {json.dumps(inner)}\n"
