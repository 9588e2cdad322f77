"""What an answer consists of, piece by piece: text, reasoning, and tool calls whose arguments arrive in parts.

Every API builds its answers from these, streamed or whole: a whole answer is the events of a stream, joined.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Thinking = Literal["perhaps", "inside", "closed", "over"]
"""Where an answer stands: reasoning may still begin, goes on, was ended by its marker, or there is none (any more)."""


@dataclass(frozen=True)
class ContentDelta:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; calls do not overlap.

    Args:
        index: the call's place among this answer's calls, from 0.
        call_id: what the tool's result will refer to.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call's arguments are over, complete or (where the answer was cut off) not."""

    index: int


AnswerEvent = ContentDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd


class AnswerParser(Protocol):
    """Turns the text of one answer into events, as it arrives. However the text is cut, the events joined are equal."""

    @property
    def thinking(self) -> Thinking:
        """Where the text so far stands."""
        ...

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take more text; what may still turn out to be a marker is held back."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back: the answer is over. Calls that are open end."""
        ...


@dataclass(frozen=True)
class Call:
    """A whole tool call; `arguments` is JSON text as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass
class Message:
    """Events joined: what an answer says so far."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def add(self, event: AnswerEvent) -> None:
        """Take in an event."""
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, CallBegin):
            self.calls = (*self.calls, Call(event.call_id, event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            *before, last = self.calls
            self.calls = (*before, Call(last.call_id, last.name, last.arguments + event.text))
