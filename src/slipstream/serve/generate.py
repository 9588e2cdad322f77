"""Answering one request: submit its jobs, gather or stream what comes back, and leave nothing behind."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.request import FinishReason
from slipstream.serve.answers import Tally
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import HttpError, aborted, stopped, timed_out
from slipstream.serve.stream import EventStream, Json, until_disconnect
from slipstream.serve.ticket import Job, StepEvent, Ticket
from slipstream.serve.tools.form import without_marks
from slipstream.serve.worker import EngineWorker
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

_MANY_ENTRIES = 2000  # which take the event loop some ten milliseconds


class Writer(Protocol):
    """Writes one request's answer in the form of its API; each of an answer's events is given to it once."""

    @property
    def tells_of_aborts(self) -> bool:
        """Whether an answer that was called off has a form of its own; if not, it ends with an error."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the answer goes out in parts."""
        ...

    def whole(self, tallies: Sequence[Tally], events: Sequence[Sequence[StepEvent]]) -> Json | list[Json]:
        """Return an answer that is not streamed, from all events of each of its tallies."""
        ...

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return what a stream says of an event of the index-th answer."""
        ...

    def end(self, tallies: Sequence[Tally]) -> bytes:
        """Return how a stream ends whose answers are all over."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """Return how a stream that has begun ends with an error."""
        ...


@dataclass(frozen=True)
class Generator:
    """Answers requests with the worker's engine."""

    worker: EngineWorker
    tokenizer: Tokenizer
    config: ServeConfig
    _under_way: dict[Ticket, "_Owner"] = field(default_factory=dict, init=False)

    def end_all(self) -> int:
        """End every answer under way with an error its client is told of; returns how many requests that were."""
        for ticket in self._under_way:
            ticket.deliver(0, stopped())
        return len(self._under_way)

    def abort(self, caller: str, name: str) -> int:
        """End a caller's answers of that name; returns how many requests that were."""
        own = [(ticket, owner) for ticket, owner in self._under_way.items() if owner.caller == caller]
        found = [(ticket, owner.named(name, len(ticket.jobs))) for ticket, owner in own]
        return self._abort([(ticket, indices) for ticket, indices in found if indices])

    def abort_all(self) -> int:
        """End everybody's answers; returns how many requests that were."""
        return self._abort([(ticket, range(len(ticket.jobs))) for ticket in self._under_way])

    async def probe(self, job: Job, timeout_s: float) -> None:
        """Make an answer nobody reads; raises HttpError if it takes too long."""
        ticket = self.worker.submit([job])
        try:
            async with asyncio.timeout(timeout_s):
                await ticket.next_event()
        except TimeoutError:
            raise HttpError(503, f"The model has made no token within {timeout_s:g} s.") from None
        finally:
            self.worker.cancel(ticket)

    async def respond(
        self,
        request: Request,
        jobs: Sequence[Job],
        writer: Writer,
        names: Sequence[str] = (),
        each: Sequence[str] = (),
    ) -> Response:
        """Return the answer to a request, as one JSON object or as a stream.

        Args:
            names: what its client may call it by, beside the request's id.
            each: what its client may call each of its answers by.
        """
        request_id = request.state.request_id
        ticket = self.worker.submit(jobs)
        run = _Run(ticket, writer, not writer.streams or self.config.log_prompts)
        too_late = timed_out(self.config.request_timeout_s)
        timer = asyncio.get_running_loop().call_later(self.config.request_timeout_s, ticket.deliver, 0, too_late)
        self._under_way[ticket] = _Owner(request.state.caller, frozenset((request_id, *names)), tuple(each))

        def close() -> None:
            timer.cancel()
            self._under_way.pop(ticket, None)
            self.worker.cancel(ticket)
            self._log(request_id, run)

        if writer.streams:
            return EventStream(run, close)
        try:
            body = await until_disconnect(request.receive, self._gather(run))
        finally:
            run.when_more(None)
            close()
        return Response(status_code=499) if body is None else body

    def _abort(self, answers: Sequence[tuple[Ticket, Sequence[int]]]) -> int:
        for ticket, indices in answers:
            for index in indices:
                ticket.add(index, StepEvent((), finish_reason=FinishReason.ABORT))
            ticket.announce()
            self.worker.cancel(ticket, indices)
        return len(answers)

    async def _gather(self, run: "_Run") -> Response:
        await run.whole()

        def write() -> Response:
            return JSONResponse(run.writer.whole(run.tallies, run.events))

        is_long = _takes_long(itertools.chain(*run.events))
        return await asyncio.to_thread(write) if is_long else write()

    def _log(self, request_id: str, run: "_Run") -> None:
        fields: dict[str, object] = {
            "request_id": request_id,
            "outcome": run.outcome or "disconnected",
            "prompt_tokens": sum(len(tally.job.prompt) for tally in run.tallies),
            "completion_tokens": sum(tally.num_tokens for tally in run.tallies),
            "acceptance_length": [round(tally.stats.acceptance_length, 3) for tally in run.tallies],
        }
        if self.config.log_prompts:
            fields["prompts"] = [self.tokenizer.decode(tally.job.prompt, False) for tally in run.tallies]
            fields["answers"] = [without_marks("".join(event.text for event in events)) for events in run.events]
        logger.info("answer", extra={"fields": fields})


