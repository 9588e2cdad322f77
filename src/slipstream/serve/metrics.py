"""Prometheus metrics: our own names, and those that the tools of vLLM and SGLang read."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slipstream.engine.engine import Engine
from slipstream.serve.meters import Histogram
from slipstream.serve.worker import EngineWorker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Reads the engine's and the worker's counts when it is scraped; nothing is counted twice."""

    def __init__(self, engine: Engine, worker: EngineWorker, model_name: str) -> None:
        self._engine = engine
        self._worker = worker
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

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
        yield from self._vllm()
        yield from self._sglang()

    def _own(self) -> Iterator[Metric]:
        engine, meters = self._engine, self._worker.meters
        requests = CounterMetricFamily("slipstream_requests", "Answers that ended, by reason.", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            requests.add_metric([reason], meters.finished[reason])
        yield requests
        yield _counter("slipstream_refused_requests", "Requests refused with 429 or 503.", meters.refused)
        yield _counter("slipstream_failed_steps", "Steps that raised an exception.", meters.failed_steps)
        yield _counter("slipstream_steps", "Steps the engine made.", engine.stats.steps)
        yield _counter("slipstream_preemptions", "Requests sent back to the queue.", engine.stats.preemptions)
        yield _counter("slipstream_prompt_tokens", "Prompt tokens of ended answers.", meters.prompt_tokens)
        yield _counter("slipstream_emitted_tokens", "Tokens given out.", meters.emitted_tokens)
        yield _counter(
            "slipstream_cached_tokens", "Prompt tokens found in the prefix cache.", engine.stats.cached_tokens
        )
        yield _gauge("slipstream_running_requests", "Answers that hold pages.", engine.num_running)
        yield _gauge("slipstream_waiting_requests", "Answers that wait.", self._num_waiting())
        yield _gauge("slipstream_kv_usage", "Share of the KV cache's pages in use.", engine.page_usage)
        yield _histogram("slipstream_ttft_seconds", "From arrival to the first token.", meters.ttft_s)
        yield _histogram("slipstream_inter_token_seconds", "Between tokens of an answer.", meters.inter_token_s)
        yield _histogram("slipstream_e2e_seconds", "From arrival to the last token.", meters.end_to_end_s)
        phases = CounterMetricFamily("slipstream_phase_seconds", "Time in each phase of a step.", labels=["phase"])
        for phase, seconds in list(engine.stats.phase_seconds.items()):
            phases.add_metric([phase], seconds)
        yield phases

    def _own_speculation(self) -> Iterator[Metric]:
        stats = self._engine.stats.acceptance
        yield _counter(
            "slipstream_target_passes",
            "Decoding passes of the target (those over prompts are not counted).",
            stats.decoding_passes,
        )
        yield _counter("slipstream_drafted_nodes", "Nodes the target checked.", stats.drafted)
        yield _by_position("slipstream_drafted_tokens", "Passes with a drafted token here.", stats.offered)
        yield _by_position("slipstream_accepted_tokens", "Passes that kept the token drafted here.", stats.accepted)
        simulated = GaugeMetricFamily(
            "slipstream_simulated_acceptance",
            "Simulated acceptance rate. If any is set, answers are not the model's.",
            labels=["position"],
        )
        for position, rate in enumerate(self._engine.simulated_acceptance):
            simulated.add_metric([str(position)], rate)
        yield simulated

    def _vllm(self) -> Iterator[Metric]:
        engine, meters, stats = self._engine, self._worker.meters, self._engine.stats.acceptance
        name = {"model_name": self._model_name}
        yield _counter("vllm:spec_decode_num_drafts", "Drafts checked.", stats.offered[0] if stats.offered else 0, name)
        yield _counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted, name)
        yield _counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", sum(stats.accepted), name)
        yield _by_position("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens.", stats.accepted, name)
        yield _gauge("vllm:num_requests_running", "Answers that hold pages.", engine.num_running, name)
        yield _gauge("vllm:num_requests_waiting", "Answers that wait.", self._num_waiting(), name)
        yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use.", engine.page_usage, name)
        yield _counter("vllm:prompt_tokens", "Prompt tokens.", meters.prompt_tokens, name)
        yield _counter("vllm:generation_tokens", "Tokens given out.", meters.emitted_tokens, name)
        yield _histogram("vllm:time_to_first_token_seconds", "Time to first token.", meters.ttft_s, name)
        yield _histogram("vllm:inter_token_latency_seconds", "Time between tokens.", meters.inter_token_s, name)
        yield _histogram("vllm:e2e_request_latency_seconds", "Time of a whole answer.", meters.end_to_end_s, name)

    def _sglang(self) -> Iterator[Metric]:
        engine, meters, stats = self._engine, self._worker.meters, self._engine.stats.acceptance
        name = {"model_name": self._model_name}
        rate = sum(stats.accepted) / stats.drafted if stats.drafted else 0.0
        shape = engine.drafter.shape
        yield _gauge("sglang:spec_accept_length", "Emitted tokens per pass.", stats.acceptance_length, name)
        yield _gauge("sglang:spec_accept_rate", "Accepted share of drafted nodes.", rate, name)
        yield _gauge("sglang:spec_num_steps", "Depth of the tree.", shape.depth if shape else 0, name)
        yield _gauge("sglang:spec_num_draft_tokens", "Nodes with the root.", engine.drafter.max_nodes, name)
        yield _counter("sglang:spec_verify_calls", "Decoding passes of the target.", stats.decoding_passes, name)
        yield _gauge("sglang:num_running_reqs", "Answers that hold pages.", engine.num_running, name)
        yield _gauge("sglang:num_queue_reqs", "Answers that wait.", self._num_waiting(), name)
        yield _gauge("sglang:token_usage", "Share of the KV cache in use.", engine.page_usage, name)
        yield _counter("sglang:prompt_tokens", "Prompt tokens.", meters.prompt_tokens, name)
        yield _counter("sglang:generation_tokens", "Tokens given out.", meters.emitted_tokens, name)
        yield _histogram("sglang:time_to_first_token_seconds", "Time to first token.", meters.ttft_s, name)
        yield _histogram("sglang:inter_token_latency_seconds", "Time between tokens.", meters.inter_token_s, name)
        yield _histogram("sglang:e2e_request_latency_seconds", "Time of a whole answer.", meters.end_to_end_s, name)

    def _num_waiting(self) -> int:
        """Answers taken on that do not run: in the engine's queue, or on their way to it."""
        return max(0, self._worker.num_open - self._engine.num_running)


def _counter(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _gauge(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _by_position(name: str, text: str, counts: Sequence[int], labels: dict[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*(labels or {}), "position"])
    for position, count in enumerate(list(counts)):
        family.add_metric([*(labels or {}).values(), str(position)], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram, labels: dict[str, str] | None = None) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), histogram.cumulative(), histogram.total)
    return family
