"""Batched generation by the target: a fixed batch whose finished rows are refilled, one decode step as a CUDA graph.

The host looks at the batch every few steps only; finished texts are handed on while the device runs the next ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.target import Target
from slipstream.train import sampling, static_cache
from slipstream.train.ops import TrainOps
from slipstream.train.product import product_f32
from slipstream.train.repetition import looping_rows
from slipstream.train.static_cache import DecodeContext, FillContext, StaticCache


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue; `key` is the caller's own name for it."""

    key: int
    prompt: Sequence[int]
    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0


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


@dataclass(frozen=True)
class GeneratorConfig:
    """How generation is batched.

    Args:
        rows: texts generated at once.
        max_length: prompt and answer together never exceed this.
        check_every: decode steps between two looks at the batch by the host.
        prefill_tokens: most tokens (padding included) of one pass over prompts.
        stop_loops: end a text that has been repeating itself for a while.
        fast: use the Triton kernels and a CUDA graph (GPU only).
    """

    rows: int = 2048
    max_length: int = 640
    check_every: int = 24
    prefill_tokens: int = 131_072
    stop_loops: bool = True
    fast: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "max_length", "check_every", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class GenerationStats:
    """What a run of the generator did."""

    texts: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prompts not counted."""
        return self.tokens / max(self.seconds, 1e-9)


class _Rows:
    """The batch's state on the device; every tensor is written in place, as a captured graph needs."""

    def __init__(self, config: GeneratorConfig, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((config.rows, *shape), dtype=dtype, device=device)

        self.token_B, self.position_B = zeros(torch.int64), zeros(torch.int64)
        self.count_B, self.limit_B = zeros(torch.int64), zeros(torch.int64)
        self.temperature_B, self.top_p_B = zeros(torch.float32), zeros(torch.float32)
        self.live_B = zeros(torch.bool)
        self.written_BN = zeros(torch.int64, config.max_length)
        self.uniform_B3 = zeros(torch.float32, sampling.NUM_DRAWS)


class Generator:
    """Continues prompts with the target; one instance owns the cache and may run many sources after each other."""

    def __init__(self, target: Target, eos_token_ids: Sequence[int], config: GeneratorConfig) -> None:
        table = target.embed_tokens
        self._target, self._config, self._device = target, config, table.device
        self._ops = TrainOps(self._device)
        self._eos_E = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=self._device)
        self._eos = frozenset(eos_token_ids)
        self._cache = StaticCache(target.kv_shape_by_head, config.rows, config.max_length, table.dtype, self._device)
        self._rows = _Rows(config, self._device)
        self._running: list[GenerationRequest | None] = [None] * config.rows
        self._attention, self._sample = static_cache.decode_attention, sampling.sample
        self._graph: torch.cuda.CUDAGraph | None = None
        torch.manual_seed(config.seed)
        if config.fast and self._device.type == "cuda":
            from slipstream.train import triton_decode  # Triton is absent on CPU machines

            self._attention, self._sample = triton_decode.decode_attention, triton_decode.sample
            self._graph = self._capture()

    @torch.no_grad()
    def run(
        self,
        source: RequestSource,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[GenerationStats], None] = lambda stats: None,
    ) -> GenerationStats:
        """Serve the source until it has nothing left, or until `stop` says so (unfinished texts are then dropped)."""
        started, texts, tokens = time.monotonic(), 0, 0
        self._rows.live_B.zero_()
        self._running = [None] * self._config.rows
        finished: list[GenerationResult] = []
        while not stop():
            self._refill(source)
            if not any(self._running) and not finished:
                break
            for _ in range(self._config.check_every if any(self._running) else 0):
                self._advance()
            for result in finished:  # the device is busy meanwhile
                source.give(result)
            finished = self._collect()
            texts += len(finished)
            tokens += sum(len(result.tokens) for result in finished)
            progress(GenerationStats(texts, tokens, time.monotonic() - started))
        for result in finished:
            source.give(result)
        return GenerationStats(texts, tokens, time.monotonic() - started)

    def _advance(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        """Decode one token of every row; rows that are not live compute too, and change nothing."""
        rows, target = self._rows, self._target
        ctx = DecodeContext(self._ops, rows.position_B, self._cache, self._attention)
        hidden = target(rows.token_B, ctx)
        assert target.lm_head.weight is not None, "generation needs dense weights"
        logits_BV = product_f32(target.norm(hidden.last_TD, self._ops), target.lm_head.weight)
        rows.uniform_B3.uniform_()
        token_B = self._sample(logits_BV, rows.temperature_B, rows.top_p_B, rows.uniform_B3)
        token_B = torch.where(rows.live_B, token_B, rows.token_B)
        at_B1 = rows.count_B[:, None]
        rows.written_BN.scatter_(
            1, at_B1, torch.where(rows.live_B[:, None], token_B[:, None], rows.written_BN.gather(1, at_B1))
        )
        rows.token_B.copy_(token_B)
        rows.count_B.add_(rows.live_B)
        rows.position_B.add_(rows.live_B)
        ended_B = (token_B[:, None] == self._eos_E).any(-1) | (rows.count_B >= rows.limit_B)
        rows.live_B.logical_and_(~ended_B)

    @torch.no_grad()
    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _refill(self, source: RequestSource) -> None:
        free = [row for row, request in enumerate(self._running) if request is None]
        requests = source.take(len(free)) if free else []
        for request in requests:
            if not request.prompt or len(request.prompt) + request.max_new > self._config.max_length:
                raise ConfigError(
                    f"A prompt of {len(request.prompt)} tokens with {request.max_new} to generate does not fit "
                    f"max_length {self._config.max_length}; shorten prompts or raise it."
                )
        order = sorted(requests, key=lambda request: len(request.prompt))
        placed = list(zip(free, order, strict=False))
        for row, request in placed:
            self._running[row] = request
        start = 0
        while start < len(placed):
            stop = start + 1
            while stop < len(placed) and _padded(placed[stop][1]) * (stop + 1 - start) <= self._config.prefill_tokens:
                stop += 1
            self._fill(placed[start:stop])
            start = stop

    def _fill(self, placed: list[tuple[int, GenerationRequest]]) -> None:
        """Run prompts into their rows; the last prompt token is left to the first decode step."""
        requests = [request for _, request in placed]
        ids = np.zeros((len(placed), min(max(_padded(r) for r in requests), self._config.max_length)), dtype=np.int64)
        for index, request in enumerate(requests):
            ids[index, : len(request.prompt)] = request.prompt
        rows_n = self._tensor([row for row, _ in placed])
        positions = torch.arange(ids.shape[1], device=self._device).expand(len(placed), -1)
        self._target(torch.from_numpy(ids).to(self._device), FillContext(self._ops, positions, rows_n, self._cache))
        rows = self._rows
        rows.token_B[rows_n] = self._tensor([request.prompt[-1] for request in requests])
        rows.position_B[rows_n] = self._tensor([len(request.prompt) - 1 for request in requests])
        rows.limit_B[rows_n] = self._tensor([request.max_new for request in requests])
        rows.temperature_B[rows_n] = self._tensor([request.temperature for request in requests], torch.float32)
        rows.top_p_B[rows_n] = self._tensor([request.top_p for request in requests], torch.float32)
        rows.count_B[rows_n] = 0
        rows.live_B[rows_n] = True

    def _collect(self) -> list[GenerationResult]:
        """Take the finished texts off the batch."""
        rows = self._rows
        if self._config.stop_loops:
            rows.live_B.logical_and_(~looping_rows(rows.written_BN, rows.count_B))
        live = rows.live_B.tolist()
        done = [row for row, request in enumerate(self._running) if request is not None and not live[row]]
        if not done:
            return []
        done_n = self._tensor(done)
        counts = rows.count_B[done_n].tolist()
        written = rows.written_BN[done_n].cpu().numpy()
        results = []
        for index, row in enumerate(done):
            request = self._running[row]
            assert request is not None
            tokens = written[index, : counts[index]].tolist()
            results.append(GenerationResult(request, tokens, bool(tokens) and tokens[-1] in self._eos))
            self._running[row] = None
        return results

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)


def _padded(request: GenerationRequest) -> int:
    """Prompts are padded to a multiple of 16, so that few different shapes occur."""
    return -(-len(request.prompt) // 16) * 16
