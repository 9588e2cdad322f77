"""Grammars of arguments in Gemma 4's syntax: bare keys in the order of their names, and texts in its quotes."""

import json
from collections.abc import Mapping
from typing import Any

from slipstream.serve.tools.gemma4 import QUOTE
from slipstream.serve.tools.lark import spelled, string_up_to
from slipstream.serve.tools.parameter_values import KINDS, resolved

Schema = dict[str, Any]  # foreign JSON

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def gemma4_arguments(rule: str, schema: Schema | None, tokens: Mapping[str, int]) -> str:
    """Return a rule for what lies between the brackets of a call; without a schema, any members will do."""
    known = _Grammar(rule, schema or {}, tokens)
    known.add(rule, known.members(rule, schema or {}))
    return known.text()


class _Grammar:
    """Rules of one tool's arguments.

    Args:
        prefix: what the names of shared rules begin with.
        root: the schema that references lead into.
    """

    def __init__(self, prefix: str, root: Schema, tokens: Mapping[str, int]) -> None:
        self._prefix = prefix
        self._root = root
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._more = ""
        self._references: dict[str, str] = {}
        self._pending: list[str] = []

    def text(self) -> str:
        """Return the rules, those that references stand for included."""
        while self._pending:  # one after another: a chain of them may be long
            reference = self._pending.pop()
            name = self._references[reference]
            self.add(name, self._value(f"{name}_of", resolved({"$ref": reference}, self._root)))
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items()) + self._more

    def add(self, rule: str, body: str) -> str:
        """Add a rule, and return its name."""
        self._rules[rule] = body
        return rule

    def members(self, rule: str, schema: Schema) -> str:
        """Return what lies between an object's brackets."""
        properties, required = schema.get("properties"), schema.get("required")
        others = schema.get("additionalProperties")
        if not isinstance(properties, dict):
            return '""' if others is False else self._pairs(rule, others)
        needed = set(required) if isinstance(required, list) else set()
        names = sorted(properties, key=str.lower)  # as the template writes them
        first, later = '""', '""'
        for i, name in reversed(list(enumerate(names))):
            value = self._value(f"{rule}_{i}", properties[name])
            pair = self.add(f"{rule}_{i}", f"{spelled(name + ':', self._tokens)} {value}")
            then = self.add(f"{rule}_{i}_then", later)
            may_lack = name not in needed
            first = f"{pair} {then}" + (f" | {self.add(f'{rule}_{i}_first', first)}" if may_lack else "")
            later = f'"," {pair} {then}' + (f" | {then}" if may_lack else "")
        return first

    def _value(self, rule: str, schema: Any) -> str:  # foreign JSON
        """Return an expression for a value that follows a schema."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str):
            if reference not in self._references:
                self._references[reference] = f"{self._prefix}_ref{len(self._references)}"
                self._pending.append(reference)
            return self._references[reference]
        if not isinstance(schema, dict):
            return self._any()
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            return f"({' | '.join(spelled(gemma4_written(value), self._tokens) for value in listed)})"
        for key in ("anyOf", "oneOf", "allOf"):
            options = schema.get(key)
            if isinstance(options, list) and options and (key != "allOf" or len(options) == 1):
                return f"({' | '.join(self._value(f'{rule}_{key.lower()}{i}', one) for i, one in enumerate(options))})"
        named = schema.get("type") or [kind for key, kind in _TELLING.items() if key in schema]
        kinds = [kind for kind in (named if isinstance(named, list) else [named]) if kind in _KNOWN]
        return f"({' | '.join(self._of_kind(rule, kind, schema) for kind in kinds)})" if kinds else self._any()

    def _of_kind(self, rule: str, kind: str, schema: Schema) -> str:
        if kind == "string":
            expression, more = string_up_to(rule, schema, QUOTE, self._tokens)
            self._more += more
            return f"{self._quote} {expression}"
        if kind == "object":
            return f'"{{" {self.add(f"{rule}_members", self.members(f"{rule}_members", schema))} "}}"'
        if kind == "array":
            item = self.add(f"{rule}_item", self._value(f"{rule}_item_of", schema.get("items")))
            return f'"[" {_repeated(item, int(schema.get("minItems", 0)), schema.get("maxItems"))} "]"'
        limited = {key: schema[key] for key in _LIMITS if key in schema}
        inner = {"type": kind, **limited, "x-guidance": {"whitespace_flexible": False}}
        return self.add(f"{rule}_{kind}", f"%json {json.dumps(inner)}")

    def _pairs(self, rule: str, values: Any) -> str:  # foreign JSON
        pair = self.add(f"{rule}_pair", f'{_ANY_KEY} ":" {self._value(f"{rule}_pair_of", values)}')
        return _repeated(pair, 0, None)

    def _any(self) -> str:
        """Return the name of the rule for any value."""
        name = f"{self._prefix}_any"
        if name not in self._rules:
            self._rules[name] = ""  # it names itself
            self.add(name, " | ".join(self._of_kind(name, kind, {}) for kind in _KNOWN))
        return name

    @property
    def _quote(self) -> str:
        return spelled(QUOTE, self._tokens)


_KNOWN = (*(kind for kind in KINDS.values()), "null")
_TELLING = {"properties": "object", "items": "array", "pattern": "string", "maxLength": "string"}


def gemma4_written(value: Any) -> str:  # any JSON value
    """Return a value as Gemma 4 writes it."""
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, dict):
        pairs = (f"{key}:{gemma4_written(value[key])}" for key in sorted(value, key=str.lower))
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma4_written, value))}]"
    return json.dumps(value)


def _repeated(item: str, least: int, most: Any) -> str:  # a number, or none
    """Return so many items with commas between them."""
    if most == 0:
        return '""'
    further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
    return f"{item} {further}" if least else f"({item} {further})?"
