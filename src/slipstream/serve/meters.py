"""What the server counts and times, as plain values; metrics.py gives them their Prometheus names."""

import bisect
from collections import Counter
from dataclasses import dataclass, field

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)


class Histogram:
    """Counts of values at or below each bound, with their sum."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (bound, values at or below it), the last bound being "+Inf"."""
        rows, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


@dataclass
class Meters:
    """Counts since the server started. Written by the engine's thread (`refused`: by the event loop)."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    emitted_tokens: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=Histogram)
    end_to_end_s: Histogram = field(default_factory=Histogram)


class AnswerTimes:
    """Times one answer into the meters."""

    def __init__(self, meters: Meters, arrived: float) -> None:
        self._meters = meters
        self._arrived = arrived
        self._last: float | None = None

    def emitted(self, num_tokens: int, now: float) -> None:
        """Record tokens handed out: the first of an answer, or the gap each of a step's tokens stands for."""
        self._meters.emitted_tokens += num_tokens
        if self._last is None:
            self._meters.ttft_s.observe(now - self._arrived)
        elif num_tokens:
            self._meters.inter_token_s.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now

    def ended(self, num_prompt_tokens: int, reason: str, now: float) -> None:
        """Record the end of an answer."""
        self._meters.finished[reason] += 1
        self._meters.prompt_tokens += num_prompt_tokens
        self._meters.end_to_end_s.observe(now - self._arrived)
