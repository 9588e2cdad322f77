"""Calls with one element a parameter, whose schema tells the value's type: MiniMax M2, GLM, Qwen3-Coder."""

from dataclasses import dataclass

from slipstream.serve.tools.parameter_values import kinds_of, read_value, written
from slipstream.serve.tools.parser import Syntax, Writer, no_call
from slipstream.serve.tools.reader import Reader, Sink, Waiting, drop


@dataclass(frozen=True)
class Elements:
    """How a family spells its elements.

    Args:
        section: begins a section of calls.
        section_end: ends it.
        call: begins a call; a name follows.
        name_end: comes behind the name.
        call_end: ends a call, and may be what ends the section.
        key: begins a parameter; its name follows.
        key_end: comes behind that.
        value: begins its value.
        value_end: ends its value.
        between: what the family writes between `key_end` and `value`.
        after: what it writes behind `value_end`.
        padded: a value lies between two line breaks that are not its own.
        bare: the family's models forget to begin the section at times.
    """

    section: str
    section_end: str
    call: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    between: str = ""
    after: str = ""
    padded: bool = False
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be tokens of a model."""
        bracketed = (self.section, self.section_end, self.key, self.key_end, self.value, self.value_end)
        return tuple(text for text in bracketed if text.startswith("<") and text.endswith(">"))


MINIMAX = Elements(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>",
    '<parameter name="', '">', "", "</parameter>", after="\n",
)  # fmt: skip
QWEN3_CODER = Elements(
    "<tool_call>", "</tool_call>", "<function=", ">", "</function>",
    "<parameter=", ">", "", "</parameter>", after="\n", padded=True, bare=True,
)  # fmt: skip
GLM = Elements(
    "<tool_call>", "</tool_call>", "", "", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
GLM_ON_LINES = Elements(
    "<tool_call>", "</tool_call>", "", "", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", between="\n", after="\n",
)  # fmt: skip


def elements(spelling: Elements) -> Syntax:
    """Return the syntax of answers with such calls in sections among text.

    Where no section was begun, a call must be of a tool that was offered and is not strict: no grammar watches over it.
    """

    def read(reader: Reader, writer: Writer) -> Waiting[None]:
        within = tuple(filter(None, (spelling.section_end, spelling.section, spelling.call)))
        outside = (spelling.section, spelling.call) if spelling.bare else (spelling.section,)
        lax = {tool.name for tool in writer.tools if not tool.strict}
        in_section = is_bare = False
        while True:
            expected = within if in_section else outside
            marker = yield from reader.until(expected, writer.content, keep_partial=not in_section)
            if marker is None:
                return
            if marker == spelling.section_end:
                in_section = is_bare = False
                continue
            reader.mark()
            name = yield from _name(reader, spelling, begun=marker == spelling.call)
            is_bare = marker == spelling.call and (is_bare or not in_section)
            if name is None or (is_bare and name not in lax):
                reader.back()
                no_call(reader, writer, marker)
                continue
            reader.release()
            yield from _Call(reader, writer, spelling, name).read()
            yield from reader.spaces()
            in_section = True

    return read


def _name(reader: Reader, spelling: Elements, begun: bool) -> Waiting[str | None]:
    """Pass a call's beginning, if it has not begun, and return its function's name; None if there is no call."""
    yield from reader.spaces()
    if spelling.call and not begun and (yield from reader.starts(spelling.call)) is None:
        return None
    name = yield from reader.name()
    yield from reader.spaces()
    follows = (spelling.name_end,) if spelling.name_end else (spelling.key, spelling.call_end)
    found = yield from reader.starts(*follows)
    if not name or found is None:
        return None
    if not spelling.name_end:
        reader.unread(found)
    return name


class _Call:
    """One call, behind its name; where the answer was cut off its JSON stays open, lest half pass for a whole."""

    def __init__(self, reader: Reader, writer: Writer, spelling: Elements, name: str) -> None:
        self._reader = reader
        self._writer = writer
        self._spelling = spelling
        self._schema = next((tool.parameters for tool in writer.tools if tool.name == name), None)
        self._name = name

    def read(self) -> Waiting[None]:
        """Write the call."""
        spelling = self._spelling
        self._writer.begin(self._name)
        ends = tuple({spelling.call_end: None, spelling.section_end: None})
        opening = "{"
        while (marker := (yield from self._reader.until((spelling.key, *ends), drop))) == spelling.key:
            key = yield from self._reader.text_until(spelling.key_end)
            if key is None or (spelling.value and (yield from self._reader.text_until(spelling.value)) is None):
                break
            self._writer.arguments(f"{opening}{written(key.strip())}: ")
            opening = ", "
            yield from self._value(key.strip())
        if marker in ends:
            self._writer.arguments("{}" if opening == "{" else "}")
        if marker == spelling.section_end:
            self._reader.unread(marker)
        self._writer.end()

    def _value(self, key: str) -> Waiting[None]:
        """Write one parameter: a string as it arrives, anything else once it is whole."""
        kinds = kinds_of(self._schema, key)
        parts: list[str] = []

        def write(text: str) -> None:
            self._writer.arguments(written(text)[1:-1])

        is_text = kinds == {"string"}
        sink = write if is_text else parts.append
        if is_text:
            self._writer.arguments('"')
        sink = _Unpadded(sink) if self._spelling.padded else sink
        found = yield from self._reader.until((self._spelling.value_end,), sink, keep_partial=False)
        if is_text and found is not None:
            self._writer.arguments('"')
        elif found is not None:
            self._writer.arguments(written(read_value("".join(parts), kinds)))


class _Unpadded:
    """Hands a value on without the one line break at each of its ends."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        self._begun = False

    def __call__(self, text: str) -> None:
        if not self._begun:
            text = text.removeprefix("\n")
            self._begun = True
        text = self._held + text
        shown = text.removesuffix("\n")
        self._held = text[len(shown) :]
        if shown:
            self._sink(shown)
