"""gpt-oss's answers: messages on channels, of which `analysis` is reasoning, and some address a function.

An answer goes on behind `<|start|>assistant`, which the prompt ends with. A message is a header (the channel, and
perhaps `to=functions.name`, in either order), `<|message|>`, and its text up to `<|end|>`, `<|call|>` or `<|return|>`.
"""

import re

from slipstream.serve.tools.parser import Syntax, Writer, no_call
from slipstream.serve.tools.reader import TOKEN_MARK, Reader, Sink, Waiting

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
CALL_HEAD = f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}"

_HEADERS = (START, CHANNEL)
_ENDS = (END, CALL, RETURN)
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def channels(told_apart: bool = True, calls: bool = True, inside: bool = False) -> Syntax:
    """Return the syntax of an answer on channels.

    Args:
        told_apart: analysis is reasoning; it is text otherwise.
        calls: messages to functions are calls; they are text otherwise.
        inside: the prompt has opened the analysis already.
    """

    def read(reader: Reader, writer: Writer) -> Waiting[None]:
        writer.thinking = "inside" if inside else "perhaps"
        text = _Lines(writer.content)
        thoughts = _Lines(writer.reasoning) if told_apart else text
        goes_on = (yield from _message(reader, writer, thoughts, told_apart, None)) if inside else True
        while goes_on:
            begun = yield from reader.starts(*_HEADERS, " to=", "to=")
            header = (yield from _header(reader, begun)) if begun is not None else None
            if begun is not None and header is None:
                no_call(reader, writer, begun)
            found = _CHANNEL.search(header or "")
            address = _TO.search(header or "")
            name = address[1] if address is not None and calls else None
            thinks = told_apart and found is not None and found[1] == "analysis"
            lines = thoughts if thinks else text
            lines.breaks = header is not None
            goes_on = yield from _message(reader, writer, lines, thinks, name)

    return read


def opened(prompt: str) -> str | None:
    """Return the channel of the message that a prompt ends in the header of; None where it opens none."""
    tail = prompt.rstrip()
    return tail.removesuffix(MESSAGE).rpartition(CHANNEL)[2].strip() if tail.endswith(MESSAGE) else None


def _header(reader: Reader, begun: str) -> Waiting[str | None]:
    """Return a header that has begun, and pass the marker behind it; None, behind its beginning, if it is none.

    One that was cut off is empty, if it has a channel that is a token.
    """
    parts = [begun]
    reader.mark()
    found = yield from reader.until((MESSAGE, *_ENDS), parts.append)
    header = "".join(parts)
    cut_off = found is None and TOKEN_MARK + CHANNEL in header
    if found != MESSAGE and not cut_off:
        reader.back()
        return None
    reader.release()
    return "" if cut_off else header.replace(TOKEN_MARK, "")


class _Lines:
    """Hands on the texts of messages, each on a line of its own."""

    def __init__(self, sink: Sink) -> None:
        self.breaks = False
        """Whether a message begins, so that a line ends where there is one."""
        self._sink = sink
        self._begun = False

    def __call__(self, text: str) -> None:
        self._sink("\n" + text if self.breaks and self._begun else text)
        self.breaks = False
        self._begun = True


def _message(reader: Reader, writer: Writer, lines: _Lines, thinks: bool, name: str | None) -> Waiting[bool]:
    """Read a message's text, or text that has no header, and pass its end; whether more may follow."""
    function = None if name is None else name.removeprefix("functions.")
    if function is not None and (function != name or writer.knows(function)):
        writer.thinking = "over"
        writer.begin(function)
        found = yield from reader.until((*_ENDS, *_HEADERS), writer.arguments, keep_partial=False)
        writer.end()
    elif thinks:
        writer.thinking = "inside"
        found = yield from reader.until((*_ENDS, *_HEADERS), lines)
        writer.thinking = "inside" if found is None else "closed"
    else:
        writer.thinking = "over"
        found = yield from reader.until((*_ENDS, *_HEADERS), lines)
    if found in _HEADERS:
        reader.unread(found)
    return found is not None
