"""Turns the requests of one point into latency, throughput and a measure of how repetitive the outputs were."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.records.point import Distribution, Latency, RequestResult, Throughput

REPETITIVE = 0.5
"""Above this share of repeated 4-grams a point is flagged: its acceptance says little about real traffic."""

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Exchange:
    """One finished request with the times of its chunks, which the record summarises away.

    Args:
        chunk_times_s: when each chunk with text arrived, on the client's clock.
        chunk_tokens: tokens in each chunk; empty when the server does not say.
    """

    result: RequestResult
    chunk_times_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]


def latency_of(exchanges: Sequence[Exchange]) -> Latency | None:
    """Summarise latencies; None when nothing came back."""
    results = [exchange.result for exchange in exchanges if exchange.result.error is None]
    ttft = Distribution.of([1e3 * r.ttft_s for r in results if r.ttft_s is not None])
    e2e = Distribution.of([1e3 * r.latency_s for r in results])
    if ttft is None or e2e is None:
        return None
    gaps: list[float] = []
    token_gaps: list[float] = []
    for exchange in exchanges:
        if exchange.result.error is not None:
            continue
        steps = [1e3 * (b - a) for a, b in zip(exchange.chunk_times_s, exchange.chunk_times_s[1:], strict=False)]
        gaps += steps
        for gap, tokens in zip(steps, _tokens_per_gap(exchange, len(steps)), strict=True):
            token_gaps += [gap / tokens] * tokens
    tpot = [
        1e3 * (r.latency_s - r.ttft_s) / (r.output_tokens - 1)
        for r in results
        if r.ttft_s is not None and r.output_tokens > 1
    ]
    return Latency(ttft, e2e, Distribution.of(tpot), Distribution.of(gaps), Distribution.of(token_gaps))


def throughput_of(exchanges: Sequence[Exchange], num_devices: int) -> Throughput | None:
    """Return rates over the window from the first request sent to the last answer finished."""
    results = [exchange.result for exchange in exchanges if exchange.result.error is None]
    if not results:
        return None
    start = min(r.sent_at_s for r in results)
    duration = max(r.sent_at_s + r.latency_s for r in results) - start
    output = sum(r.output_tokens for r in results) / duration
    total = sum(r.input_tokens + r.output_tokens for r in results) / duration
    return Throughput(duration, len(results) / duration, output, total, output / num_devices, total / num_devices)


def repetition_of(text: str, n: int = 4) -> float:
    """Return the share of a text's n-grams that occurred in it before (0: none, near 1: a loop)."""
    words = _WORD.findall(text)
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _tokens_per_gap(exchange: Exchange, num_gaps: int) -> Sequence[int]:
    if len(exchange.chunk_tokens) == num_gaps + 1 and all(tokens > 0 for tokens in exchange.chunk_tokens):
        return exchange.chunk_tokens[1:]
    # The server does not say how many tokens a chunk holds: spread what came after the first chunk evenly.
    rest = max(exchange.result.output_tokens - 1, num_gaps)
    return [rest * (i + 1) // num_gaps - rest * i // num_gaps for i in range(num_gaps)] if num_gaps else []
