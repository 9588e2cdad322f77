"""What the parts of the Kimi benchmark share: the device, its bandwidth, how long is left, and how calls are timed."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.triton.bandwidth import read_bandwidth

TOP_K = 8
LATENT, ROPE, HEADS, PAGE = 512, 64, 8, 64


@dataclass(frozen=True)
class Sizes:
    """Kimi's, on one of eight ranks; or a few, to try the script."""

    hidden: int = 7168
    inner: int = 256
    experts: int = 384
    contexts: tuple[int, ...] = (1024, 10240)
    batches: tuple[int, ...] = (1, 2, 8, 40)
    rows: tuple[int, ...] = (1, 4, 8, 16, 40, 160)


TINY = Sizes(128, 64, 8, (96,), (1,), (1, 2))


class Bench:
    """A device, its bandwidth, the time there is, and what was measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.gpu = self.device.type != "cpu"
        self.sizes = TINY if arguments.tiny else Sizes()
        self.tiny = arguments.tiny
        self.arguments = arguments
        self.format = arguments.format
        self._ends = time.perf_counter() + arguments.seconds
        self.bandwidth = read_bandwidth(self.device) if self.gpu else 1e10
        self.results: dict[str, object] = {"read_bandwidth": self.bandwidth, "device": str(arguments.device)}

    @property
    def seconds_left(self) -> float:
        """How long the script may still run."""
        return self._ends - time.perf_counter()

    def microseconds(self, calls: list[Callable[[], object]], repeats: int = 5) -> float:
        """Return the time of a call: calls are captured one after another, and the graph replayed; the median."""
        for call in calls[:2]:
            call()
        if not self.gpu:
            start = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (2 * len(calls)))
        return sorted(times[1:])[repeats // 2]

    def choices(self, rows: int, number: int, num_experts: int) -> list[torch.Tensor]:
        """Return several routings of so many rows, each row to its own experts, uniformly."""
        scores = torch.rand(number, rows, num_experts, device=self.device)
        return list(scores.topk(TOP_K, dim=-1).indices)


def latent_case(
    device: torch.device, requests: int, context: int, width: int, offset: int = 0, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, KvLayer, AttentionBatch]:
    """Return queries, a random cache and the pass over the last `width` keys of each request."""
    pages = -(-context // PAGE)
    if slots is None:
        slots = torch.randn(requests * pages * PAGE, 1, LATENT + ROPE, device=device).bfloat16()
    table = torch.arange(offset * pages, (offset + requests) * pages, device=device).int().view(requests, pages)
    index = torch.arange(context - width, context, device=device).repeat(requests)
    batch = AttentionBatch(
        torch.arange(0, (requests + 1) * width, width, dtype=torch.int32, device=device),
        torch.full((requests,), context, dtype=torch.int32, device=device), table, index,
        torch.full_like(index, -1), PAGE, width, pages * PAGE,
    )  # fmt: skip
    q = torch.randn(requests * width, HEADS, LATENT + ROPE, device=device).bfloat16()
    return q, KvLayer(slots, slots[..., :LATENT]), batch
