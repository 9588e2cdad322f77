"""Forced objects have the properties their schemas declare, and no others."""

import pytest

from slipstream.serve.closed_schemas import closed

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_every_object_that_declares_properties_is_closed():
    schema = {
        "type": "object",
        "properties": {"one": OBJECT, "many": {"type": "array", "items": OBJECT}, "named": {"$ref": "#/$defs/named"}},
        "$defs": {"named": {"anyOf": [OBJECT, {"type": "null"}]}},
    }
    shut = {**OBJECT, "additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"one": shut, "many": {"type": "array", "items": shut}, "named": {"$ref": "#/$defs/named"}},
        "$defs": {"named": {"anyOf": [shut, {"type": "null"}]}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OBJECT, "additionalProperties": True},
        {**OBJECT, "additionalProperties": {"type": "string"}},
        {**OBJECT, "patternProperties": {"^x": {}}},
        {**OBJECT, "required": ["b"]},
        {"allOf": [OBJECT, {"properties": {"b": {}}}]},
        {**OBJECT, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"type": "object", "if": OBJECT, "then": {"properties": {"b": {}}}},
        {"not": OBJECT},
        {"properties": "no"},
        True,
    ],
)
def test_what_a_schema_says_or_needs_stays_open(schema):
    assert closed(schema) == schema
