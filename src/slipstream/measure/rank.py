"""Rank mode: one tensor-parallel rank of a full-size model, alone on one device, measured step by step.

The rank's kernels, memory and bytes are real; its weights are random, and what the other ranks would send is left out.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.kernels import KernelChoice, Ops
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.measure.rank_models import RankModel, build_draft, build_target
from slipstream.models.context import KvCache, KvShape, PagedContext, QueryTokens, paged_context
from slipstream.models.moe import Experts, Router

PAGE_SIZE = 64
_SECONDS = 0.25  # of replays, for each figure


@dataclass(frozen=True)
class StepFigures:
    """One kind of step at one batch and context.

    Args:
        step: "decode" (one token a request), "verify" (the root and the drafted chain), "draft" (one draft step).
        experts_hit: distinct experts a layer reads, on average over the layers that have some; counted, not assumed.
        read_bytes: weights, experts and keys the step must read.
        floor_ms: the time those bytes take at the measured read bandwidth; None where there is none.
    """

    step: str
    batch: int
    context: int
    rows: int
    ms: float
    experts_hit: float
    read_bytes: int
    floor_ms: float | None

    @property
    def percent_of_floor(self) -> float | None:
        """The floor's share of the time: 100 is a step that only reads."""
        return None if self.floor_ms is None else 100.0 * self.floor_ms / self.ms


class ExpertCount:
    """Counts the distinct experts of each layer in a pass, while it is asked to."""

    def __init__(self) -> None:
        self.counting = False
        self.distinct: list[int] = []

    def __call__(self, ids_TK: Tensor) -> None:
        """Note one layer's choice; reads it from the device, so never while a graph is captured."""
        if self.counting:
            self.distinct.append(int(torch.unique(ids_TK[ids_TK >= 0]).numel()))


@dataclass(frozen=True)
class Kernels:
    """The kernels of a device, which tell `count` what each layer chose."""

    device: torch.device
    ops: Ops
    count: ExpertCount


def rank_kernels(device: torch.device, choice: KernelChoice, settings: Mapping[str, int]) -> Kernels:
    """Return the kernels a rank runs on; `settings` are tile shapes of the experts to try (`ExpertTiles.changed`)."""
    count = ExpertCount()
    if choice in ("cpu", "reference") or (choice == "auto" and device.type == "cpu"):
        if settings:
            raise ConfigError("--set changes tiles of the Triton kernels; they run on a GPU, or with --kernels triton.")
        return Kernels(device, ReferenceOps(device), count)
    from slipstream.kernels.triton.moe.tiles import MoeOptions  # triton is absent on CPU machines
    from slipstream.kernels.triton.ops import TritonOps

    return Kernels(device, TritonOps(device, moe=MoeOptions(settings, count)), count)


