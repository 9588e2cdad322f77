"""The same counts under the names of vLLM's and SGLang's metrics, so that their dashboards and benchmarks read them."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from slipstream.engine.engine import Engine
from slipstream.serve.meters import REASONS, Meters
from slipstream.serve.metric_families import by_position, counter, counters, gauge, gauges, histogram

# SGLang's Grafana dashboard asks for these names with an underscore, its server gives them with a colon.
_OF_THE_DASHBOARD = frozenset(
    {"cache_hit_rate", "e2e_request_latency_seconds", "gen_throughput", "num_queue_reqs", "num_running_reqs"}
    | {"time_to_first_token_seconds"}
)


@dataclass(frozen=True)
class State:
    """What is counted and what is going on, when the metrics are read."""

    engine: Engine
    meters: Meters
    num_waiting: int
    model_name: str
    num_pages: int

    @property
    def cache_tokens(self) -> int:
        """Tokens the KV cache has room for."""
        return self.num_pages * self.engine.config.page_size


def vllm_metrics(state: State) -> Iterator[Metric]:
    """Yield vLLM's metrics of its scheduler, its requests and its drafts."""
    engine, meters = state.engine, state.meters
    name = {"model_name": state.model_name, "engine": "0"}
    waiting = {"capacity": state.num_waiting, "deferred": 0}
    yield gauge("vllm:num_requests_running", "Answers that hold pages.", engine.num_running, name)
    yield gauge("vllm:num_requests_waiting", "Answers that wait.", state.num_waiting, name)
    yield gauges("vllm:num_requests_waiting_by_reason", "Answers that wait, and for what.", waiting, "reason", name)
    yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all of it.", engine.page_usage, name)
    yield counter("vllm:num_preemptions", "Requests sent back to the queue.", engine.stats.preemptions, name)
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache.", meters.prompt_tokens, name)
    yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", meters.cached_tokens, name)
    refused = {"queue_full": meters.refused}
    yield counters("vllm:admission_rejections", "Requests refused with 429 or 503.", refused, "reason", name)
    yield gauge("vllm:cache_config_info", "The KV cache.", 1.0, {**name, **_cache(state)})
    yield counter("vllm:prompt_tokens", "Prompt tokens.", meters.prompt_tokens, name)
    yield counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", meters.cached_tokens, name)
    computed = meters.prompt_tokens - meters.cached_tokens
    sources = {"local_compute": computed, "local_cache_hit": meters.cached_tokens, "external_kv_transfer": 0}
    yield counters("vllm:prompt_tokens_by_source", "Prompt tokens, by where they came from.", sources, "source", name)
    yield counter("vllm:generation_tokens", "Tokens given out.", meters.emitted_tokens, name)
    ended = {reason: meters.finished[reason] for reason in REASONS}
    yield counters("vllm:request_success", "Answers that ended.", ended, "finished_reason", name)
    for own, text, values in (
        ("time_to_first_token_seconds", "From arrival to the first token.", meters.ttft_s),
        ("inter_token_latency_seconds", "Between tokens of an answer.", meters.inter_token_s),
        ("request_time_per_output_token_seconds", "Mean time between an answer's tokens.", meters.per_token_s),
        ("e2e_request_latency_seconds", "From arrival to the last token.", meters.end_to_end_s),
        ("request_queue_time_seconds", "From arrival to a free place.", meters.queue_s),
        ("request_inference_time_seconds", "From a free place to the last token.", meters.inference_s),
        ("request_prefill_time_seconds", "From a free place to the first token.", meters.prefill_s),
        ("request_decode_time_seconds", "From the first token to the last.", meters.decode_s),
        ("request_prompt_tokens", "Tokens of a prompt.", meters.prompt_sizes),
        ("request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached.", meters.computed_sizes),
        ("request_generation_tokens", "Tokens of an answer.", meters.answer_sizes),
        ("request_max_num_generation_tokens", "Tokens of an answer.", meters.answer_sizes),
        ("request_params_n", "Answers asked for.", meters.asked_n),
        ("request_params_max_tokens", "Most tokens asked for.", meters.asked_max_tokens),
        ("request_num_preemptions", "Times an answer was sent back to the queue.", meters.preemptions),
        ("iteration_tokens_total", "Tokens of prompts and answers that a step finished.", meters.step_sizes),
    ):
        yield histogram(f"vllm:{own}", text, values, name)
    yield from _vllm_drafts(engine, name)


