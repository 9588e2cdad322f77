"""The engine: plan a step, have an executor run it, commit what came of it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.checkpoint.spec import ModelSpec
from slipstream.engine.config import EngineConfig
from slipstream.engine.memory import explained_out_of_memory
from slipstream.engine.output import Detokenizer, Emission
from slipstream.engine.pages import PageAllocator
from slipstream.engine.prompt_pace import PromptPace
from slipstream.engine.request import FinishReason, Request, Status
from slipstream.engine.scheduler import DraftNeeds, Scheduled, Scheduler
from slipstream.engine.session import Session
from slipstream.engine.stats import DraftDoubt, EngineStats
from slipstream.errors import ConfigError, RankLostError, RequestError, StepError
from slipstream.executors.interface import Executor, Joined, Left, RowOutput, StepInput, StepOutput, Work
from slipstream.speculation.drafter import Drafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.simulate import check_rates
from slipstream.speculation.tree import TreeShape

logger = logging.getLogger(__name__)

# Kernels begin to read at a multiple of their block, and what they read of pages before a window is hidden, but read.
_READ_BEFORE = 512


class Engine:
    """Continuous batching over one executor. Not thread-safe: one thread adds, steps and aborts.

    `config` is what it was built with; token ids lie below `vocab_size`.
    """

    def __init__(self, executor: Executor, config: EngineConfig, spec: ModelSpec) -> None:
        self.executor = executor
        self.config = config
        self.vocab_size = spec.vocab_size
        drafter = executor.drafter
        needs = draft_needs(drafter)
        self._left: list[Left] = []
        self._lost_pages: set[int] = set()  # since the last step: an idle engine may lose the same ones many times
        self._pages = PageAllocator(config.resolve_num_pages(needs.extra_slots), self._lost_pages.add)
        self._scheduler = Scheduler(
            config, self._pages, needs, self._leave, spec.mla is not None, _tokens_kept(spec, drafter)
        )
        self._sessions: dict[int, Session] = {}
        self._free_rows = list(range(config.max_requests - 1, -1, -1))
        self._by_row: dict[int, Request] = {}
        self._next_id = self._next_epoch = 0
        self._doubt = DraftDoubt() if drafter.has_kv else None
        self._simulated: tuple[float, ...] = ()
        self._prompt_pace = PromptPace(config, executor)
        self._idle = False  # whether the last request has ended and no step has begun since
        self._stepped: float | None = None  # when the last step of a busy spell ended
        self.stats = EngineStats()

    @property
    def drafter(self) -> Drafter:
        """The drafter in use."""
        return self.executor.drafter

    @property
    def simulated_acceptance(self) -> tuple[float, ...]:
        """Rates by position that decide acceptance instead of the target; empty outside measurements."""
        return self._simulated

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages or a place."""
        return self._scheduler.num_waiting

    @property
    def page_usage(self) -> float:
        """Share of the KV cache's pages that requests hold."""
        return self._pages.num_in_use / self._pages.num_pages

    @property
    def has_work(self) -> bool:
        """Tell whether a step would do anything."""
        return bool(self._sessions)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        end_tokens: Sequence[int] = (),
        detokenizer: Detokenizer | None = None,
        speculate: bool = True,
    ) -> int:
        """Queue a prompt and return the request's id. Raises RequestError if it can never run."""
        self.check_request(prompt, params)
        if params.stop and detokenizer is None:
            raise RequestError("stop strings need a tokenizer; give stop_token_ids instead.")
        ends = () if params.ignore_eos else tuple(end_tokens)
        request = Request(self._next_id, tuple(prompt), params, seed, (*ends, *params.stop_token_ids), speculate)
        self._next_id += 1
        self._sessions[request.request_id] = Session(request, detokenizer)
        self._scheduler.add(request)
        return request.request_id

    def add_computed(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Start a request as if its prompt had been computed: its keys are whatever the cache holds.

        RequestError, and nothing is queued, if it cannot start at once.

        For measurements: decoding from a long context can be timed without computing it first.
        """
        request_id = self.add(prompt, params, seed)
        try:
            self._scheduler.start_computed(self._sessions[request_id].request)
        except RequestError:
            self.abort(request_id)
            raise
        return request_id

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError for what can never run. Reads settings only, so any thread may ask."""
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token (a chat template always does).")
        if len(prompt) >= self.config.max_context:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; the context holds {self.config.max_context} and the answer "
                "needs at least one. Shorten the prompt or raise max_context (--max-context)."
            )
        if params.grammar is not None and self._simulated:
            raise RequestError("response_format needs the target's own tokens, and this engine simulates acceptance.")
        for name, ids in (
            ("The prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                raise RequestError(f"{name} has token id {wrong}, out of vocabulary; it has {self.vocab_size} tokens.")

    def abort(self, request_id: int) -> bool:
        """End a request now and take its pages back; False if it had ended already."""
        session = self._sessions.get(request_id)
        if session is None:
            return False
        self._end(session.request, FinishReason.ABORT)
        return True

    def forget_prompts(self) -> bool:
        """Drop the cached pages of earlier prompts; False, and nothing is dropped, while a request is under way."""
        if self.has_work:
            return False
        # Pages that were allocated lost what they held before.
        self._pages.release(self._pages.allocate(self._pages.num_available) or [])
        return True

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank that holds part of the model is lost."""
        self.executor.when_lost(callback)

    def warm_up(self) -> list[str]:
        """Make ready what traffic can need, before the first request; return what that took, in sentences."""
        with explained_out_of_memory("graphs were captured"):
            return self.executor.warm_up()

    def set_tree(self, shape: TreeShape) -> None:
        """Draft trees of another shape from the next step on; ConfigError if this drafter or the cache cannot."""
        one = self.config.pages_for(self.config.max_context + max(shape.num_nodes - 1, shape.scratch))
        if one > self._pages.num_pages:
            raise ConfigError(
                f"{shape}: with its drafted slots one whole context takes {one} pages, and the cache has "
                f"{self._pages.num_pages}. Choose a smaller tree, or start with more pages."
            )
        if self.executor.reshape(shape):
            self._scheduler.start_over()
        self._scheduler.set_needs(draft_needs(self.drafter))

    def explain_drafting(self) -> dict[str, object]:
        """Say what decides how far is drafted, and what it knows; nothing where nothing does."""
        return self.executor.explain()

    def simulate_acceptance(self, rates: Sequence[float]) -> None:
        """Keep drafted tokens by these rates from the next step on, whatever the target says; () ends it.

        For measurements: the answers are not the target's. Requests with a grammar are refused meanwhile.
        """
        check_rates(rates)
        if rates and any(session.request.params.grammar is not None for session in self._sessions.values()):
            raise ConfigError("A request with a grammar is under way; acceptance cannot be simulated until it ends.")
        self._simulated = tuple(rates)

    def step(self, patience_s: float = 0.0) -> list[Emission]:
        """Plan every request's next part, have it run, and commit what came of it: draft, check, keep what agrees.

        An executor that runs ahead gives the tokens of the step before the one being started; then the first step
        after a pause gives nothing yet.

        Args:
            patience_s: between two prompts, an executor that can run several steps in one call may go on for so long,
                until an answer ends or somebody asks it to `hurry`.
        """
        started = time.perf_counter() if self._stepped is None or self._idle else self._stepped
        self._idle, self._stepped = False, None
        executor = self.executor
        plan = self._scheduler.plan(self._prompt_pace.budget(self._scheduler.running, self.num_waiting))
        with self._ending_on_failure(plan):
            if plan:
                self.stats.begin_step()
                executor.submit(self._input(plan, patience_s))
            due = executor.in_flight > (executor.lookahead if plan else 0)
            output = executor.collect() if due else None
        emissions = [] if output is None else self._commit(output)
        if not self._sessions:
            self._settle()
        ended = time.perf_counter()
        self.stats.add_busy(ended - started, executor.in_flight)
        self._stepped = ended
        return emissions

    def rest(self) -> None:
        """Wait until the device has done what the last step left it, and count that; for who has nothing else to do."""
        if self._idle and self._stepped is not None:
            self._settle()  # the last request may have been aborted between two steps
            self.stats.add_times(self.executor.rest())
            self.stats.add_busy(time.perf_counter() - self._stepped, in_flight=0)
            self._stepped = None

    def hurry(self) -> None:
        """Let a patient step end soon, because there is something else to do; any thread may ask."""
        self.executor.hurry()

    def _input(self, plan: Sequence[Scheduled], patience_s: float) -> StepInput:
        """Say what changed since the last step, and what this one computes."""
        joined: list[Joined] = []
        pages: dict[int, Sequence[int]] = {}
        work: list[Work] = []
        ahead = self.executor.ahead(patience_s)
        if ahead and not self._scheduler.reserve_answers(ahead):
            ahead = 0
        for scheduled in plan:
            request = scheduled.request
            if request.row is None:
                joined.append(self._join(request))
            elif len(request.pages) > request.num_pages_sent:
                pages[request.row] = request.pages[request.num_pages_sent :]
            request.num_pages_sent = len(request.pages)
            assert request.row is not None, "a planned request has a row"
            work.append(Work(request.row, scheduled.num_tokens, scheduled.emits, scheduled.drafts))
        step = StepInput(self._left[:], list(self._lost_pages), joined, pages, work, self._simulated, patience_s, ahead)
        self._left.clear()
        self._lost_pages.clear()
        return step

    def _settle(self) -> None:
        """Let the executor forget the last rows, and drop what is still in flight for them: nobody waits for it.

        Nobody is hurt by a failure either: the executor starts over, and what the last step gave is handed out.
        """
        try:
            if self._left:
                self.executor.submit(self._input([], 0.0))
            while self.executor.in_flight:
                self.stats.add_times(self.executor.collect())
        except RankLostError:
            raise
        except Exception as error:
            logger.error("The executor could not let the last rows go and starts over: %s", error, exc_info=error)
            self._left.clear()
            self.executor.reset()

    def _join(self, request: Request) -> Joined:
        """Give a request a row."""
        request.row, request.epoch = self._free_rows.pop(), self._next_epoch
        self._next_epoch += 1
        self._by_row[request.row] = request
        return Joined(
            request.row,
            request.epoch,
            tuple(request.tokens),
            len(request.prompt),
            request.num_committed,
            tuple(request.pages),
            request.params,
            request.seed,
            request.end_tokens,
            request.speculate,
            min(len(request.prompt) + request.params.max_tokens, self.config.max_context),
            request.computed,
        )

    def _leave(self, request: Request) -> None:
        """Take a row back from a request that gives its pages back."""
        if request.row is not None:
            self._left.append(Left(request.row, request.num_registered * self.config.page_size))
            self._free_rows.append(request.row)
            del self._by_row[request.row]
            request.row, request.num_pages_sent = None, 0

    def _commit(self, output: StepOutput) -> list[Emission]:
        """Hand out what a step gave; what was in flight for a request that has ended or started over is dropped."""
        self.stats.steps += output.steps
        self.stats.add_times(output)
        self._prompt_pace.note(output)
        emissions: dict[int, list[Emission]] = {}
        for row in output.rows:
            request = self._by_row.get(row.row)
            if request is None or request.epoch != row.epoch:
                continue
            if row.tokens and request.request_id not in emissions:
                self._scheduler.read(request)
            emission = self._commit_row(request, row)
            if emission is not None:
                emissions.setdefault(request.request_id, []).append(emission)
                if emission.finish_reason is not None:
                    self._end(request, emission.finish_reason)
        if self._doubt is not None:
            self._doubt.look(self.stats.acceptance)
        return [own[0] if len(own) == 1 else Emission.joined(own) for own in emissions.values()]

    def _commit_row(self, request: Request, row: RowOutput) -> Emission | None:
        session = self._sessions[request.request_id]
        if not row.tokens and row.failure is None:
            self._scheduler.commit(request, row.num_tokens, [])
            return None
        emission = session.emit(row, self.config.max_context - len(request.tokens), self.stats.acceptance)
        if emission.error is None:
            self._scheduler.commit(request, row.num_tokens, [token.token_id for token in emission.tokens])
        return emission

    @contextmanager
    def _ending_on_failure(self, plan: Sequence[Scheduled]) -> Iterator[None]:
        """End the requests of a step that fails, and say so; others start over, for the executor's state is lost."""
        try:
            with explained_out_of_memory("a step ran"):
                yield
        except RankLostError:  # nothing can run any more, so nothing is tidied up either
            raise
        except Exception as error:
            requests = [work.request for work in plan] or list(self._scheduler.running)
            for request in requests:
                self._end(request, FinishReason.ERROR)
            self._scheduler.start_over()
            self._left.clear()
            self.executor.reset()
            raise StepError([request.request_id for request in requests], error) from error

    def check_invariants(self) -> None:
        """Assert that pages, queues and sessions agree; tests call it after every step."""
        self._scheduler.check()
        running = {request.request_id for request in self._scheduler.running}
        assert running <= set(self._sessions), "a running request has no session"
        assert len(self._sessions) == len(running) + self._scheduler.num_waiting, "a request is in no queue"

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is not Status.FINISHED:
            self.stats.preemptions += request.num_preempted
            self.stats.cached_tokens += request.num_cached
            self.stats.prompt_tokens += len(request.prompt)
            self._scheduler.finish(request, reason)
        self._sessions.pop(request.request_id, None)
        self._idle = not self._sessions


def draft_needs(drafter: Drafter) -> DraftNeeds:
    """Return what a drafter asks of the scheduler."""
    return DraftNeeds(drafter.max_nodes, drafter.scratch, drafter.has_kv)


def _tokens_kept(spec: ModelSpec, drafter: Drafter) -> int | None:
    """Return how many committed tokens some layer of the target or the draft may read; None where one reads all."""
    windows = [spec.widest_window, *([drafter.window] if drafter.has_kv else [])]
    shown = [window for window in windows if window is not None]
    return max(shown) + _READ_BEFORE if len(shown) == len(windows) else None
