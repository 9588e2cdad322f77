"""gpt-oss's answers: messages on channels, of which `analysis` is reasoning, and some address a function.

An answer goes on behind `<|start|>assistant`, which the prompt ends with. A message is a header (the channel, and
perhaps `to=functions.name`, in either order), `<|message|>`, and its text up to `<|end|>`, `<|call|>` or `<|return|>`.
"""

import re

from slipstream.serve.tools.parser import Syntax, Writer, no_call
from slipstream.serve.tools.reader import TOKEN_MARK, Reader, Waiting

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
        goes_on = (yield from _message(reader, writer, "analysis", None, told_apart)) if inside else True
        while goes_on:
            begun = yield from reader.starts(*_HEADERS, " to=", "to=")
            header = (yield from _header(reader, begun)) if begun is not None else None
            if begun is not None and header is None:
                no_call(reader, writer, begun)
            found = _CHANNEL.search(header or "")
            address = _TO.search(header or "")
            name = address[1] if address is not None and calls else None
            goes_on = yield from _message(reader, writer, found[1] if found else "final", name, told_apart)

    return read


def opened(prompt: str) -> str | None:
    """Return the channel of the message that a prompt ends in the header of; None where it opens none."""
    tail = prompt.rstrip()
    return tail.removesuffix(MESSAGE).rpartition(CHANNEL)[2].strip() if tail.endswith(MESSAGE) else None


def _header(reader: Reader, begun: str) -> Waiting[str | None]:
    """Return a header that has begun, and pass the marker behind it; None, behind its beginning, if it is none."""
    parts = [begun]
    reader.mark()
    if (yield from reader.until((MESSAGE, *_ENDS), parts.append)) != MESSAGE:
        reader.back()
        return None
    reader.release()
    return "".join(parts).replace(TOKEN_MARK, "")


def _message(reader: Reader, writer: Writer, channel: str, name: str | None, told_apart: bool) -> Waiting[bool]:
    """Read a message's text, or text that has no header, and pass its end; whether more may follow."""
    function = None if name is None else name.removeprefix("functions.")
    if function is not None and (function != name or writer.knows(function)):
        writer.thinking = "over"
        writer.begin(function)
        found = yield from reader.until((*_ENDS, *_HEADERS), writer.arguments, keep_partial=False)
        writer.end()
    elif channel == "analysis" and told_apart:
        writer.thinking = "inside"
        found = yield from reader.until((*_ENDS, *_HEADERS), writer.reasoning)
        writer.thinking = "inside" if found is None else "closed"
    else:
        writer.thinking = "over"
        found = yield from reader.until((*_ENDS, *_HEADERS), writer.content)
    if found in _HEADERS:
        reader.unread(found)
    return found is not None