def _vllm_drafts(engine: Engine, name: dict[str, str]) -> Iterator[Metric]:
    stats = engine.stats.acceptance
    drafts = stats.offered[0] if stats.offered else 0
    yield counter("vllm:spec_decode_num_drafts", "Passes in which something was drafted.", drafts, name)
    yield counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted, name)
    yield counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", sum(stats.accepted), name)
    per_position = by_position(stats.accepted)
    yield counters("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens.", per_position, "position", name)


def sglang_metrics(state: State) -> Iterator[Metric]:
    """Yield SGLang's metrics, those of its dashboard by both of its spellings."""
    for family in _sglang(state):
        yield family
        own = family.name.partition(":")[2]
        if own in _OF_THE_DASHBOARD:
            twin = Metric(f"sglang_{own}", family.documentation, family.type)
            for sample in family.samples:
                twin.samples.append(sample._replace(name=sample.name.replace(":", "_", 1)))
            yield twin


def _sglang(state: State) -> Iterator[Metric]:
    engine, meters, stats = state.engine, state.meters, state.engine.stats.acceptance
    name = {"model_name": state.model_name}
    shape = engine.drafter.shape
    size = state.cache_tokens
    used = round(engine.page_usage * size)
    found = meters.cached_tokens / meters.prompt_tokens if meters.prompt_tokens else 0.0
    rate = sum(stats.accepted) / stats.drafted if stats.drafted else 0.0
    for own, text, value in (
        ("num_running_reqs", "Answers that hold pages.", engine.num_running),
        ("num_queue_reqs", "Answers that wait.", state.num_waiting),
        ("num_grammar_queue_reqs", "Answers in the queue that wait for a grammar: they are compiled before it.", 0),
        ("num_used_tokens", "Tokens the KV cache's pages in use have room for.", used),
        ("kv_used_tokens", "Tokens the KV cache's pages in use have room for.", used),
        ("kv_available_tokens", "Tokens the other pages have room for.", size - used),
        ("max_total_num_tokens", "Tokens the KV cache has room for.", size),
        ("num_pages", "Pages of the KV cache.", state.num_pages),
        ("page_size", "Tokens a page.", engine.config.page_size),
        ("context_len", "Most tokens of prompt and answer.", engine.config.max_context),
        ("token_usage", "Share of the KV cache in use.", engine.page_usage),
        ("cache_hit_rate", "Share of prompt tokens found in the cache, since the start.", found),
        ("gen_throughput", "Tokens given out a second, over the last ten.", meters.throughput()),
        ("spec_accept_length", "Tokens a decoding pass, drafted or not.", stats.acceptance_length),
        ("spec_accept_rate", "Accepted share of drafted nodes.", rate),
        ("spec_num_steps", "Depth of the tree.", shape.depth if shape else 0),
        ("spec_num_draft_tokens", "Nodes with the root.", engine.drafter.max_nodes),
    ):
        yield gauge(f"sglang:{own}", text, value, name)
    for own, text, value in (
        ("spec_verify_calls", "Decoding passes of the target, drafted or not.", stats.decoding_passes),
        ("prompt_tokens", "Prompt tokens.", meters.prompt_tokens),
        ("generation_tokens", "Tokens given out.", meters.emitted_tokens),
        ("cached_tokens", "Prompt tokens found in the cache.", meters.cached_tokens),
        ("num_requests", "Answers that ended.", sum(meters.finished.values())),
        ("num_aborted_requests", "Answers that were given up.", meters.finished["abort"]),
        ("num_retracted_requests", "Answers sent back to the queue.", engine.stats.preemptions),
    ):
        yield counter(f"sglang:{own}", text, value, name)
    for own, text, values in (
        ("time_to_first_token_seconds", "From arrival to the first token.", meters.ttft_s),
        ("inter_token_latency_seconds", "Between tokens of an answer.", meters.inter_token_s),
        ("e2e_request_latency_seconds", "From arrival to the last token.", meters.end_to_end_s),
        ("queue_time_seconds", "From arrival to a free place.", meters.queue_s),
        ("prompt_tokens_histogram", "Tokens of a prompt.", meters.prompt_sizes),
        ("uncached_prompt_tokens_histogram", "Tokens of a prompt that were not cached.", meters.computed_sizes),
        ("generation_tokens_histogram", "Tokens of an answer.", meters.answer_sizes),
    ):
        yield histogram(f"sglang:{own}", text, values, name)


def _cache(state: State) -> dict[str, str]:
    config = state.engine.config
    return {
        "block_size": str(config.page_size),
        "num_gpu_blocks": str(state.num_pages),
        "kv_cache_size_tokens": str(state.cache_tokens),
        "kv_cache_max_concurrency": f"{state.cache_tokens / config.max_context:.2f}",
        "enable_prefix_caching": str(config.prefix_cache),
    }
