"""Between the event loop and the engine's thread: jobs go one way, events the other.

Everything that touches the engine runs on its thread, between steps, as a command. The event loop never waits for a
step and the engine never waits for a reader.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.engine.output import Emission, EmittedToken
from slipstream.engine.request import FinishReason
from slipstream.engine.thread import EngineThread
from slipstream.errors import RankLostError, RequestError, StepError
from slipstream.serve.errors import HttpError, lost, queue_full, shutting_down, stopped, too_many
from slipstream.serve.meters import AnswerTimes, Asked, Meters
from slipstream.serve.ticket import Job, StepEvent, Ticket

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnAnswer = Callable[[Job, Sequence[int], FinishReason], None]
Delivery = tuple[Ticket, int, StepEvent | HttpError]


class EngineWorker:
    """Owns an engine and the thread that runs it. Public methods are for the event loop's thread."""

    on_answer: OnAnswer | None = None
    """Hears of answers that are over, on the engine's thread: what was asked, its tokens, and why it ended."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_waiting: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self.max_answers = engine.config.max_requests + max_waiting
        self._thread = EngineThread(engine, self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[int, _Answer] = {}
        self._ids: dict[Ticket, set[int]] = {}
        self._outbox: deque[list[Delivery]] = deque()
        self._is_posted = False
        self._num_open = 0
        self._queued: deque[_Answer] = deque()
        self._num_started = 0
        self.draining = False
        self.meters = Meters()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and has the whole model to run."""
        return self._thread.alive

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot go on, where that is known."""
        return None if self._thread.lost is None else str(self._thread.lost)

    @property
    def simulated_acceptance(self) -> tuple[float, ...]:
        """The engine's simulated rates, if any."""
        return self._engine.simulated_acceptance

    @property
    def num_open(self) -> int:
        """Answers that were taken on and are not over."""
        return self._num_open

    def start(self) -> None:
        """Start the thread; events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every answer and the thread."""
        self.draining = True
        await asyncio.to_thread(self._thread.stop)

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Take on a request's answers, all or none; raises HttpError when there are too many or at the end."""
        if self._thread.lost is not None:
            self.meters.refused += 1
            raise lost(self._thread.lost)
        if self.draining or not self.alive:
            self.meters.refused += 1
            raise shutting_down()
        if len(jobs) > self.max_answers:
            raise too_many(len(jobs), self.max_answers)
        if self._num_open + len(jobs) > self.max_answers:
            self.meters.refused += 1
            raise queue_full(self.max_answers)
        self._num_open += len(jobs)
        ticket = Ticket(jobs)
        arrived = time.monotonic()
        self._command(lambda: self._add(ticket, arrived))
        return ticket

    def cancel(self, ticket: Ticket, indices: Collection[int] | None = None) -> None:
        """End answers nobody waits for, all or some; those that are over already are left alone."""
        self._thread.command(lambda: self._abort(ticket, indices))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine between two steps, and return what it returns."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                outcome = function(self._engine)
            except Exception as error:  # noqa: BLE001 (handed to whoever awaits the call)
                self._post(_set_exception, future, error)
            else:
                self._post(_set_result, future, outcome)

        self._command(command)
        return await future

    def between_steps(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread between two steps, and wait for it; not for the event loop's thread."""
        done: Future[None] = Future()

        def command() -> None:
            try:
                function()
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 (handed to whoever waits)
                done.set_exception(error)

        self._command(command)
        done.result()

    def _command(self, command: Callable[[], None]) -> None:
        if not self._thread.command(command):
            raise shutting_down()

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "the worker was started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def emitted(self, emissions: Sequence[Emission]) -> None:
        """Hand out what a step gave; on the engine's thread."""
        now = time.monotonic()
        finished = 0
        deliveries = []
        for emission in emissions:
            finished += self._answers[emission.request_id].times.emitted(len(emission.tokens), now)
            deliveries.append(self._event(emission))
        self.meters.step_sizes.observe(finished)
        self._start_queued(now)
        self._deliver(deliveries)

    def failed(self, error: StepError) -> None:
        """Tell the requests of a step that failed; on the engine's thread."""
        logger.error("a step failed, its requests are given up: %s", error, exc_info=error.__cause__)
        self.meters.failed_steps += 1
        failure = HttpError(500, "The step that computed this answer failed; the server's log has the reason.")
        self._deliver([self._close(i, failure) for i in error.request_ids if i in self._answers])
        self._engine.check_invariants()

    def ended(self, error: Exception | None) -> None:
        """End every answer under way; on the engine's thread, as its last act."""
        for request_id in list(self._answers):
            if not isinstance(error, RankLostError):
                self._engine.abort(request_id)
            event = lost(error) if isinstance(error, RankLostError) else stopped()
            self._deliver([self._close(request_id, event)])

    def _event(self, emission: Emission) -> Delivery:
        answer = self._answers[emission.request_id]
        answer.times.noted(emission.num_cached, emission.num_preempted)
        num_drafted = emission.stats.drafted - answer.num_drafted
        answer.num_drafted = emission.stats.drafted
        if emission.error is not None:
            return self._close(emission.request_id, _failure(emission.error))
        finished = emission.finish_reason is not None
        if self.on_answer is not None:
            answer.tokens += [token.token_id for token in emission.tokens]
            if emission.finish_reason is not None:
                self.on_answer(answer.ticket.jobs[answer.index], answer.tokens, emission.finish_reason)
        event = StepEvent(
            self._with_tail(emission, answer.ticket.jobs[answer.index]),
            num_drafted,
            emission.finish_reason,
            emission.stats if finished else None,
            emission.prompt_logprobs,
            emission.stop,
            emission.num_cached,
        )
        return self._close(emission.request_id, event) if finished else (answer.ticket, answer.index, event)

    def _with_tail(self, emission: Emission, job: Job) -> tuple[EmittedToken, ...]:
        """Return a step's tokens; text that waited for the answer's end goes with the last, and its stop if wanted."""
        tail = emission.tail
        if job.show_stop and emission.finish_reason is FinishReason.STOP and emission.tokens:
            ended_by = emission.tokens[-1].token_id
            if emission.stop is not None:
                tail += emission.stop
            elif ended_by in job.params.stop_token_ids:
                tail += self._tokenizer.decode([ended_by], job.skip_special)
        if not tail or not emission.tokens:
            return emission.tokens
        *others, last = emission.tokens
        return (*others, last._replace(text=last.text + tail))

    def _add(self, ticket: Ticket, arrived: float) -> None:
        self._ids[ticket] = set()
        for index, job in enumerate(ticket.jobs):
            if self._thread.ending:
                self._deliver([(ticket, index, stopped())])
                continue
            try:
                request_id = self._engine.add(
                    job.prompt,
                    job.params,
                    job.seed,
                    self._tokenizer.eos_token_ids,
                    job.form.detokenizer(self._tokenizer, job.skip_special),
                    job.speculate,
                )
            except Exception as error:  # noqa: BLE001 (a request that cannot begin ends alone; the thread lives on)
                self._deliver([(ticket, index, _failure(error))])
                continue
            asked = Asked(len(job.prompt), job.params.n, job.params.max_tokens)
            answer = _Answer(ticket, index, AnswerTimes(self.meters, asked, arrived))
            self._answers[request_id] = answer
            self._queued.append(answer)
            self._ids[ticket].add(request_id)
        if not self._ids[ticket]:
            del self._ids[ticket]
        self._start_queued(time.monotonic())

    def _start_queued(self, now: float) -> None:
        """Note which answers there is a place for: the engine takes them in the order they came in."""
        while self._queued and self._num_started < self._engine.config.max_requests:
            answer = self._queued.popleft()
            if not answer.over:
                answer.started = True
                answer.times.started(now)
                self._num_started += 1

    def _abort(self, ticket: Ticket, indices: Collection[int] | None) -> None:
        for request_id in list(self._ids.get(ticket, ())):
            if indices is not None and self._answers[request_id].index not in indices:
                continue
            self._engine.abort(request_id)
            self._deliver([self._close(request_id, HttpError(499, "The client went away."))])

    def _close(self, request_id: int, event: StepEvent | HttpError) -> Delivery:
        """Forget an answer and return its last event."""
        answer = self._answers.pop(request_id)
        open_ids = self._ids[answer.ticket]
        open_ids.remove(request_id)
        if not open_ids:
            del self._ids[answer.ticket]
        answer.over = True
        self._num_started -= answer.started
        answer.times.ended(_reason(event), time.monotonic())
        return answer.ticket, answer.index, event

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._outbox.append(deliveries)
            if not self._is_posted:
                self._is_posted = True
                self._post(self._hand_out)

    def _hand_out(self) -> None:
        """Give events to their tickets, on the event loop, in one go for a step or for all that have come meanwhile."""
        self._is_posted = False  # before the outbox is looked at: what comes from now on is posted again
        tickets: dict[Ticket, None] = {}
        while self._outbox:
            for ticket, index, event in self._outbox.popleft():
                if isinstance(event, HttpError) or event.finish_reason is not None:
                    self._num_open -= 1
                ticket.add(index, event)
                tickets[ticket] = None
        for ticket in tickets:
            ticket.announce()


class _Answer:
    """What the thread keeps for an answer under way."""

    def __init__(self, ticket: Ticket, index: int, times: AnswerTimes) -> None:
        self.ticket = ticket
        self.index = index
        self.times = times
        self.num_drafted = 0
        self.tokens: list[int] = []  # kept where somebody hears of answers
        self.started = False
        self.over = False


def _reason(event: StepEvent | HttpError) -> str:
    """Name the end of an answer, for the meters."""
    if isinstance(event, HttpError):
        return "abort" if event.status == 499 else "error"
    assert event.finish_reason is not None, "the answer is over"
    return event.finish_reason.value


def _failure(error: Exception) -> HttpError:
    """Return what a request is told whose own data could not be worked with; what was not foreseen is logged."""
    if isinstance(error, RequestError):
        return HttpError(400, str(error))
    logger.error("an answer failed alone: %s: %s", type(error).__name__, error, exc_info=error)
    return HttpError(500, "This answer failed; the server's log has the reason. Other answers are not affected.")


def _set_result(future: "asyncio.Future[T]", outcome: T) -> None:
    if not future.done():
        future.set_result(outcome)


def _set_exception(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
