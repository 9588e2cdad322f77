"""Calls whose arguments lie between markers of their own: Kimi K2, DeepSeek V3, R1 and V3.1."""

import re
from collections.abc import Callable

from slipstream.serve.tools.parser import Writer, no_call
from slipstream.serve.tools.reader import Reader, Waiting

KIMI_SECTION = "<|tool_calls_section_begin|>"
KIMI_SECTION_END = "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_CALL_END = "<|tool_call_end|>"
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
DEEPSEEK_SECTION_END = "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"

_Call = Callable[[Reader, Writer], Waiting[bool]]
"""Reads a call behind its first marker; False, back at the mark, if it is none."""
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>\D.*?)(?::\d+)?")


def kimi_k2(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section."""
    yield from _sections(reader, writer, (KIMI_SECTION, KIMI_SECTION_END, KIMI_CALL), _kimi_call)


def deepseek(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read DeepSeek's calls, whose arguments are in a code block (V3, R1) or bare (V3.1)."""
    yield from _sections(reader, writer, (DEEPSEEK_SECTION, DEEPSEEK_SECTION_END, DEEPSEEK_CALL), _deepseek_call)


def _sections(reader: Reader, writer: Writer, markers: tuple[str, str, str], call: _Call) -> Waiting[None]:
    """Read sections of calls among text; a section without calls, or what is no call, stays text."""
    section, section_end, call_begin = markers
    in_section = False
    while True:
        expected = (section_end, call_begin) if in_section else (section, call_begin)
        marker = yield from reader.until(expected, writer.content)
        if marker is None:
            return
        if marker == section_end:
            in_section = False
            continue
        reader.mark()
        if marker == section:
            yield from reader.spaces()
        if marker == section and (yield from reader.starts(call_begin)) is None:
            reader.back()
            no_call(reader, writer, marker)
        elif (yield from call(reader, writer)):
            in_section = in_section or marker == section
        else:
            no_call(reader, writer, marker)


def _kimi_call(reader: Reader, writer: Writer) -> Waiting[bool]:
    parts: list[str] = []
    found = yield from reader.until((KIMI_ARGUMENTS, KIMI_CALL, KIMI_CALL_END, KIMI_SECTION_END), parts.append)
    call_id = "".join(parts).strip()
    name = _kimi_name(call_id, writer)
    if found != KIMI_ARGUMENTS or name is None:
        reader.back()
        return False
    reader.release()
    writer.begin(name, call_id)
    yield from _arguments(reader, writer, (KIMI_CALL_END,), (KIMI_SECTION_END, KIMI_CALL))
    return True


def _kimi_name(call_id: str, writer: Writer) -> str | None:
    """Return the function that an id such as functions.search:0 names; a bare number means the only tool there is."""
    if call_id.isdigit():
        return writer.tools[0].name if len(writer.tools) == 1 else None
    match = _KIMI_ID.fullmatch(call_id)
    return None if match is None else match["name"]


def _deepseek_call(reader: Reader, writer: Writer) -> Waiting[bool]:
    head = yield from reader.text_until(DEEPSEEK_SEPARATOR)
    name = head
    ends: tuple[str, ...] = (DEEPSEEK_CALL_END,)
    if head is not None and head.strip() == "function":
        name = yield from reader.text_until("```json\n")
        ends = ("\n```" + DEEPSEEK_CALL_END, "```" + DEEPSEEK_CALL_END, DEEPSEEK_CALL_END)
    if name is None or not name.strip() or len(name.split()) > 1:
        reader.back()
        return False
    reader.release()
    writer.begin(name.strip())
    yield from _arguments(reader, writer, ends, (DEEPSEEK_SECTION_END, DEEPSEEK_CALL))
    return True


def _arguments(reader: Reader, writer: Writer, ends: tuple[str, ...], beyond: tuple[str, ...]) -> Waiting[None]:
    """Pass arguments on up to their end, or to a marker that can only follow it."""
    found = yield from reader.until((*ends, *beyond), writer.arguments, keep_partial=False)
    if found in beyond:
        reader.unread(found)
    writer.end()
