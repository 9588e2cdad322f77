"""Answers being made, as the event loop sees them: jobs handed to the engine's thread, and what comes back."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.serve.errors import HttpError
from slipstream.serve.tools.form import PLAIN, AnswerForm
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats


@dataclass(frozen=True)
class Job:
    """One answer to make: a prompt in tokens, how, and how to read what comes.

    Args:
        show_stop: what ended the answer is part of its text.
        prompt_text: the prompt as it was sent, if that was text to go on from.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    speculate: bool = True
    skip_special: bool = True
    show_stop: bool = False
    prompt_text: str | None = None
    form: AnswerForm = PLAIN


class StepEvent(NamedTuple):
    """What one step gave an answer.

    Args:
        num_drafted: nodes the target checked in this step beside its own.
        stats: the answer's acceptance, given with the last event.
        prompt_logprobs: given with the first event if they were asked for.
        stop: the stop string that ended the answer.
        num_cached: the prompt's tokens that were found in the cache.
    """

    tokens: tuple[EmittedToken, ...]
    num_drafted: int = 0
    finish_reason: FinishReason | None = None
    stats: AcceptanceStats | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    stop: str | None = None
    num_cached: int = 0

    @property
    def text(self) -> str:
        """The text of this step."""
        return self.tokens[0].text if len(self.tokens) == 1 else "".join([token.text for token in self.tokens])


Delivered = tuple[int, StepEvent | HttpError]


class Ticket:
    """A request's answers under way. Holds their events until somebody takes them; the engine never waits for that."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._events: list[Delivered] = []
        self._wake: Callable[[], None] | None = None

    def deliver(self, index: int, event: StepEvent | HttpError) -> None:
        """Add an event of the index-th answer and tell whoever reads; called on the event loop."""
        self.add(index, event)
        self.announce()

    def add(self, index: int, event: StepEvent | HttpError) -> None:
        """Add an event; `announce` follows, once for all events of a step."""
        self._events.append((index, event))

    def announce(self) -> None:
        """Tell whoever reads that there are events."""
        if self._wake is not None:
            self._wake()

    def when_announced(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` when there are events; at once if there are some now."""
        self._wake = wake
        if self._events:
            self.announce()

    def pending(self) -> Sequence[Delivered]:
        """Return the events that nobody took yet."""
        return self._events

    def take(self) -> list[Delivered]:
        """Return the events since the last call, each with the answer it belongs to; an HttpError ends that answer."""
        events, self._events = self._events, []
        return events

    async def next_event(self) -> tuple[int, StepEvent]:
        """Wait for the next event, where nobody else reads; raises HttpError if the answer failed."""
        came = asyncio.Event()
        self.when_announced(came.set)
        await came.wait()
        index, event = self._events.pop(0)
        if isinstance(event, HttpError):
            raise event
        return index, event
