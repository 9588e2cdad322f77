"""Prometheus metrics: our own names, and those that the tools of vLLM and SGLang read."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from slipstream.engine.drafts import DraftShelf
from slipstream.engine.engine import Engine
from slipstream.serve.learning import Learning
from slipstream.serve.meters import REASONS
from slipstream.serve.metric_families import by_position, counter, counters, gauge, gauges, histogram
from slipstream.serve.other_metrics import State, sglang_metrics, vllm_metrics
from slipstream.serve.worker import EngineWorker
from slipstream.speculation.statistics import AcceptanceStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Reads the engine's and the worker's counts when it is scraped; nothing is counted twice."""

    def __init__(self, engine: Engine, worker: EngineWorker, model_name: str, shelf: DraftShelf) -> None:
        self._engine = engine
        self._worker = worker
        self._model_name = model_name
        self._shelf = shelf
        self.learning: Learning | None = None
        # Before anybody changes the tree: the pages are those the engine was built with.
        extra_slots = max(engine.drafter.max_nodes - 1, engine.drafter.scratch)
        self._num_pages = engine.config.resolve_num_pages(extra_slots)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @property
    def cache_tokens(self) -> int:
        """Tokens the KV cache has room for."""
        return self._num_pages * self._engine.config.page_size

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Declare nothing up front, so that registering does not read the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from self._own()
        yield from self._own_speculation()
        state = State(self._engine, self._worker.meters, self._num_waiting(), self._model_name, self._num_pages)
        yield from vllm_metrics(state)
        yield from sglang_metrics(state)

    def _own(self) -> Iterator[Metric]:
        engine, meters = self._engine, self._worker.meters
        ended = {reason: meters.finished[reason] for reason in REASONS}
        yield counters("slipstream_requests", "Answers that ended, by reason.", ended, "reason")
        yield counter("slipstream_refused_requests", "Requests refused with 429 or 503.", meters.refused)
        yield counter("slipstream_failed_steps", "Steps that raised an exception.", meters.failed_steps)
        yield counter("slipstream_steps", "Steps the engine made.", engine.stats.steps)
        yield counter("slipstream_preemptions", "Requests sent back to the queue.", engine.stats.preemptions)
        yield counter("slipstream_prompt_tokens", "Prompt tokens of ended answers.", meters.prompt_tokens)
        yield counter("slipstream_emitted_tokens", "Tokens given out.", meters.emitted_tokens)
        yield counter(
            "slipstream_cached_tokens", "Prompt tokens found in the prefix cache.", engine.stats.cached_tokens
        )
        yield gauge("slipstream_running_requests", "Answers that hold pages.", engine.num_running)
        yield gauge("slipstream_waiting_requests", "Answers that wait.", self._num_waiting())
        yield gauge("slipstream_kv_usage", "Share of the KV cache's pages in use.", engine.page_usage)
        yield histogram("slipstream_ttft_seconds", "From arrival to the first token.", meters.ttft_s)
        yield histogram("slipstream_inter_token_seconds", "Between tokens of an answer.", meters.inter_token_s)
        yield histogram("slipstream_e2e_seconds", "From arrival to the last token.", meters.end_to_end_s)
        yield histogram(
            "slipstream_queue_seconds", "From arrival to a free place among --max-requests.", meters.queue_s
        )
        phases = {str(phase): seconds for phase, seconds in list(engine.stats.phase_seconds.items())}
        yield counters("slipstream_phase_seconds", "Time in each phase of a step.", phases, "phase")
        costs = {str(context): cost for context, cost in sorted(engine.stats.by_context.items())}
        for name, told, values in (
            ("passes", "Passes that only decode, by context.", {at: cost.passes for at, cost in costs.items()}),
            ("rows", "Requests in passes that only decode.", {at: cost.rows for at, cost in costs.items()}),
            ("tokens", "Tokens that came of passes that only decode.", {at: c.emitted for at, c in costs.items()}),
            ("draft_seconds", "Drafting for such passes.", {at: cost.draft_s for at, cost in costs.items()}),
            ("verify_seconds", "The target's part of such passes.", {at: c.verify_s for at, c in costs.items()}),
        ):
            yield counters(f"slipstream_decode_{name}", told, values, "context")

    def _own_speculation(self) -> Iterator[Metric]:
        stats = self._engine.stats.acceptance
        yield counter(
            "slipstream_target_passes",
            "Decoding passes of the target (those over prompts are not counted).",
            stats.decoding_passes,
        )
        for what, told in (
            ("passes", "Decoding passes, by draft."),
            ("tokens", "Tokens of decoding passes, by draft."),
        ):
            by_draft = {one.name: getattr(one, what) for one in self._shelf.served()}
            yield counters(f"slipstream_draft_{what}", told, by_draft, "draft")
        if self.learning is not None:
            learning = self.learning
            yield gauge("slipstream_learning_tokens", "Tokens of traffic kept for learning.", learning.num_tokens)
            yield counter("slipstream_learning_deployed", "Drafts that learned and took over.", learning.deployed)
            yield counter("slipstream_learning_returned", "Of these, drafts given up again.", learning.returned)
        yield counter("slipstream_drafted_nodes", "Nodes the target checked.", stats.drafted)
        offered, accepted = by_position(stats.offered), by_position(stats.accepted)
        yield counters("slipstream_drafted_tokens", "Passes with a drafted token here.", offered, "position")
        yield counters("slipstream_accepted_tokens", "Passes that kept the token drafted here.", accepted, "position")
        yield gauges(
            "slipstream_acceptance_length",
            "Tokens a pass: of every decoding pass (sglang:spec_accept_length), or of those in which something was "
            "drafted (1 + accepted tokens / drafts of vLLM's counters).",
            {"decoding": stats.acceptance_length, "drafted": _drafted_length(stats)},
            "passes",
        )
        yield gauges(
            "slipstream_simulated_acceptance",
            "Simulated acceptance rate. If any is set, answers are not the model's.",
            {str(position): rate for position, rate in enumerate(self._engine.simulated_acceptance)},
            "position",
        )

    def _num_waiting(self) -> int:
        """Answers taken on that do not run: in the engine's queue, or on their way to it."""
        return max(0, self._worker.num_open - self._engine.num_running)


def _drafted_length(stats: AcceptanceStats) -> float:
    drafts = stats.offered[0] if stats.offered else 0
    return 1 + sum(stats.accepted) / drafts if drafts else 1.0