class _Owner(NamedTuple):
    """Who waits for an answer: the key it came with, and what its client calls it."""

    caller: str
    names: frozenset[str]
    each: tuple[str, ...] = ()

    def named(self, name: str, count: int) -> list[int]:
        """Return which of so many answers go by a name."""
        return [at for at in range(count) if name in self.names or (self.each and self.each[at] == name)]


class _Run:
    """One request under way; as a stream, its parts."""

    def __init__(self, ticket: Ticket, writer: Writer, keeps_events: bool) -> None:
        self.writer = writer
        self.tallies = [Tally(job) for job in ticket.jobs]
        self.events: list[list[StepEvent]] = [[] for _ in ticket.jobs]
        self.outcome = ""
        self._ticket = ticket
        self._keeps_events = keeps_events
        self._open = set(range(len(ticket.jobs)))

    @property
    def over(self) -> bool:
        """Whether all of it is over, well or not."""
        return self.outcome != ""

    @property
    def is_long(self) -> bool:
        """Whether what has come takes long to write."""
        return _takes_long(event for _, event in self._ticket.pending() if not isinstance(event, HttpError))

    def when_more(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` when a step gave something."""
        self._ticket.when_announced(wake)

    def part(self) -> bytes:
        """Return what has come, as its API streams it."""
        pieces = []
        try:
            for index, event in self._new():
                pieces.append(self.writer.part(index, self.tallies, event))
        except HttpError as error:
            pieces.append(self.writer.failure(error))
        else:
            if self.outcome:
                pieces.append(self.writer.end(self.tallies))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def whole(self) -> None:
        """Wait until all answers are over; raises HttpError where one failed."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            try:
                for _ in self._new():
                    pass
            except HttpError as error:
                if not over.done():
                    over.set_exception(error)
            if self.over and not over.done():
                over.set_result(None)

        self.when_more(take)
        await over

    def _new(self) -> Iterator[tuple[int, StepEvent]]:
        """Count what has come, and yield it; raises HttpError where an answer failed: then nothing more follows."""
        for index, event in self._ticket.take():
            if self.over:
                return
            if isinstance(event, HttpError) and event.status == 499 and index not in self._open:
                continue  # it was called off, and what it came to was told
            if isinstance(event, HttpError):
                self.outcome = "timeout" if event.status == 504 else f"error {event.status}"
                raise event
            if index not in self._open:  # it was over when it was called off, or is since then
                continue
            if event.finish_reason is FinishReason.ABORT and not self.writer.tells_of_aborts:
                self.outcome = "aborted"
                raise aborted()
            self.tallies[index].count(event)
            if self._keeps_events:
                self.events[index].append(event)
            if event.finish_reason is not None:
                self._open.remove(index)
                self.outcome = "" if self._open else "finished"
            yield index, event


def _takes_long(events: Iterable[StepEvent]) -> bool:
    """Tell whether events have so much in them (log probabilities mostly) that writing it holds the event loop up."""
    num_entries = 0
    for event in events:
        logprob = event.tokens[0].logprob if event.tokens else None
        num_entries += len(event.tokens) * (1 if logprob is None else 1 + len(logprob.top))
        num_entries += MAX_TOP_LOGPROBS * len(event.prompt_logprobs or ())
    return num_entries > _MANY_ENTRIES
