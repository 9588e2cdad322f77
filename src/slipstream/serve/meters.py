"""What the server counts and times, as plain values; metrics.py gives them their Prometheus names."""

import bisect
import time
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


SIZE_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
REASONS = ("stop", "length", "abort", "error")
_WINDOW_S = 10


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


def _sizes() -> Histogram:
    return Histogram(SIZE_BUCKETS)


@dataclass
class Meters:
    """Counts since the server started. Written by the engine's thread (`refused`: by the event loop)."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted_tokens: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=Histogram)
    per_token_s: Histogram = field(default_factory=Histogram)
    end_to_end_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    prefill_s: Histogram = field(default_factory=Histogram)
    decode_s: Histogram = field(default_factory=Histogram)
    inference_s: Histogram = field(default_factory=Histogram)
    prompt_sizes: Histogram = field(default_factory=_sizes)
    computed_sizes: Histogram = field(default_factory=_sizes)
    answer_sizes: Histogram = field(default_factory=_sizes)
    step_sizes: Histogram = field(default_factory=_sizes)
    asked_n: Histogram = field(default_factory=_sizes)
    asked_max_tokens: Histogram = field(default_factory=_sizes)
    preemptions: Histogram = field(default_factory=_sizes)
    _recent: Counter[int] = field(default_factory=Counter)  # tokens by the second they came in

    def emitted(self, num_tokens: int, now: float) -> None:
        """Count tokens given out at a time of the monotonic clock."""
        self.emitted_tokens += num_tokens
        self._recent[int(now)] += num_tokens
        if len(self._recent) > 2 * _WINDOW_S:
            for second in [second for second in self._recent if second < now - _WINDOW_S - 1]:
                del self._recent[second]

    def throughput(self) -> float:
        """Return tokens a second, over the last whole seconds."""
        now = int(time.monotonic())
        return sum(self._recent[second] for second in range(now - _WINDOW_S, now)) / _WINDOW_S


@dataclass(frozen=True)
class Asked:
    """What an answer was asked with, for the meters."""

    num_prompt_tokens: int
    n: int
    max_tokens: int


class AnswerTimes:
    """Times one answer into the meters."""

    def __init__(self, meters: Meters, asked: Asked, arrived: float) -> None:
        self._meters = meters
        self._asked = asked
        self._arrived = arrived
        self._started: float | None = None
        self._first: float | None = None
        self._last = arrived
        self._num_tokens = 0
        self._num_cached = 0
        self._num_preempted = 0

    def started(self, now: float) -> None:
        """Record that a place was free for the answer."""
        self._started = now
        self._meters.queue_s.observe(now - self._arrived)

    def emitted(self, num_tokens: int, now: float) -> int:
        """Record tokens handed out: the first of an answer, or the gap each of a step's tokens stands for.

        Returns how many tokens this finished, those of the prompt with the first.
        """
        self._meters.emitted(num_tokens, now)
        self._num_tokens += num_tokens
        finished = num_tokens
        if self._first is None:
            self._first = now
            finished += self._asked.num_prompt_tokens
            self._meters.ttft_s.observe(now - self._arrived)
        elif num_tokens:
            self._meters.inter_token_s.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now
        return finished

    def noted(self, num_cached: int, num_preempted: int) -> None:
        """Take what the engine says of the answer so far."""
        self._num_cached, self._num_preempted = num_cached, num_preempted

    def ended(self, reason: str, now: float) -> None:
        """Record the end of an answer."""
        meters, asked = self._meters, self._asked
        meters.finished[reason] += 1
        meters.prompt_tokens += asked.num_prompt_tokens
        meters.cached_tokens += self._num_cached
        meters.end_to_end_s.observe(now - self._arrived)
        meters.prompt_sizes.observe(asked.num_prompt_tokens)
        meters.computed_sizes.observe(asked.num_prompt_tokens - self._num_cached)
        meters.answer_sizes.observe(self._num_tokens)
        meters.asked_n.observe(asked.n)
        meters.asked_max_tokens.observe(asked.max_tokens)
        meters.preemptions.observe(self._num_preempted)
        if self._started is not None and self._first is not None:
            meters.prefill_s.observe(self._first - self._started)
            meters.decode_s.observe(self._last - self._first)
            meters.inference_s.observe(self._last - self._started)
        if self._first is not None and self._num_tokens > 1:
            meters.per_token_s.observe((self._last - self._first) / (self._num_tokens - 1))
