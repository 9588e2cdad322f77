"""The engine: every step drafts, checks against the target in one pass, and keeps what agrees."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.engine.batch import Batch, build_batch
from slipstream.engine.config import EngineConfig
from slipstream.engine.graphs import CaptureCost, CycleLauncher
from slipstream.engine.memory import explained_out_of_memory
from slipstream.engine.mirror import LeadingRunner
from slipstream.engine.output import Detokenizer, Emission
from slipstream.engine.pages import PageAllocator
from slipstream.engine.pipeline import Pipeline
from slipstream.engine.request import FinishReason, Request, Status
from slipstream.engine.rounds import rounds_over
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import DraftNeeds, Scheduled, Scheduler
from slipstream.engine.session import Session
from slipstream.engine.stats import DraftDoubt, EngineStats, Phase
from slipstream.errors import ConfigError, RankLostError, RequestError, StepError
from slipstream.kernels import one_pool
from slipstream.models.target import Hidden
from slipstream.speculation.accept import Accepted, accept
from slipstream.speculation.choose import Chosen
from slipstream.speculation.drafter import Drafter, Observed
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.simulate import check_rates, simulate, simulated_counts
from slipstream.speculation.tree import Tree, TreeBatch, TreeShape

logger = logging.getLogger(__name__)

_SCORED_ROWS = 64  # rows of prompt logits at a time: 64 rows of a vocabulary of 128k take 32 MiB


class Engine:
    """Continuous batching over one target and one drafter. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, runner: Runner | LeadingRunner, drafter: Drafter, config: EngineConfig, vocab_size: int) -> None:
        self._runner = runner
        self._drafter = drafter
        self._config = config
        self._vocab_size = vocab_size
        self._device = runner.device
        needs = draft_needs(drafter)
        when_lost = drafter.lose_page if isinstance(drafter, Eagle3Drafter) else None
        self._pages = PageAllocator(config.resolve_num_pages(needs.extra_slots), when_lost)
        self._scheduler = Scheduler(config, self._pages, needs, drafter.forget, runner.two_forms)
        self._sessions: dict[int, Session] = {}
        self._next_id = 0
        self._doubt = DraftDoubt() if drafter.has_kv else None
        self._simulated: tuple[float, ...] = ()
        self._pipeline: Pipeline | None = None
        cycles = config.runs_cycles(self._device.type)
        if cycles and isinstance(runner, Runner) and Pipeline.supports(runner, drafter):  # ranks take ordinary steps
            self._pipeline = Pipeline(runner, drafter, config, self._scheduler, self._sessions)
        self._rounds = rounds_over(runner, drafter, config, self._scheduler, self._sessions)
        self.stats = EngineStats()

    @property
    def config(self) -> EngineConfig:
        """The settings the engine was built with."""
        return self._config

    @property
    def vocab_size(self) -> int:
        """Token ids lie below this."""
        return self._vocab_size

    @property
    def drafter(self) -> Drafter:
        """The drafter in use."""
        return self._drafter

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

    @property
    def launcher(self) -> CycleLauncher | None:
        """What launches decoding cycles on the device; None where every step is an ordinary one."""
        return None if self._pipeline is None else self._pipeline.launcher

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
        self._sessions[request.request_id] = Session(request, self._vocab_size, self._device, detokenizer)
        self._scheduler.add(request)
        return request.request_id

    def add_computed(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Start a request as if its prompt had been computed: its keys are whatever the cache holds.

        For measurements: decoding from a long context can be timed without computing it first.
        """
        request_id = self.add(prompt, params, seed)
        self._scheduler.start_computed(self._sessions[request_id].request)
        if isinstance(self._drafter, Eagle3Drafter):
            self._drafter.pretend(request_id, len(prompt) - 1)
        return request_id

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError for what can never run. Reads settings only, so any thread may ask."""
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token (a chat template always does).")
        if len(prompt) >= self._config.max_context:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; the context holds {self._config.max_context} and the answer "
                "needs at least one. Shorten the prompt or raise max_context (--max-context)."
            )
        if params.grammar is not None and self._simulated:
            raise RequestError("response_format needs the target's own tokens, and this engine simulates acceptance.")
        for name, ids in (
            ("The prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < self._vocab_size), None)
            if wrong is not None:
                raise RequestError(f"{name} has token id {wrong}, out of vocabulary; it has {self._vocab_size} tokens.")

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
        self._runner.when_lost(callback)

    def set_tree(self, shape: TreeShape) -> None:
        """Draft trees of another shape from the next step on; ConfigError if this drafter or the cache cannot."""
        one = self._config.pages_for(self._config.max_context + max(shape.num_nodes - 1, shape.scratch))
        if one > self._pages.num_pages:
            raise ConfigError(
                f"{shape}: with its drafted slots one whole context takes {one} pages, and the cache has "
                f"{self._pages.num_pages}. Choose a smaller tree, or start with more pages."
            )
        self._drafter.reshape(shape)
        self._scheduler.set_needs(draft_needs(self._drafter))

    def simulate_acceptance(self, rates: Sequence[float]) -> None:
        """Keep drafted tokens by these rates from the next step on, whatever the target says; () ends it.

        For measurements: the answers are not the target's. Requests with a grammar are refused meanwhile.
        """
        check_rates(rates)
        if rates and any(session.request.params.grammar is not None for session in self._sessions.values()):
            raise ConfigError("A request with a grammar is under way; acceptance cannot be simulated until it ends.")
        self._simulated = tuple(rates)

    def step(self, patience_s: float = 0.0) -> list[Emission]:
        """Run every scheduled request once: draft, check against the target, keep what agrees.

        On a GPU the tokens may be those of the cycle before the one being launched; then the first step after an
        ordinary one gives nothing yet.

        Args:
            patience_s: between two prompts, kernels that can run whole rounds may go on for so long, until an answer
                ends or somebody asks them to `hurry`.
        """
        started, timed = time.perf_counter(), self._timed_seconds()
        with torch.inference_mode(), one_pool(self._runner.ops):
            emissions = self._run_cycle()
            if emissions is None:
                emissions = self._run_plan(self._scheduler.plan(), patience_s)
        for emission in emissions:
            if emission.finish_reason is not None:
                self._end(self._sessions[emission.request_id].request, emission.finish_reason)
        self.stats.phase_seconds["host"] += time.perf_counter() - started - (self._timed_seconds() - timed)
        if self._doubt is not None:
            self._doubt.look(self.stats.acceptance)
        return emissions

    def hurry(self) -> None:
        """Let a patient step end soon, because there is something else to do; any thread may ask."""
        if self._rounds is not None:
            self._rounds.hurry()

    def _run_cycle(self) -> list[Emission] | None:
        """Let the device run ahead, where it may; None if this step is an ordinary one."""
        if self._pipeline is None:
            return None
        requests = list(self._scheduler.running)
        with self._ending_on_failure(requests):
            return self._pipeline.advance(self._simulated, self.stats)

    def _run_plan(self, plan: Sequence[Scheduled], patience_s: float) -> list[Emission]:
        """Run one step, in one call where the kernels can, else part by part; one without work does nothing."""
        if not plan:
            return []
        with self._ending_on_failure([work.request for work in plan]):
            whole = None if self._rounds is None or self._simulated else self._rounds.run(plan, patience_s, self.stats)
            emissions = self._run_parts(plan) if whole is None else whole
        self.stats.steps += 1
        return emissions

    def _run_parts(self, plan: Sequence[Scheduled]) -> list[Emission]:
        tree_batch = self._propose(plan)
        trees = tree_batch.unpack()
        batch = build_batch(plan, trees, self._device)
        hidden = self._verify(plan, batch)
        self._score_prompts(plan, batch, hidden)
        chosen = self._choose(plan, batch, trees, hidden)
        accepted = self._accept(plan, tree_batch, trees, chosen.tokens_L)
        emissions, kept = self._commit(plan, trees, accepted, chosen)
        self._observe(plan, batch, kept, hidden)
        return emissions

    @contextmanager
    def _ending_on_failure(self, requests: Sequence[Request]) -> Iterator[None]:
        """End the requests of a step that fails, and say so."""
        try:
            with explained_out_of_memory("a step ran"):
                yield
        except RankLostError:  # nothing can run any more, so nothing is tidied up either
            raise
        except Exception as error:
            for request in requests:
                self._end(request, FinishReason.ERROR)
            if self._pipeline is not None:
                self._pipeline.reset()
            raise StepError([request.request_id for request in requests], error) from error

    def warm_up(self) -> list[CaptureCost]:
        """Capture the graphs decoding will need, before the first request; return what each took (none on a CPU)."""
        if self._pipeline is None:
            return []
        with torch.inference_mode(), explained_out_of_memory("graphs were captured"):
            return self._pipeline.warm_up()

    def check_invariants(self) -> None:
        """Assert that pages, queues and sessions agree; tests call it after every step."""
        self._scheduler.check()
        if self._pipeline is not None:
            self._pipeline.check()
        running = {request.request_id for request in self._scheduler.running}
        assert running <= set(self._sessions), "a running request has no session"
        assert len(self._sessions) == len(running) + self._scheduler.num_waiting, "a request is in no queue"

    def _propose(self, plan: Sequence[Scheduled]) -> TreeBatch:
        """Return a tree for each emitting request; those that may not draft get a lone root."""
        emitting = [work for work in plan if work.emits]
        roots = TreeBatch.lone_roots([work.request.tokens[-1] for work in emitting], self._device)
        drafting = [row for row, work in enumerate(emitting) if work.drafts]
        if not drafting:
            return roots
        views = [self._session(emitting[row]).view() for row in drafting]
        with self._timed("draft"):
            return roots.replace(drafting, self._drafter.propose(views))

    def _verify(self, plan: Sequence[Scheduled], batch: Batch) -> Hidden:
        """Run the target once over everything planned."""
        with self._timed("verify"):
            return self._runner.forward(batch, [work.request.pages for work in plan])

    def _choose(self, plan: Sequence[Scheduled], batch: Batch, trees: Sequence[Tree], hidden: Hidden) -> Chosen:
        """Let the target choose at every node."""
        emitting = [work for work in plan if work.emits]
        rows = [row for work, tree in zip(emitting, trees, strict=True) for row in self._session(work).rows(tree)]
        with self._timed("verify"):
            return self._runner.choose(hidden, batch.logit_rows_L, rows)

    def _score_prompts(self, plan: Sequence[Scheduled], batch: Batch, hidden: Hidden) -> None:
        """Give requests that want their prompt's log probabilities those of this chunk."""
        for work, first_row in zip(plan, batch.first_rows, strict=True):
            session = self._session(work)
            rows = [first_row + row for row in session.wanted_prompt_rows(work.start, work.num_tokens)]
            for start in range(0, len(rows), _SCORED_ROWS):
                session.score_prompt(self._runner.logits(hidden, rows[start : start + _SCORED_ROWS]))

    def _accept(
        self, plan: Sequence[Scheduled], tree_batch: TreeBatch, trees: Sequence[Tree], chosen_L: Tensor
    ) -> Accepted:
        """Walk the trees along the target's choices."""
        emitting = [work for work in plan if work.emits]
        with self._timed("verify"):
            chosen_RN = torch.zeros_like(tree_batch.tokens_RN)
            chosen_RN[tree_batch.valid_RN] = chosen_L
            if self._simulated and emitting:
                seed_R = torch.tensor([work.request.seed for work in emitting])
                length_R = torch.tensor([len(work.request.tokens) for work in emitting])
                return simulate(trees, chosen_RN, simulated_counts(self._simulated, seed_R, length_R).tolist())
            return accept(tree_batch, chosen_RN)

    def _commit(
        self, plan: Sequence[Scheduled], trees: Sequence[Tree], accepted: Accepted, chosen: Chosen
    ) -> tuple[list[Emission], list[list[int]]]:
        """Hand out what was accepted; return it and, for each planned request, the nodes whose keys stay."""
        emissions: list[Emission] = []
        kept: list[list[int]] = []
        columns = (accepted.counts_R.tolist(), accepted.tokens_RE.tolist(), accepted.nodes_RE.tolist())
        paths = zip(trees, *columns, strict=True)
        first_row = 0
        for work in plan:
            session, path = self._session(work), list[int]()
            emission = None if session.failure is None else session.failed()
            if work.emits:
                tree, count, tokens, nodes = next(paths)
                at = chosen.at_nodes(first_row, len(tree.tokens))
                first_row += len(tree.tokens)
                pairs = session.sound(list(zip(tokens[:count], nodes[:count], strict=True)), at.failed)
                room = self._config.max_context - len(work.request.tokens)
                emission = session.emit(tree, pairs, at.logits, room, self.stats.acceptance)
                path = nodes[1 : len(emission.tokens)]
                self._runner.keep(work.request.pages, work.start + work.num_tokens - 1, path)
            emitted = [] if emission is None else [token.token_id for token in emission.tokens]
            self._scheduler.commit(work.request, work.num_tokens + len(path), emitted)
            emissions += [] if emission is None else [emission]
            kept.append(path)
        return emissions, kept

    def _observe(self, plan: Sequence[Scheduled], batch: Batch, kept: Sequence[Sequence[int]], hidden: Hidden) -> None:
        """Show the drafter what the target committed, with the target's captured states."""
        if not self._drafter.has_kv:
            return
        observed = []
        for work, first_row, path in zip(plan, batch.first_rows, kept, strict=True):
            if work.request.speculate and self._session(work).failure is None:
                root_row = first_row + work.num_tokens - 1
                rows = [*range(first_row, root_row + 1), *(root_row + node for node in path)]
                followers = work.request.tokens[work.start + 1 : work.start + 1 + len(rows)]
                observed.append(Observed(work.request.request_id, work.start, followers, rows, work.request.pages))
        with self._timed("draft"):
            self._drafter.observe(observed, hidden.captured)

    def _session(self, work: Scheduled) -> Session:
        return self._sessions[work.request.request_id]

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is not Status.FINISHED:
            self.stats.preemptions += request.num_preempted
            self.stats.cached_tokens += request.num_cached
            self.stats.prompt_tokens += len(request.prompt)
            self._scheduler.finish(request, reason)
        self._sessions.pop(request.request_id, None)

    def _timed_seconds(self) -> float:
        return self.stats.phase_seconds["draft"] + self.stats.phase_seconds["verify"]

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stats.phase_seconds[phase] += time.perf_counter() - started


def draft_needs(drafter: Drafter) -> DraftNeeds:
    """Return what a drafter asks of the scheduler."""
    return DraftNeeds(drafter.max_nodes, drafter.scratch, drafter.has_kv)
