"""Reasoning: what a model writes between `<think>` and `</think>` before its answer, or on a channel of its own."""

from dataclasses import dataclass
from typing import Literal

from slipstream.serve.tools import gemma4, harmony
from slipstream.serve.tools.element_calls import GLM, MINIMAX
from slipstream.serve.tools.marked_calls import KIMI_SECTION
from slipstream.serve.tools.parser import Syntax, Writer
from slipstream.serve.tools.reader import Reader, Sink, Waiting

Opening = Literal["inside", "outside", "either"]
START = "<think>"
END = "</think>"


@dataclass(frozen=True)
class Reasoning:
    """How a family of models reasons.

    Args:
        start: begins it.
        end: ends it.
        label: stands behind `start`.
        opens: whether an answer begins inside the reasoning where the prompt does not tell.
        padded: whether line breaks at its ends belong to the syntax, since the template writes them itself.
        ended_by: other markers that end it.
        channels: whether it is a message on a channel instead (`harmony.py`).
    """

    opens: bool
    start: str = START
    end: str = END
    label: str = ""
    padded: bool = True
    ended_by: tuple[str, ...] = ()
    channels: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What begins or ends it."""
        return harmony.MARKERS if self.channels else (self.start, self.end, *self.ended_by)


THINK = Reasoning(opens=False)
REASONING: dict[str, Reasoning] = {
    "kimi_k2": Reasoning(opens=True, padded=False, ended_by=(KIMI_SECTION,)),
    "minimax_m2": Reasoning(opens=True, ended_by=(MINIMAX.section,)),
    "deepseek_r1": Reasoning(opens=True),
    "qwen3": THINK,
    "glm45": Reasoning(opens=False, ended_by=(GLM.section,)),
    "gemma4": Reasoning(
        opens=False, start=gemma4.THOUGHT, end=gemma4.THOUGHT_END, label="thought", ended_by=(gemma4.CALL,)
    ),
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
    if tail.endswith(family.end):
        return "outside"
    return "inside" if tail.endswith(family.start + family.label) or family.opens else "either"


def going_on(begun: str, family: Reasoning) -> Opening:
    """Tell where an answer goes on from what there is of it: past its reasoning, unless that is open in it."""
    opened = family.start in begun and family.end not in begun.rpartition(family.start)[2]
    return "inside" if opened else "outside"


def reasoned(family: Reasoning, inside: bool, syntax: Syntax) -> Syntax:
    """Return the syntax of an answer with reasoning before it."""

    def read(reader: Reader, writer: Writer) -> Waiting[None]:
        writer.thinking = "inside" if inside else "perhaps"
        reader.mark()
        yield from reader.spaces()
        if (yield from reader.starts(family.start)) is not None:
            reader.release()
            yield from reader.starts(family.label)
        else:
            reader.back()
            if not inside:
                writer.thinking = "over"
                yield from syntax(reader, writer)
                return
        writer.thinking = "inside"
        sink = _Unpadded(writer.reasoning) if family.padded else writer.reasoning
        found = yield from reader.until((family.end, *family.ended_by), sink)
        if found is not None:
            writer.thinking = "closed" if found == family.end else "over"
        if found != family.end and found is not None:
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
