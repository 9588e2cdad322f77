"""Reasoning: what a model writes between `<think>` and `</think>` before its answer, or on a channel of its own."""

from dataclasses import dataclass
from typing import Literal

from slipstream.serve.tools import harmony
from slipstream.serve.tools.marked_calls import KIMI_SECTION
from slipstream.serve.tools.minimax import SECTION as MINIMAX_SECTION
from slipstream.serve.tools.parser import Syntax, Writer
from slipstream.serve.tools.reader import Reader, Sink, Waiting

Opening = Literal["inside", "outside", "either"]
START = "<think>"
END = "</think>"


@dataclass(frozen=True)
class Reasoning:
    """How a family of models reasons.

    Args:
        opens: whether an answer begins inside the reasoning where the prompt does not tell.
        padded: whether line breaks at its ends belong to the syntax, since the template writes them itself.
        ended_by: other markers that end it.
        channels: whether it is a message on a channel instead (`harmony.py`).
    """

    opens: bool
    padded: bool = True
    ended_by: tuple[str, ...] = ()
    channels: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins or ends it."""
        return harmony.MARKERS if self.channels else (START, END, *self.ended_by)


REASONING: dict[str, Reasoning] = {
    "kimi_k2": Reasoning(opens=True, padded=False, ended_by=(KIMI_SECTION,)),
    "minimax_m2": Reasoning(opens=True, ended_by=(MINIMAX_SECTION,)),
    "deepseek_r1": Reasoning(opens=True),
    "qwen3": Reasoning(opens=False),
    "openai_gptoss": Reasoning(opens=False, channels=True),
}


def opening(prompt: str, family: Reasoning) -> Opening:
    """Tell how an answer begins from how the template opened the turn.

    `inside` its reasoning, `outside` since the template closed it, or `either`: then the model opens it itself if it
    wants to.
    """
    if family.channels:
        channel = harmony.opened(prompt)
        return "either" if channel is None else "inside" if channel == "analysis" else "outside"
    tail = prompt.rstrip()
    if tail.endswith(END):
        return "outside"
    return "inside" if tail.endswith(START) or family.opens else "either"


def going_on(begun: str) -> Opening:
    """Tell where an answer goes on from what there is of it: past its reasoning, unless that is open in it."""
    return "inside" if START in begun and END not in begun.rpartition(START)[2] else "outside"


def reasoned(family: Reasoning, inside: bool, syntax: Syntax) -> Syntax:
    """Return the syntax of an answer with reasoning before it."""

    def read(reader: Reader, writer: Writer) -> Waiting[None]:
        writer.thinking = "inside" if inside else "perhaps"
        reader.mark()
        yield from reader.spaces()
        if (yield from reader.starts(START)) is not None:
            reader.release()
        else:
            reader.back()
            if not inside:
                writer.thinking = "over"
                yield from syntax(reader, writer)
                return
        writer.thinking = "inside"
        sink = _Unpadded(writer.reasoning) if family.padded else writer.reasoning
        found = yield from reader.until((END, *family.ended_by), sink)
        if found is not None:
            writer.thinking = "closed" if found == END else "over"
        if found != END and found is not None:
            reader.unread(found)
        if family.padded:
            yield from reader.spaces()
        yield from syntax(reader, writer)

    return read


class _Unpadded:
    """Hands text on without the line breaks at its ends."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        self._begun = False

    def __call__(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._held = text[len(shown) :] if shown or self._begun else ""
        if shown:
            self._begun = True
            self._sink(shown)