class Rank:
    """A target and a draft on one device, with caches as large as the largest batch and context asked for.

    Args:
        room: the largest batch, and the longest context.
        bandwidth: bytes read in a second, for the floors; None to leave them out.
        routing: how far apart rows choose their experts, "spread" or "clustered" (`random_experts`).
    """

    def __init__(
        self, model: RankModel, expert_format: str, kernels: Kernels, room: tuple[int, int], bandwidth: float | None,
        routing: str = "spread",
    ) -> None:  # fmt: skip
        self._device, ops, count = kernels.device, kernels.ops, kernels.count
        self._ops = ops
        self._count = count
        self._bandwidth = bandwidth
        max_batch, self._max_context = room
        self.target = build_target(model.target, expert_format, self._max_context + 1, self._device, routing)
        self.draft = build_draft(model.draft, self._max_context + 1, self._device)
        for part in self.target.modules():
            if isinstance(part, Router):  # fused blocks call no modules, and tell `count` themselves
                part.register_forward_hook(lambda _module, _inputs, chosen: count(chosen[0]))
        self._pages_each = -(-self._max_context // PAGE_SIZE)
        num_pages = max_batch * self._pages_each
        self._table_RP = torch.randperm(num_pages, device=self._device).int().view(max_batch, self._pages_each)
        self._target_kv = self._cache(self.target.kv_shape, num_pages)
        self._draft_kv = self._cache(self.draft.kv_shape, num_pages)

    @property
    def resident_bytes(self) -> int:
        """The bytes of both models' weights."""
        return _weight_bytes(self.target) + _expert_bytes(self.target) + _weight_bytes(self.draft)

    @torch.no_grad()
    def decode(self, batch: int, context: int) -> StepFigures:
        """Measure one token of each request."""
        return self._target_step("decode", batch, context, 1)

    @torch.no_grad()
    def verify(self, batch: int, context: int, num_nodes: int) -> StepFigures:
        """Measure a root and its drafted chain of each request: `num_nodes` rows."""
        return self._target_step("verify", batch, context, num_nodes)

    @torch.no_grad()
    def draft_step(self, batch: int, context: int) -> StepFigures:
        """Measure one step of the draft."""
        ctx = self._context(self._draft_kv, batch, context, 1)
        ids_T = self._token_ids(batch)
        hidden_TD = torch.randn(batch, self.draft.spec.hidden_size, device=self._device).to(
            self.draft.norm.weight.dtype
        )

        def step() -> Tensor:
            hidden = self.draft(hidden_TD, ids_T, ctx)
            return self.draft.logits(hidden.normed_TD, self._ops).argmax(-1)

        weights = _weight_bytes(self.draft, without=("fc.", "embed_tokens."))
        read = weights + batch * context * self.draft.kv_shape.bytes_per_token(torch.bfloat16)
        return self._figures("draft", (batch, context, batch), measured_ms(step, self._device), 0.0, read)

    def target_pass(self, batch: int, context: int, width: int) -> Callable[[], Tensor]:
        """Return a pass of the target over `width` tokens of each request, to be run, captured or profiled."""
        ctx = self._context(self._target_kv, batch, context, width)
        ids_T = self._token_ids(batch * width)

        def step() -> Tensor:
            hidden = self.target(ids_T, ctx)
            return self.target.logits(hidden.last_TD, self._ops).argmax(-1)

        return step

    def _target_step(self, name: str, batch: int, context: int, width: int) -> StepFigures:
        step = self.target_pass(batch, context, width)
        self._count.distinct, self._count.counting = [], True
        step()
        self._count.counting = False
        hit = self._count.distinct
        moe = self.target.spec.moe
        assert moe is not None
        one_expert = _expert_bytes(self.target) // (moe.num_experts * max(len(hit), 1))
        weights = _weight_bytes(self.target, without=("embed_tokens.",))
        read = weights + sum(hit) * one_expert + batch * context * self.target.kv_shape.bytes_per_token(torch.bfloat16)
        shape = (batch, context, batch * width)
        return self._figures(name, shape, measured_ms(step, self._device), statistics.fmean(hit or [0]), read)

    def _figures(self, name: str, shape: tuple[int, int, int], ms: float, hit: float, read: int) -> StepFigures:
        floor_ms = None if self._bandwidth is None else read / self._bandwidth * 1e3
        return StepFigures(name, *shape, ms, hit, read, floor_ms)

    def _context(self, kv: KvCache, batch: int, context: int, width: int) -> PagedContext:
        """Lay out `width` last keys of each request as its query tokens; no request is longer than `context`."""
        num_pages = -(-context // PAGE_SIZE)
        index_T = torch.arange(context - width, context, device=self._device).repeat(batch)
        queries = QueryTokens([width] * batch, index_T, index_T, torch.full_like(index_T, -1))
        return paged_context(self._ops, kv, self._table_RP[:batch, :num_pages].contiguous(), queries)

    def _token_ids(self, number: int) -> Tensor:
        return torch.randint(self.target.spec.vocab_size, (number,), device=self._device)

    def _cache(self, shape: KvShape, num_pages: int) -> KvCache:
        kv = KvCache.allocate(shape, num_pages, PAGE_SIZE, torch.bfloat16, self._device)
        for layer in kv.layers:
            layer.keys_SGd.normal_()
            if shape.value_view is None:
                layer.values_SGd.normal_()
        return kv


def measured_ms(step: Callable[[], Tensor], device: torch.device, seconds: float = _SECONDS) -> float:
    """Return the milliseconds of a step: the median of its graph's replays on a GPU, one run elsewhere."""
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    graph = captured(step, device)
    first = _replays(graph, 2)
    number = max(3, int(seconds * 1e3 / 5 / first))
    return statistics.median(_replays(graph, number) for _ in range(5))


def captured(step: Callable[[], Tensor], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a step as a graph, after two runs that compile what it needs."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _replays(graph: torch.cuda.CUDAGraph, number: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    start.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / number


def _weight_bytes(model: nn.Module, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of dense weights whose names do not start with one of `without`; packed experts are apart."""
    return sum(values.nbytes for name, values in model.named_parameters() if not name.startswith(without or ("/",)))


def _expert_bytes(model: nn.Module) -> int:
    """Return the bytes of all experts."""
    return sum(weights.nbytes for part in model.modules() if isinstance(part, Experts) for weights in part.weights)
