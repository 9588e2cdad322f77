"""JSON schemas whose objects take no properties but those they declare.

A schema that does not say `additionalProperties` lets an object have any others, and a model that is forced to write
one goes on and on. What follows the closed schema follows the original, too.
"""

from typing import Any

Json = Any  # foreign JSON

_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalItems")
_SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
# Beside `properties` these speak of the same object, whose other properties they may declare.
_BESIDE = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "if", "dependentSchemas")
_ANYWHERE = ("not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")


class _OpenError(Exception):
    """A schema is put together in a way in which closing a part would close the whole."""


def closed(schema: Json) -> Json:
    """Return the schema with its objects closed; as it is if they cannot be closed one by one."""
    try:
        return _closed(schema)
    except (_OpenError, RecursionError):
        return schema


def _closed(schema: Json) -> Json:
    if not isinstance(schema, dict):
        return schema
    declared = schema.get("properties")
    whole = schema.get("allOf")
    if any(key in schema for key in _ANYWHERE) or (isinstance(whole, list) and len(whole) > 1):
        raise _OpenError
    if declared is not None and any(key in schema for key in _BESIDE):
        raise _OpenError
    result = {key: _part(key, value) for key, value in schema.items()}
    if isinstance(declared, dict) and declared and not any(key in schema for key in _SAYS):
        required = schema.get("required", [])
        # One that needs what it does not declare could not be followed.
        if isinstance(required, list) and set(map(str, required)) <= declared.keys():
            result["additionalProperties"] = False
    return result


def _part(key: str, value: Json) -> Json:
    if key in _MAPS and isinstance(value, dict):
        return {name: _closed(one) for name, one in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_closed(one) for one in value]
    return _closed(value) if key in _ONES else value
