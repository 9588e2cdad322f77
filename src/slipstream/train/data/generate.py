"""Texts by the target, written through the engine: as many at once as it has places, finished ones replaced in groups.

What a request's text is depends on its prompt, its settings and its seed alone, not on what runs beside it, as far as
the engine's kernels promise that (`slipstream doctor` says so of each).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.engine.engine import Engine
from slipstream.engine.request import FinishReason
from slipstream.errors import ConfigError
from slipstream.speculation.sampling import SamplingParams

MIN_SPAN = 16
MAX_PERIOD = 48
_HASH_FACTORS = np.cumprod(np.full(MIN_SPAN, 6364136223846793005, dtype=np.int64))  # wraps, as hashes may


def loop_end(tokens: Sequence[int]) -> int | None:
    """Return how many tokens to keep: up to the end of the first span's third repetition; None if none loops."""
    a = np.asarray(tokens, dtype=np.int64)
    if len(a) < 3 * MIN_SPAN or not _repeats_a_span(a):
        return None
    best: int | None = None
    for period in range(1, min(MAX_PERIOD, len(a) // 3) + 1):
        span = period * -(-MIN_SPAN // period)
        needed = 3 * span - period
        if needed > len(a) - period:
            continue
        start = _first_run(a[period:] == a[:-period], needed)
        if start is not None and (best is None or start + 3 * span < best):
            best = start + 3 * span
    return best


def _repeats_a_span(a: np.ndarray) -> bool:
    """Tell quickly, for the many texts that do not loop, whether any 16-token span may occur twice."""
    hashes = np.convolve(a, _HASH_FACTORS, mode="valid")
    return len(np.unique(hashes)) < len(hashes)


def _first_run(same: np.ndarray, needed: int) -> int | None:
    """Return where the first run of `needed` true values starts."""
    padded = np.concatenate([[False], same, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, ends = edges[::2], edges[1::2]
    long_enough = np.flatnonzero(ends - starts >= needed)
    return int(starts[long_enough[0]]) if len(long_enough) else None


_PATIENCE_S = 0.1
_REFILL_SHARE = 8  # A prompt interrupts decoding for everybody, so prompts come in groups of an eighth of the places.
_LOOK_EVERY = 32  # tokens of a text between two looks for a loop


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue; `key` is the caller's own name for it."""

    key: int
    prompt: Sequence[int]
    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """What the target wrote, its end token included when it `ended` by one."""

    request: GenerationRequest
    tokens: list[int]
    ended: bool


class RequestSource(Protocol):
    """Where requests come from and results go to; a result may lead to further requests."""

    def take(self, count: int) -> list[GenerationRequest]:
        """Return up to `count` requests; none means none for now."""
        ...

    def give(self, result: GenerationResult) -> None:
        """Receive a finished text."""
        ...


class TextWriter(Protocol):
    """What continues prompts: an engine here (`Generator`), or servers (`slipstream.train.data.servers`)."""

    def run(
        self,
        source: RequestSource,
        stop: Callable[[], bool] = lambda: False,
        progress: "Callable[[GenerationStats], None]" = lambda stats: None,
    ) -> "GenerationStats":
        """Serve the source until it has nothing left, or until `stop` says so (unfinished texts are then dropped)."""
        ...


@dataclass(frozen=True)
class GeneratorConfig:
    """How texts are written.

    Args:
        rows: texts written at once; None takes as many as suit the device and its memory.
        max_length: prompt and answer together never exceed this.
        stop_loops: end a text that repeats itself.
    """

    rows: int | None = None
    max_length: int = 640
    stop_loops: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class GenerationStats:
    """What a run of the generator did; `tokens` counts those of unfinished texts too."""

    texts: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prompts not counted."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Writing:
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    looked_at: int = 0

    def loops(self) -> bool:
        """Tell whether the text repeats itself, looking now and then; where it is cut does not depend on when."""
        if len(self.tokens) - self.looked_at < _LOOK_EVERY:
            return False
        self.looked_at = len(self.tokens)
        return loop_end(self.tokens) is not None


class Generator:
    """Continues prompts with an engine, which may have any draft or none: the texts are the target's own."""

    def __init__(self, engine: Engine, eos_token_ids: Sequence[int], stop_loops: bool = True) -> None:
        self._engine, self._eos, self._stop_loops = engine, tuple(eos_token_ids), stop_loops
        self._rows, self._max_length = engine.config.max_requests, engine.config.max_context
        self._writing: dict[int, _Writing] = {}

    def run(
        self,
        source: RequestSource,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[GenerationStats], None] = lambda stats: None,
    ) -> GenerationStats:
        """Serve the source until it has nothing left, or until `stop` says so (unfinished texts are then dropped)."""
        started, texts, tokens = time.monotonic(), 0, 0
        try:
            while not stop():
                self._refill(source)
                if not self._writing:
                    break
                finished, count = self._step()
                texts, tokens = texts + len(finished), tokens + count
                for result in finished:
                    source.give(result)
                progress(GenerationStats(texts, tokens, time.monotonic() - started))
        finally:
            for request_id in self._writing:
                self._engine.abort(request_id)
            self._writing.clear()
        return GenerationStats(texts, tokens, time.monotonic() - started)

    def _refill(self, source: RequestSource) -> None:
        free = self._rows - len(self._writing)
        if free < max(1, self._rows // _REFILL_SHARE):
            return
        for request in source.take(free):
            if not request.prompt or len(request.prompt) + request.max_new > self._max_length:
                raise ConfigError(
                    f"A prompt of {len(request.prompt)} tokens with {request.max_new} to generate does not fit "
                    f"max_length {self._max_length}; shorten prompts or raise it."
                )
            params = SamplingParams(max_tokens=request.max_new, temperature=request.temperature, top_p=request.top_p)
            request_id = self._engine.add(request.prompt, params, request.seed, self._eos)
            self._writing[request_id] = _Writing(request)

    def _step(self) -> tuple[list[GenerationResult], int]:
        """Run a step; return the texts it finished, and how many tokens were written."""
        finished, count = [], 0
        for emission in self._engine.step(_PATIENCE_S):
            writing = self._writing[emission.request_id]
            writing.tokens += [token.token_id for token in emission.tokens]
            count += len(emission.tokens)
            reason = emission.finish_reason
            if reason is None and self._stop_loops and writing.loops():
                self._engine.abort(emission.request_id)
                reason = FinishReason.ABORT
            if reason is not None:
                del self._writing[emission.request_id]
                ended = reason is FinishReason.STOP
                finished.append(GenerationResult(writing.request, writing.tokens, ended))
        return finished, count
