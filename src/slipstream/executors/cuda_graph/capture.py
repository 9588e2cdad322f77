"""Capturing what steps do in CUDA graphs; where there is no GPU, the same functions run as they are.

All graphs share one pool of memory, since only one runs at a time.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 32, 40, 64, 96, 128, 192)
_JOINED = (8, 16, 40, 64, 128)
_FEW_KEYS = 4096
_MORE_KEYS = 8
"""Each bound on keys is so many times the one before: the fewer there are, the sooner a server is ready."""


def row_buckets(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes steps are made for, up to the largest there can be."""
    return (*(size for size in _BUCKETS if size < max_requests), max_requests)


def joined_buckets(max_requests: int) -> tuple[int, ...]:
    """Return those of the batch sizes that prompts join: a few places more are little beside a prompt."""
    return (*(size for size in _JOINED if size < max_requests), max_requests)


def key_bounds(max_keys: int) -> tuple[int, ...]:
    """Return the bounds on a row's keys that steps are made for: grids and buffers grow with the bound."""
    bounds = [_FEW_KEYS]
    while bounds[-1] < max_keys:
        bounds.append(_MORE_KEYS * bounds[-1])
    return (*bounds[:-1], max_keys)


class Capturer:
    """Turns functions into graphs, and keeps count of what that takes."""

    def __init__(self, device: torch.device, capturable: bool) -> None:
        self._captures = device.type == "cuda" and capturable
        self._pool: Any = None  # torch's handle of a memory pool has no public type
        self._captured: list[Callable[[], None]] = []  # graphs read and write tensors that their functions own
        self.count = 0
        self.seconds = 0.0
        if device.type == "cuda" and not capturable:
            logger.warning("These kernels cannot be captured in a CUDA graph; steps run eagerly.")

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return what does the same as a function. Functions that hand tensors on are captured in their order.

        It is run on a stream of its own until its kernels are compiled, and then captured.
        """
        if not self._captures:
            return function
        started = time.perf_counter()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        self._pool = self._pool or graph.pool()
        self._captured.append(function)
        self.count += 1
        self.seconds += time.perf_counter() - started
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be collected: a graph that is freed while another is captured breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(launches: Sequence[Callable[[], None]], repeats: int = 3) -> float:
    """Return how long the device takes for launches one after the other: the best of a few times."""
    found: list[float] = []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            started = time.perf_counter()
            for launch in launches:
                launch()
            found.append(time.perf_counter() - started)
            continue
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for launch in launches:
            launch()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return min(found)
