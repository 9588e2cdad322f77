"""The one parser of answers: reasoning first, then text and calls in the syntax of the model's family."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.tools.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
    Thinking,
)
from slipstream.serve.tools.reader import TOKEN_MARK, Reader, Waiting


@dataclass(frozen=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema, `field` where a request has it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # foreign JSON
    strict: bool = False
    field: str = "tools"


NewId = Callable[[str, int], str]
"""Makes a call's id from its name and its place."""


@dataclass
class Writer:
    """Gathers the events of an answer for a family's syntax.

    White space before a call is the syntax's, not the text's: it is held back until text follows it.

    Args:
        max_calls: calls beyond so many are read and not told of.
        tokens: markers that are special tokens, which text has no place for.
        forced: the answer is calls alone: what looks like text is the head of one that was cut off.
    """

    new_id: NewId
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    tokens: tuple[str, ...] = ()
    forced: bool = False
    events: list[AnswerEvent] = field(default_factory=list)
    num_calls: int = 0
    thinking: Thinking = "over"
    _space: str = ""
    _open: bool = False

    def content(self, text: str) -> None:
        """Add text."""
        if self.forced:
            return
        text = self._space + self._without_tokens(text)
        shown = text.rstrip(" \t\r\n")
        self._space = text[len(shown) :]
        if shown:
            self.events.append(ContentDelta(shown))

    def text(self, text: str) -> None:
        """Add text in an answer without calls, where no white space has to wait."""
        if text := self._without_tokens(text):
            self.events.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text := self._without_tokens(text):
            self.events.append(ReasoningDelta(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self._space = ""
        self._open = True
        self._say(CallBegin(self.num_calls, call_id or self.new_id(name, self.num_calls), name))

    def arguments(self, text: str) -> None:
        """Add to the open call's arguments."""
        if text := self._without_tokens(text):
            self._say(ArgumentsDelta(self.num_calls, text))

    def end(self) -> None:
        """End the open call."""
        self._say(CallEnd(self.num_calls))
        self.num_calls += 1
        self._open = False

    def close(self) -> None:
        """End what is open, and give out white space that text was waited for with."""
        if self._open:
            self.end()
        if self._space and not self.num_calls:
            self.events.append(ContentDelta(self._space))
        self._space = ""

    def knows(self, name: str) -> bool:
        """Whether a tool of this name was offered."""
        return any(tool.name == name for tool in self.tools)

    def _without_tokens(self, text: str) -> str:
        if TOKEN_MARK in text:
            for token in self.tokens:
                text = text.replace(TOKEN_MARK + token, "")
            text = text.replace(TOKEN_MARK, "")  # a stop string has taken the marker away
        return text

    def _say(self, event: AnswerEvent) -> None:
        if self.max_calls is None or self.num_calls < self.max_calls:
            self.events.append(event)


Syntax = Callable[[Reader, Writer], Waiting[None]]
"""Reads an answer to its end and writes its events."""


class Parser:
    """Runs a syntax over text as it arrives (an `AnswerParser`)."""

    def __init__(self, syntax: Syntax, writer: Writer) -> None:
        self._reader = Reader(writer.tokens)
        self._writer = writer
        self._reading = syntax(self._reader, writer)
        next(self._reading, None)

    @property
    def thinking(self) -> Thinking:
        """Where the text so far stands."""
        return self._writer.thinking

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take more text."""
        self._reader.push(text)
        return self._events()

    def finish(self) -> list[AnswerEvent]:
        """End the answer."""
        self._reader.end()
        events = self._events()
        self._writer.close()
        return [*events, *self._taken()]

    def _events(self) -> list[AnswerEvent]:
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[AnswerEvent]:
        events, self._writer.events = self._writer.events, []
        return events


def no_call(reader: Reader, writer: Writer, marker: str) -> None:
    """Go on behind a marker that no call follows: letters stay text, and a token never was text.

    An answer that was cut off in the middle of a call's head loses what there is of it.
    """
    if marker not in writer.tokens:
        writer.content(marker)
    elif reader.exhausted:
        reader.drop()


class WholeReasoning:
    """Holds reasoning back until it is over, and gives it out in one piece."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._held = ""

    @property
    def thinking(self) -> Thinking:
        """Where the text so far stands."""
        return self._parser.thinking

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take more text."""
        return self._passed(self._parser.feed(text))

    def finish(self) -> list[AnswerEvent]:
        """End the answer."""
        events = self._passed(self._parser.finish())
        return events + self._released()

    def _passed(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        passed: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                self._held += event.text
            else:
                passed += [*self._released(), event]
        return passed

    def _released(self) -> list[AnswerEvent]:
        held, self._held = self._held, ""
        return [ReasoningDelta(held)] if held else []


class PlainParser:
    """Passes text on: nothing in it is more than text."""

    thinking: Thinking = "over"

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the text as it is."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        """Return nothing: nothing was held back."""
        return []


def random_id(_name: str, _index: int) -> str:
    """Return a call's id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"
