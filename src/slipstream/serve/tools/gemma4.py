"""Gemma 4's calls, read into JSON as they arrive: `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`."""

from dataclasses import dataclass
from typing import Any

from slipstream.serve.tools.parameter_values import KINDS, named_kinds, property_of, read_value, resolved, written
from slipstream.serve.tools.parser import Writer, no_call
from slipstream.serve.tools.reader import Reader, Waiting, drop

CALL = "<|tool_call>"
CALL_END = "<tool_call|>"
QUOTE = '<|"|>'
MARKERS = (CALL, CALL_END, QUOTE)
THOUGHT = "<|channel>"
THOUGHT_END = "<channel|>"

_HEAD = "call:"
_ANY_KIND = frozenset({*KINDS.values(), "null"})
_CLOSERS = {"{": "}", "[": "]"}


def gemma4(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read calls among text."""
    while (marker := (yield from reader.until((CALL,), writer.content))) is not None:
        reader.mark()
        yield from reader.spaces()
        begun = yield from reader.starts(_HEAD)
        name = "" if begun is None else (yield from reader.name())
        if not name or (yield from reader.starts("{")) is None:
            reader.back()
            no_call(reader, writer, marker)
            continue
        reader.release()
        writer.begin(name)
        yield from _Arguments(reader, writer, name).read()
        yield from reader.until((CALL_END,), drop)
        writer.end()


@dataclass
class _Open:
    """An object or a list that is being read.

    Args:
        closer: the bracket that ends it.
        schema: what the tool says of it.
    """

    closer: str
    schema: Any  # foreign JSON
    begun: bool = False


class _Arguments:
    """A call's arguments behind their first bracket; where they were cut off their JSON stays open."""

    def __init__(self, reader: Reader, writer: Writer, name: str) -> None:
        self._reader = reader
        self._writer = writer
        self._root = next((tool.parameters for tool in writer.tools if tool.name == name), None)
        self._open: list[_Open] = []

    def read(self) -> Waiting[None]:
        """Write them up to their end, or to what is none of their syntax."""
        self._begin("{", self._root)
        while self._open:
            top = self._open[-1]
            yield from self._reader.spaces()
            found = yield from self._reader.starts(top.closer, ",")
            if found == top.closer:
                self._writer.arguments(found)
                self._open.pop()
            elif found is None and not (yield from self._member(top)):
                return

    def _begin(self, bracket: str, schema: Any) -> None:  # foreign JSON
        self._writer.arguments(bracket)
        self._open.append(_Open(_CLOSERS[bracket], schema))

    def _member(self, top: _Open) -> Waiting[bool]:
        """Write one member of an object or a list, or begin to; whether it was one."""
        start = ", " if top.begun else ""
        schema = top.schema.get("items") if isinstance(top.schema, dict) else None
        if top.closer == "}":
            key = yield from self._key()
            if key is None:
                return False
            start += written(key) + ": "
            schema = property_of(top.schema, key)
        schema = resolved(schema, self._root)
        yield from self._reader.spaces()
        bracket = yield from self._reader.starts(QUOTE, *_CLOSERS)
        top.begun = True
        if bracket == QUOTE:
            self._writer.arguments(start + '"')
            return (yield from self._text())
        if bracket is not None:
            self._writer.arguments(start)
            self._begin(bracket, schema)
            return True
        return (yield from self._bare(start, schema))

    def _key(self) -> Waiting[str | None]:
        """Return a key, which may be quoted; None if none comes to its end."""
        parts: list[str] = []
        quoted = yield from self._reader.starts(QUOTE)
        found = yield from self._reader.until((quoted or ":", CALL_END), parts.append)
        if found == CALL_END:
            self._reader.unread(found)
        if found is None or found == CALL_END:
            return None
        if quoted is not None:
            yield from self._reader.spaces()
            yield from self._reader.starts(":")
        return "".join(parts).strip()

    def _text(self) -> Waiting[bool]:
        """Write a text as it arrives, up to its quote."""

        def write(text: str) -> None:
            self._writer.arguments(written(text)[1:-1])

        found = yield from self._reader.until((QUOTE,), write, keep_partial=False)
        self._writer.arguments("" if found is None else '"')
        return found is not None

    def _bare(self, start: str, schema: Any) -> Waiting[bool]:  # foreign JSON
        """Write a number or a word, once it is whole."""
        parts: list[str] = []
        found = yield from self._reader.until((",", "}", "]", CALL_END), parts.append)
        text = "".join(parts).strip()
        if found is None or not text:
            return False
        if found != ",":
            self._reader.unread(found)
        kinds = named_kinds(schema, self._root) or _ANY_KIND
        self._writer.arguments(start + written(read_value(text, kinds)))
        return True
