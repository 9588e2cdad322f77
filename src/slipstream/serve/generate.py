"""Answering one request: submit its jobs, gather or stream what comes back, and leave nothing behind."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slipstream.checkpoint.tokenizer import Tokenizer
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
T = TypeVar("T")


class Writer(Protocol):
    """Writes one request's answer in the form of its API; each of an answer's events is given to it once."""

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
        return self._abort(
            [t for t, owner in self._under_way.items() if owner.caller == caller and name in owner.names]
        )

    def abort_all(self) -> int:
        """End everybody's answers; returns how many requests that were."""
        return self._abort(list(self._under_way))

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
        self, request: Request, jobs: Sequence[Job], writer: Writer, names: Sequence[str] = ()
    ) -> Response:
        """Return the answer to a request, as one JSON object or as a stream.

        Args:
            names: what its client may call it by, beside the request's id.
        """
        request_id = request.state.request_id
        ticket = self.worker.submit(jobs)
        run = _Run(ticket, writer, asyncio.get_running_loop().time() + self.config.request_timeout_s)

        self._under_way[ticket] = _Owner(request.state.caller, frozenset((request_id, *names)))

        def close() -> None:
            self._under_way.pop(ticket, None)
            self.worker.cancel(ticket)
            self._log(request_id, run)

        if writer.streams:
            return EventStream(self._stream(run), close)
        try:
            body = await until_disconnect(request.receive, self._gather(run))
        finally:
            close()
        return Response(status_code=499) if body is None else body

    def _abort(self, tickets: Sequence[Ticket]) -> int:
        for ticket in tickets:
            ticket.deliver(0, aborted())
        return len(tickets)

    async def _gather(self, run: "_Run") -> Response:
        while not run.finished:
            await self._next(run)

        def write() -> Response:
            return JSONResponse(run.writer.whole(run.tallies, run.events))

        return await _written(itertools.chain(*run.events), write)

    async def _stream(self, run: "_Run") -> AsyncIterator[bytes]:
        try:
            while not run.finished:
                index, event = await self._next(run)

                def write(index: int = index, event: StepEvent = event) -> bytes:
                    return run.writer.part(index, run.tallies, event)

                yield await _written([event], write)
        except HttpError as error:
            run.outcome = f"error {error.status}"
            yield run.writer.failure(error)
            return
        yield run.writer.end(run.tallies)

    async def _next(self, run: "_Run") -> tuple[int, StepEvent]:
        try:
            async with asyncio.timeout_at(run.deadline):
                index, event = await run.ticket.next_event()
        except TimeoutError:
            run.outcome = "timeout"
            raise timed_out(self.config.request_timeout_s) from None
        run.take(index, event)
        return index, event

    def _log(self, request_id: str, run: "_Run") -> None:
        fields: dict[str, object] = {
            "request_id": request_id,
            "outcome": run.outcome or ("finished" if run.finished else "disconnected"),
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


class _Run:
    """One request under way."""

    def __init__(self, ticket: Ticket, writer: Writer, deadline: float) -> None:
        self.ticket = ticket
        self.writer = writer
        self.deadline = deadline
        self.tallies = [Tally(job) for job in ticket.jobs]
        self.events: list[list[StepEvent]] = [[] for _ in ticket.jobs]
        self.outcome = ""
        self._num_open = len(ticket.jobs)

    @property
    def finished(self) -> bool:
        """Whether every answer is over."""
        return self._num_open == 0

    def take(self, index: int, event: StepEvent) -> None:
        """Count an event."""
        self.tallies[index].count(event)
        self.events[index].append(event)
        self._num_open -= event.finish_reason is not None


def _num_entries(events: Iterable[StepEvent]) -> int:
    """Return about how many tokens and log probabilities have to be written for events."""
    return sum(
        sum(1 if token.logprob is None else 1 + len(token.logprob.top) for token in event.tokens)
        + MAX_TOP_LOGPROBS * len(event.prompt_logprobs or ())
        for event in events
    )


async def _written(events: Iterable[StepEvent], write: Callable[[], T]) -> T:
    """Return what `write` returns; off the event loop where it has much to write (log probabilities mostly)."""
    return await asyncio.to_thread(write) if _num_entries(events) > _MANY_ENTRIES else write()
