"""MiniMax M2's calls: one element a parameter, read into JSON by the types that the tool's schema names."""

import json
from typing import Any

from slipstream.serve.tools.parser import Writer, no_call
from slipstream.serve.tools.reader import Reader, Waiting, drop

SECTION = "<minimax:tool_call>"
SECTION_END = "</minimax:tool_call>"
INVOKE = '<invoke name="'
INVOKE_END = "</invoke>"
PARAMETER = '<parameter name="'
PARAMETER_END = "</parameter>"
NAME_END = '">'

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def minimax_m2(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read `<invoke name="f"><parameter name="k">v</parameter></invoke>` in sections among text."""
    while (marker := (yield from reader.until((SECTION,), writer.content))) is not None:
        reader.mark()
        yield from reader.spaces()
        if (yield from reader.starts(INVOKE)) is None:
            reader.back()
            no_call(reader, writer, marker)
            continue
        found: str | None = INVOKE
        while found == INVOKE:
            name = yield from reader.text_until(NAME_END)
            reader.release()
            if name is None:
                return
            yield from _call(reader, writer, name.strip())
            found = yield from reader.until((INVOKE, SECTION_END), writer.content, keep_partial=False)


def _call(reader: Reader, writer: Writer, name: str) -> Waiting[None]:
    """Write one call; where the answer was cut off its JSON stays open, lest half of it pass for a whole."""
    schema = next((tool.parameters for tool in writer.tools if tool.name == name), None)
    writer.begin(name)
    opening = "{"
    while (marker := (yield from reader.until((PARAMETER, INVOKE_END), drop))) == PARAMETER:
        key = yield from reader.text_until(NAME_END)
        if key is None:
            break
        writer.arguments(f"{opening}{_written(key.strip())}: ")
        opening = ", "
        yield from _value(reader, writer, kinds_of(schema, key.strip()))
    if marker == INVOKE_END:
        writer.arguments("{}" if opening == "{" else "}")
    writer.end()


def _value(reader: Reader, writer: Writer, kinds: frozenset[str]) -> Waiting[None]:
    """Write one parameter: a string as it arrives, anything else once it is whole."""

    def write(text: str) -> None:
        writer.arguments(_written(text)[1:-1])

    if kinds == {"string"}:
        writer.arguments('"')
        if (yield from reader.until((PARAMETER_END,), write, keep_partial=False)) is not None:
            writer.arguments('"')
    elif (text := (yield from reader.text_until(PARAMETER_END))) is not None:
        writer.arguments(_written(read_value(text, kinds)))


def kinds_of(schema: dict[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types a property may have; without a word about it, that is a string."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = _kinds(resolved(properties.get(key), schema)) if isinstance(properties, dict) else set()
    return frozenset(found or {"string"})


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
        value = json.loads(text)
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return text
    kind = "null" if value is None else _KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else text


def _kinds(schema: Any) -> set[str]:  # foreign JSON
    """Return the types that a schema names, its alternatives' included."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    listed = schema.get("enum")
    for value in listed if isinstance(listed, list) and not kinds else []:
        kinds.add("null" if value is None else _KINDS.get(type(value), "string"))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            kinds |= _kinds(option)
    return kinds


def _written(value: Any) -> str:  # any JSON value
    return json.dumps(value, ensure_ascii=False)
