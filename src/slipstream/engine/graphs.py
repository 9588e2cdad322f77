"""Launching cycles: captured in CUDA graphs where the kernels allow it, run as they are elsewhere.

A graph is captured for each kind of cycle (rows, drafted tokens), when it is first needed or by `warm_up`; all share
one pool of memory, since only one runs at a time. What goes up to the device and what comes down travels through
pinned memory with an event behind it, so that the host waits for nothing it does not need.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.cycle import Cycle, CycleKind, CycleModels, CycleState

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192)
_FEW_KEYS = 4096
_RING = 3  # one cycle being read, one in flight, one being launched


def row_buckets(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes cycles are made for, up to the largest there can be."""
    return (*(size for size in _BUCKETS if size < max_requests), max_requests)


def key_bounds(max_context: int) -> tuple[int, ...]:
    """Return the bounds on a row's keys that cycles are made for: grids and buffers grow with the bound."""
    bounds = [_FEW_KEYS]
    while bounds[-1] < max_context:
        bounds.append(4 * bounds[-1])
    return (*bounds[:-1], max_context)


@dataclass(frozen=True)
class CaptureCost:
    """What capturing a graph took."""

    kind: CycleKind
    seconds: float
    nbytes: int


class PendingOutput:
    """What a launched cycle emits, once it has run."""

    def __init__(self, out_RE: Tensor, done: torch.cuda.Event | None) -> None:
        self._out_RE = out_RE
        self._done = done

    def read(self) -> list[list[int]]:
        """Wait for the cycle and return, for each row, how many tokens it emitted and then the tokens."""
        if self._done is not None:
            self._done.synchronize()
        rows: list[list[int]] = self._out_RE.tolist()
        return rows


class Upload:
    """A tensor's way up to the device, ordered with the launches and without waiting for them."""

    def __init__(self, destination: Tensor) -> None:
        self._destination = destination
        pinned = destination.device.type == "cuda"
        self._staged = [torch.zeros_like(destination, device="cpu", pin_memory=pinned) for _ in range(_RING)]
        self._done = [torch.cuda.Event() for _ in range(_RING)] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, values: Tensor) -> None:
        """Copy a CPU tensor; it may be changed again as soon as this returns."""
        self._turn = (self._turn + 1) % _RING
        if self._done:
            self._done[self._turn].synchronize()  # the copy of three turns ago; done long since
        self._staged[self._turn].copy_(values)
        self._destination.copy_(self._staged[self._turn], non_blocking=True)
        if self._done:
            self._done[self._turn].record()


class CycleLauncher:
    """Owns the cycles of one batch, by kind, and launches them."""

    def __init__(self, models: CycleModels, state: CycleState) -> None:
        self._models = models
        self._state = state
        self._on_gpu = state.root_R.device.type == "cuda"
        self._captures = self._on_gpu and models.ops.capturable
        self._launches: dict[CycleKind, _Launch] = {}
        self._pool: Any = None  # torch's handle of a memory pool has no public type
        self.costs: list[CaptureCost] = []
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        """A list here is given events around each launch, for measuring how long the device was at work."""
        if self._on_gpu and not self._captures:
            logger.warning("The %s kernels cannot be captured in a CUDA graph; cycles run eagerly.", models.ops.name)

    def prepare(self, kind: CycleKind) -> None:
        """Make a kind of cycle ready. The batch must hold no request: making ready runs the cycle."""
        if kind in self._launches:
            return
        cycle = Cycle(self._models, self._state, kind)
        run = self._capture(cycle, kind) if self._captures else cycle.run
        self._launches[kind] = _Launch(run, cycle.out_RE, self._on_gpu)

    def launch(self, kind: CycleKind) -> PendingOutput:
        """Start a prepared kind of cycle; on a GPU this returns before it has run."""
        if self.spans is None or not self._on_gpu:
            return self._launches[kind].start()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        output = self._launches[kind].start()
        ended.record()
        self.spans.append((began, ended))
        return output

    def _capture(self, cycle: Cycle, kind: CycleKind) -> Callable[[], None]:
        """Run the cycle on a stream of its own until its kernels are compiled, then capture it."""
        started, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                cycle.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            cycle.run()
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize()
        cost = CaptureCost(kind, time.perf_counter() - started, before - torch.cuda.mem_get_info()[0])
        self.costs.append(cost)
        logger.info(
            "captured a cycle of %d rows, %d drafted tokens and at most %s keys: %.2f s, %.1f MiB",
            kind.num_rows,
            kind.num_drafted,
            kind.max_keys,
            cost.seconds,
            cost.nbytes / 2**20,
        )
        return graph.replay


class _Launch:
    """A cycle ready to start, and the ring its output comes down through."""

    def __init__(self, run: Callable[[], None], out_RE: Tensor, on_gpu: bool) -> None:
        self._run = run
        self._out_RE = out_RE
        self._ring = [torch.zeros_like(out_RE, device="cpu", pin_memory=True) for _ in range(_RING)] if on_gpu else []
        self._done = [torch.cuda.Event() for _ in self._ring]  # type: ignore[no-untyped-call]
        self._turn = 0

    def start(self) -> PendingOutput:
        self._run()
        if not self._ring:
            return PendingOutput(self._out_RE.clone(), None)
        self._turn = (self._turn + 1) % _RING
        out_RE, done = self._ring[self._turn], self._done[self._turn]
        out_RE.copy_(self._out_RE, non_blocking=True)
        done.record()
        return PendingOutput(out_RE, done)
