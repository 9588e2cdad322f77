"""Answering one request: submit its jobs, gather or stream what comes back, and leave nothing behind."""

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.answers import AnswerWriter, Tally, Wants
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import HttpError, stopped, timed_out
from slipstream.serve.stream import DONE, EventStream, error_events, server_sent_event, until_disconnect
from slipstream.serve.ticket import Job, StepEvent, Ticket
from slipstream.serve.worker import EngineWorker
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

logger = logging.getLogger(__name__)

_MANY_ENTRIES = 2000  # which take the event loop some ten milliseconds
T = TypeVar("T")


@dataclass(frozen=True)
class Generator:
    """Answers requests with the worker's engine."""

    worker: EngineWorker
    tokenizer: Tokenizer
    config: ServeConfig
    _under_way: set[Ticket] = field(default_factory=set, init=False)

    def end_all(self) -> int:
        """End every answer under way with an error its client is told of; returns how many requests that were."""
        for ticket in self._under_way:
            ticket.deliver(0, stopped())
        return len(self._under_way)

    async def respond(self, request: Request, jobs: Sequence[Job], wants: Wants) -> Response:
        """Return the answer to a request, as one JSON object or as a stream."""
        request_id = request.state.request_id
        head = {
            "id": f"{'chatcmpl' if wants.kind == 'chat' else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": self.config.model_name,
        }
        writer = AnswerWriter(wants, self.tokenizer, head, self.worker.simulated_acceptance)
        ticket = self.worker.submit(jobs)
        run = _Run(ticket, writer, wants, asyncio.get_running_loop().time() + self.config.request_timeout_s)

        self._under_way.add(ticket)

        def close() -> None:
            self._under_way.discard(ticket)
            self.worker.cancel(ticket)
            self._log(request_id, run)

        if wants.stream:
            return EventStream(self._stream(run), close)
        try:
            body = await until_disconnect(request.receive, self._gather(run))
        finally:
            close()
        return Response(status_code=499) if body is None else body

    async def _gather(self, run: "_Run") -> Response:
        while not run.finished:
            await self._next(run)

        def write() -> Response:
            choices = [
                run.writer.choice(index, run.tallies[index], events, events[-1])
                for index, events in enumerate(run.events)
            ]
            return JSONResponse(run.writer.whole(choices, run.writer.usage(run.tallies)))

        return await _written(_num_entries(itertools.chain(*run.events), run.wants), write)

    async def _stream(self, run: "_Run") -> AsyncIterator[bytes]:
        writer, wants = run.writer, run.wants
        try:
            while not run.finished:
                index, event = await self._next(run)
                if wants.kind == "chat" and not run.tallies[index].started:
                    # Not before the first token is there: clients take a stream's first event for its first token.
                    yield server_sent_event(writer.chunk([writer.opening(index)]))
                yield await _written(_num_entries([event], wants), functools.partial(run.event, index, event))
        except HttpError as error:
            run.outcome = f"error {error.status}"
            yield error_events(error)
            return
        if wants.usage:
            yield server_sent_event(writer.chunk([], writer.usage(run.tallies)))
        yield DONE

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
            fields["answers"] = ["".join(event.text for event in events) for events in run.events]
        logger.info("answer", extra={"fields": fields})


class _Run:
    """One request under way."""

    def __init__(self, ticket: Ticket, writer: AnswerWriter, wants: Wants, deadline: float) -> None:
        self.ticket = ticket
        self.writer = writer
        self.wants = wants
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

    def event(self, index: int, event: StepEvent) -> bytes:
        """Return what a stream says of an event."""
        last = event if event.finish_reason is not None else None
        usage = self.writer.usage(self.tallies) if self.wants.running_usage else None
        choice = self.writer.choice(index, self.tallies[index], [event], last)
        return server_sent_event(self.writer.chunk([choice], usage))


def _num_entries(events: Iterable[StepEvent], wants: Wants) -> int:
    """Return about how many tokens and log probabilities have to be written for events."""
    each = 1 + (wants.logprobs or 0)
    return sum(each * len(event.tokens) + MAX_TOP_LOGPROBS * len(event.prompt_logprobs or ()) for event in events)


async def _written(num_entries: int, write: Callable[[], T]) -> T:
    """Return what `write` returns; off the event loop where it has much to write (log probabilities mostly)."""
    return await asyncio.to_thread(write) if num_entries > _MANY_ENTRIES else write()
