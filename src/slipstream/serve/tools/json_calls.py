"""Calls written as JSON objects with a name and arguments: Hermes (Qwen, SmolLM2), Llama 3, Mistral."""

import json
import secrets
import string

from slipstream.serve.tools.parser import Writer, no_call
from slipstream.serve.tools.reader import Reader, Waiting, drop

_LONGEST_HEAD = 1 << 16  # characters of an object that has not said its name yet
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id", "function")


def hermes(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read `<tool_call>{"name": ..., "arguments": ...}</tool_call>` among text; SmolLM2 puts a list of them there."""
    while (marker := (yield from reader.until(("<tool_call>",), writer.content))) is not None:
        reader.mark()
        if (yield from _object_list(reader, writer)):
            yield from reader.until(("</tool_call>",), drop)
        else:
            no_call(reader, writer, marker)


def llama3_json(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read objects that begin the answer or follow `<|python_tag|>`, `;` between them; only known names are calls."""
    before = yield from reader.spaces()
    marker: str | None = (yield from reader.starts("<|python_tag|>")) or ""
    while marker is not None:
        reader.mark()
        if (yield from _CallObject(reader, writer, only_known=True).read()):
            yield from _further_objects(reader, writer)
        else:
            writer.content(before)
            no_call(reader, writer, marker)
        before = ""
        marker = yield from reader.until(("<|python_tag|>",), writer.content)


def mistral(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read `[TOOL_CALLS]`, then a list of objects, or (newer models) a name, perhaps `[ARGS]`, and its arguments."""
    while (marker := (yield from reader.until(("[TOOL_CALLS]",), writer.content))) is not None:
        reader.mark()
        yield from reader.spaces()
        is_list = (yield from reader.starts("[", "{")) is not None
        reader.back()
        reader.mark()
        if not (yield from (_object_list(reader, writer) if is_list else _named_arguments(reader, writer))):
            no_call(reader, writer, marker)


def mistral_id(_name: str, _index: int) -> str:
    """Return a call's id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _CallObject:
    """One `{"name": ..., "arguments": ...}`, in either order, other keys ignored."""

    def __init__(self, reader: Reader, writer: Writer, only_known: bool = False) -> None:
        self._reader = reader
        self._writer = writer
        self._only_known = only_known
        self._name: str | None = None
        self._arguments: str | None = None  # where they come before the name
        self._begun = False

    def read(self) -> Waiting[bool]:
        """Read the object, which a mark lies before; if it is no call, go back to the mark and return False."""
        whole = yield from self._members()
        if not self._begun and whole and self._name is not None:
            self._begin()
            self._writer.arguments(self._arguments or "{}")
        if not self._begun:
            self._reader.back()
            return False
        self._reader.release()
        self._writer.end()
        return True

    def _members(self) -> Waiting[bool]:
        """Read up to the closing brace; whether all of it had the form of a call."""
        reader = self._reader
        yield from reader.spaces()
        if (yield from reader.starts("{")) is None:
            return False
        yield from reader.spaces()
        while (yield from reader.starts("}")) is None:
            if not (yield from self._member()):
                return False
            yield from reader.spaces()
            if (yield from reader.starts(",")) is not None:
                yield from reader.spaces()
        return True

    def _member(self) -> Waiting[bool]:
        key = yield from _string(self._reader)
        yield from self._reader.spaces()
        if key not in _KEYS or (yield from self._reader.starts(":")) is None:
            return False
        yield from self._reader.spaces()
        if key == "name":
            self._name = yield from _string(self._reader)
            return self._name is not None and (not self._only_known or self._writer.knows(self._name))
        if key in _ARGUMENTS and self._name is not None and not self._begun:
            self._begin()
            return (yield from self._reader.json_value(self._writer.arguments))
        parts: list[str] = []
        whole = yield from self._reader.json_value(parts.append, _LONGEST_HEAD)
        if key in _ARGUMENTS and self._arguments is None:
            self._arguments = "".join(parts)
        return whole

    def _begin(self) -> None:
        assert self._name is not None
        self._reader.release()
        self._writer.begin(self._name)
        self._begun = True


def _further_objects(reader: Reader, writer: Writer) -> Waiting[None]:
    while True:
        reader.mark()
        yield from reader.spaces()
        if (yield from reader.starts(";")) is None:
            reader.back()
            return
        if not (yield from _CallObject(reader, writer, only_known=True).read()):
            return _forget_head(reader)


def _object_list(reader: Reader, writer: Writer) -> Waiting[bool]:
    """Read `[{...}, {...}]`, or one object alone; False if the first is no call."""
    yield from reader.spaces()
    is_list = (yield from reader.starts("[")) is not None
    if not (yield from _CallObject(reader, writer).read()):
        return False
    while is_list:
        yield from reader.spaces()
        if (yield from reader.starts(",")) is None:
            yield from reader.starts("]")
            break
        reader.mark()
        if not (yield from _CallObject(reader, writer).read()):
            _forget_head(reader)
            break
    return True


def _forget_head(reader: Reader) -> None:
    """Drop what there is of a further call, if the answer was cut off in its head."""
    if reader.exhausted:
        reader.drop()


def _named_arguments(reader: Reader, writer: Writer) -> Waiting[bool]:
    """Read `name[ARGS]{...}`, `name[CALL_ID]id[ARGS]{...}` or `name{...}`."""
    parts: list[str] = []
    found = yield from reader.until(("[ARGS]", "[CALL_ID]", "{"), parts.append)
    name, call_id = "".join(parts).strip(), None
    if found == "[CALL_ID]":
        call_id = yield from reader.text_until("[ARGS]")
    if found is None or not name or any(char in name for char in " \t\r\n"):
        reader.back()
        return False
    if found == "{":
        reader.unread(found)
    reader.release()
    writer.begin(name, call_id.strip() if call_id else None)
    yield from reader.spaces()
    yield from reader.json_value(writer.arguments)
    writer.end()
    return True


def _string(reader: Reader) -> Waiting[str | None]:
    """Return the value of a JSON string, if one comes next."""
    if (quote := (yield from reader.starts('"'))) is None:
        return None
    reader.unread(quote)
    parts: list[str] = []
    whole = yield from reader.json_value(parts.append, _LONGEST_HEAD)
    try:
        return str(json.loads("".join(parts))) if whole else None
    except ValueError:
        return None
