"""Tools declared in TypeScript, as Kimi K2.5's template wants them in `tools_ts_str`; its own Python is never run."""

import json
from typing import Any

_INDENT = "  "
_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_CHECKS: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}

Json = Any  # foreign JSON: schemas of any shape


def sorted_keys(value: Json) -> Json:
    """Return a JSON value with the keys of every object in order, in which Kimi K2.5 was taught to read tools."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sorted_keys(item) for item in value]
    return value


def typescript_of(tools: list[Json]) -> str | None:
    """Return the declarations of tools whose keys are in order.

    None where a schema uses what the format has no word for: the template then shows the tools as JSON.
    """
    try:
        functions = [tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")]
        declared = [_Declaration(function).text() for function in functions]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not declared:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(declared) + "\n}\n"


class _Declaration:
    """One function, with the interfaces its parameters refer to."""

    def __init__(self, function: Json) -> None:
        self._function = function
        self._definitions: dict[str, Json] = {}
        self._refers_to_itself = False

    def text(self) -> str:
        """Return `type name = (_: {...}) => any;`, what it refers to before it."""
        function = self._function
        members = _Members(self, function.get("parameters") or {}, "")
        parts = []
        named = self._refers_to_itself  # by now: what the interfaces refer to comes too late
        if named:
            inside = ",\n".join(text for _, _, text in members.properties)
            parts.append("interface parameters {" + (f"\n{inside}\n" if inside else "") + "}")
        # Those that turn up while these are written are not declared: the format's own encoder does not either.
        for name, schema in list(self._definitions.items()):
            body = self.type_of(schema, "")
            parts.append(f"{_comment(schema.get('description', ''), '')}interface {name} {body}")
        if description := function.get("description"):
            parts.append(_comment(description, "").removesuffix("\n"))
        parameters = "parameters" if named else members.text()
        parts.append(f"type {function.get('name', 'function')} = (_: {parameters}) => any;")
        return "\n".join(parts)

    def type_of(self, schema: Json, indent: str) -> str:
        """Return the type that a schema describes."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self.type_of(option, indent) for option in schema["anyOf"]])
        if "enum" in schema:
            return _enumeration(schema)
        if "type" not in schema:
            if schema != {}:
                raise ValueError("a schema without a type")
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join([_UNIONS[one] for one in kind])
        if kind == "object":
            return _Members(self, schema, indent).text()
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def define(self, definitions: Json) -> None:
        """Take note of types that may be referred to."""
        self._definitions.update(definitions or {})

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._refers_to_itself = True
            return "parameters"
        name = reference.split("/")[-1]
        if not reference.startswith("#/$defs/") or not isinstance(self._definitions.get(name), dict):
            raise ValueError(f"an unknown reference: {reference}")
        return name

    def _array(self, schema: Json, indent: str) -> str:
        item = schema.get("items") or {}
        inner = indent + _INDENT
        comment = _remarks(item, inner)
        if comment:
            return f"Array<\n{comment}{inner}{self.type_of(item, inner)}\n{indent}>"
        return f"Array<{self.type_of(item, indent)}>"


class _Members:
    """What stands between the braces of an object."""

    def __init__(self, declaration: _Declaration, schema: Json, indent: str) -> None:
        self._indent = indent
        inner = indent + _INDENT
        self._others: str | None = None
        self.properties: list[tuple[bool, str, str]] = []  # whether optional, name, text
        if not schema:
            return
        if "$defs" in schema:
            declaration.define(schema["$defs"])
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            self._others = declaration.type_of(others, inner)
        elif others is not None:
            self._others = {True: "any", False: "never"}[others]
        required = schema.get("required", [])
        for name, one in schema.get("properties", {}).items():
            optional = name not in set(required)
            default = _default(one.get("default"), inner) if isinstance(one, dict) else ""
            kind = declaration.type_of(one, inner)
            line = f"{_remarks(one, inner)}{default}{inner}{name}{'?' if optional else ''}: {kind}"
            self.properties.append((optional, name, line))

    def text(self) -> str:
        """Return the object: what it must have first, then what it may have, each in order."""
        lines = [line for _, _, line in sorted(self.properties, key=lambda one: one[:2])]
        if self._others is not None:
            lines.append(f"{self._indent}{_INDENT}[k: string]: {self._others}")
        return "{\n" + ",\n".join(lines) + f"\n{self._indent}}}" if lines else "{}"


def _enumeration(schema: Json) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [one for one in kind if one != "null"] if len(kind) == 2 else kind
        if len(named) != 1:
            raise ValueError(f"an enumeration of types {kind}")
        kind = named[0]
    expected = _CHECKS.get(kind)
    if expected is not None and not all(value is None or isinstance(value, expected) for value in schema["enum"]):
        raise ValueError(f"an enumeration with values that are no {kind}")
    return " | ".join([f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"]])


def _remarks(schema: Json, indent: str) -> str:
    """Return what stands above a type: its description, and its limits, which TypeScript has no word for."""
    if isinstance(schema, bool):
        return ""
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    kind = schema.get("type") if plain else None
    limits = _LIMITS.get(kind, ()) if isinstance(kind, str) else ()
    stated = ", ".join(f"{key}: {schema[key]}" for key in limits if key in schema)
    comment = _comment(schema.get("description", ""), indent)
    return comment + (f"{indent}// {stated}\n" if stated else "")


def _comment(description: str, indent: str) -> str:
    if not description:
        return ""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in description.split("\n"))


def _default(value: Json, indent: str) -> str:
    if value is None:
        return ""
    written = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {written}\n"
