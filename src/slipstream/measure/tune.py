"""Tiles for a model's GEMMs and attention, found by timing whole passes on the GPU at hand.

Only what changes no bits is tried: a weight's order of columns (`split_k`, and `block_k` of the tiles that fix it) and
the length of attention's splits stay as they ship. Every candidate's logits are compared with the shipped ones' all the
same. A GEMM timed alone would not show what it costs in a step, where the kernels around it overlap with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.spec import ModelSpec
from slipstream.kernels.triton.gemm.dispatch import WeightShape, shape_of_weight
from slipstream.kernels.triton.launch import compiling_ahead
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import (
    CHAIN_ROWS,
    FEW_ROWS,
    AttentionConfig,
    LinearConfig,
    Tuning,
    WideConfig,
    few_rows_name,
)
from slipstream.measure.rank_models import build_target
from slipstream.models.context import KvCache, QueryTokens, paged_context
from slipstream.models.layers import Linear
from slipstream.quant.packed import PackedWeight

PAGE_SIZE = 16
_COLD_BYTES = 256 << 20  # weights of the layers that are timed: more than any L2 holds
_GAIN = 0.995  # of the time before; what gains less is noise
_FEW_TILES = 16
Step = Callable[[], Tensor]


class Rows(NamedTuple):
    """A pass: requests, and query tokens of each."""

    requests: int
    nodes: int


PASSES = (Rows(1, 1), Rows(1, 4), Rows(4, 4), Rows(8, 4), Rows(40, 4))
"""One row and a chain, 16 rows, 32 and 160: each has tiles of its own."""


@dataclass(frozen=True)
class Candidate:
    """A tuning to try, and what is other in it."""

    name: str
    tuning: Tuning


class Subject:
    """Some layers of a model and its head with random weights on a device, and caches as passes want them.

    Args:
        weights: "dense", or "fp8_per_channel" for all but the head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: str,
        device: torch.device,
        context: int = 1024,
        passes: tuple[Rows, ...] = PASSES,
    ) -> None:
        bytes_each = 3 * spec.hidden_size * spec.intermediate_size + 3 * spec.hidden_size**2
        num_layers = min(max(_COLD_BYTES // bytes_each, 2), spec.num_layers)
        self.device, self._context, self.passes = device, context, passes
        self.target = build_target(replace(spec, num_layers=num_layers), "dense", context, device)
        if weights != "dense":
            self._pack()
        pages = -(-context // PAGE_SIZE)
        most = max(rows.requests for rows in passes)
        self._kv = KvCache.allocate(self.target.kv_shape, most * pages, PAGE_SIZE, torch.bfloat16, device)
        for layer in self._kv.layers:
            layer.keys_SGd.normal_()
            layer.values_SGd.normal_()
        self._table_RP = torch.arange(most * pages, dtype=torch.int32, device=device).view(most, pages)

    @property
    def parts(self) -> list[WeightShape | None]:
        """What has tiles: attention (None), and the weights a pass multiplies by, each shape once."""
        linears = [module for module in self.target.modules() if isinstance(module, Linear)]
        weights = [linear.weight if linear.packed is None else linear.packed for linear in linears]
        shapes = [shape_of_weight(one) for one in weights if isinstance(one, Tensor | PackedWeight)]
        return [None, *dict.fromkeys(shapes)]

    def step(self, tuning: Tuning, rows: Rows) -> Step:
        """Return a pass over some rows; the tokens and the keys before them are the same for every tuning."""
        ops, count = TritonOps(self.device, tuning), rows.requests * rows.nodes
        index_T = torch.arange(self._context - rows.nodes, self._context, device=self.device).repeat(rows.requests)
        queries = QueryTokens([rows.nodes] * rows.requests, index_T, index_T, torch.full_like(index_T, -1))
        ctx = paged_context(ops, self._kv, self._table_RP[: rows.requests].contiguous(), queries)
        ids_T = torch.arange(count, device=self.device) * 7919 % self.target.spec.vocab_size
        return lambda: self.target.logits(self.target(ids_T, ctx).last_TD, ops)

    def _pack(self) -> None:
        ops = TritonOps(self.device)
        for linear in [module for module in self.target.modules() if isinstance(module, Linear)]:
            if linear is self.target.lm_head or linear.weight is None:
                continue
            scale_N = linear.weight.float().abs().amax(1) / 448
            codes = (linear.weight / scale_N[:, None]).to(torch.float8_e4m3fn)
            packed = PackedWeight("fp8_per_channel", len(codes), linear.in_features, codes, {"scale": scale_N})
            linear.pack(ops.prepare(packed))


@dataclass(frozen=True)
class Search:
    """How candidates are tried.

    Args:
        measure: returns the milliseconds of a step.
        is_late: tells that no further candidate is to be tried.
        say: hears what was tried and what came of it.
        compiles: kernels are compiled side by side before they are timed.
    """

    measure: Callable[[Step], float]
    is_late: Callable[[], bool]
    say: Callable[[str], None]
    compiles: bool = True


@torch.no_grad()
def tune(subject: Subject, shipped: Tuning, search: Search) -> Tuning:
    """Return the tuning in which every pass is as fast as any candidate made it, with the shipped one's bits."""
    best = shipped
    for rows in subject.passes:
        if search.is_late():
            search.say(f"no time left for {rows.requests} x {rows.nodes}")
            continue
        best = _tune_pass(subject, shipped, best, rows, search)
    for rows in subject.passes if best != shipped else ():
        if not torch.equal(subject.step(best, rows)(), subject.step(shipped, rows)()):
            search.say(f"{rows.requests} x {rows.nodes}: together the tiles give other bits, so none are kept")
            return shipped
    return best


def _tune_pass(subject: Subject, shipped: Tuning, best: Tuning, rows: Rows, search: Search) -> Tuning:
    label = f"{rows.requests} x {rows.nodes}"
    expected, before = subject.step(shipped, rows)(), search.measure(subject.step(best, rows))
    fastest = before
    if search.compiles:
        with compiling_ahead(ignore_errors=True):
            for part in subject.parts:
                for candidate in candidates(best, part, rows):
                    subject.step(candidate.tuning, rows)()
    for part in subject.parts:
        for candidate in candidates(best, part, rows):
            if search.is_late():
                break
            try:
                step = subject.step(candidate.tuning, rows)
                same, ms = torch.equal(step(), expected), search.measure(step)
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises, the candidate is left out
                search.say(f"{label} {candidate.name}: does not run ({str(error).splitlines()[-1:] or type(error)})")
                continue
            if not same:
                search.say(f"{label} {candidate.name}: other bits")
            elif ms < fastest * _GAIN:
                search.say(f"{label} {candidate.name}: {fastest:.4f} to {ms:.4f} ms")
                fastest, best = ms, candidate.tuning
    search.say(f"{label}: {before:.4f} ms as it ships, {fastest:.4f} ms tuned")
    return best


def candidates(tuning: Tuning, part: WeightShape | None, rows: Rows) -> Iterator[Candidate]:
    """Yield tunings in which one part has other tiles."""
    if part is None:
        for changes in _ATTENTION:
            config = replace(tuning.attention, **changes)  # type: ignore[arg-type]  # numbers, by name
            if config != tuning.attention:
                yield Candidate(f"attention {changes}", replace(tuning, attention=config))
        return
    num_rows, order = rows.requests * rows.nodes, tuning.linear_config(*part)
    if num_rows <= CHAIN_ROWS:
        yield from _in_section(tuning, "linear_few", part.key, _few(tuning, part, order))
    elif num_rows <= _FEW_TILES:
        yield from _in_section(tuning, "linear", part.key, _tiles(order))
    elif part.format in ("dense", "fp8") and part.itemsize <= 2:
        name = few_rows_name(part.key) if num_rows <= FEW_ROWS else part.key
        yield from _in_section(tuning, "wide_linear", name, _wide(tuning, part, order))


_ATTENTION: tuple[dict[str, int], ...] = (
    *({"num_stages": stages} for stages in (1, 2, 3, 4)),
    *({"num_warps": warps} for warps in (2, 4, 8)),
    *({"share": share} for share in (1, 2, 3, 4)),
    *({"programs": programs} for programs in (528, 1056, 2112)),
)  # of `AttentionConfig`: what changes no bits
assert all(name in AttentionConfig.__dataclass_fields__ for changes in _ATTENTION for name in changes)


def _in_section(
    tuning: Tuning, section: str, key: str, configs: Iterator[LinearConfig] | Iterator[WideConfig]
) -> Iterator[Candidate]:
    before = getattr(tuning, section)
    for config in configs:
        if before.get(key) != config:
            sections: dict[str, object] = {section: {**before, key: config}}
            yield Candidate(f"{section} {key} {config}", replace(tuning, **sections))  # type: ignore[arg-type]  # by name


def _tiles(order: LinearConfig) -> Iterator[LinearConfig]:
    """Yield tiles that add columns in an order."""
    for block_n in (64, 128):
        for stages in (3, 4, 6):
            for lines in (0, 8):
                yield replace(order, block_n=block_n, num_stages=stages, prefetch_lines=lines)


def _few(tuning: Tuning, shape: WeightShape, order: LinearConfig) -> Iterator[LinearConfig]:
    """Yield tiles for up to 4 rows; on Hopper sliced-K and with a producer warp, where that fits."""
    yield from _tiles(order)
    if tuning.architecture != "sm_90":
        return
    splits = order.split_k
    if splits in (2, 4):
        owned = [(own, max(64, own * splits)) for own in (16, 32, 64)]
    else:
        rounds = -(-shape.outputs // (132 * 256))  # programs of at most 256 outputs, as evenly as SMs share them
        own = -(-shape.outputs // (132 * rounds * 16)) * 16
        owned = [(own, max(64, 1 << (own - 1).bit_length()))]
    for own, block_n in owned:
        for stages, trigger in ((0, -1), (32, -1), (32, 8)):  # as many stages as fit, or none
            yield replace(
                order,
                block_n=block_n,
                prefetch_lines=0,
                program_n=own,
                sliced_k=splits > 1,
                gemv_stages=stages,
                gemv_trigger=trigger,
            )


def _wide(tuning: Tuning, shape: WeightShape, order: LinearConfig) -> Iterator[WideConfig]:
    """Yield tiles with which one program takes all rows; stages are as many as fit."""
    hopper, fp8 = tuning.architecture == "sm_90", shape.format == "fp8"
    for block_n, pair, warps in ((64, False, 4), (64, True, 4), (64, True, 8), (128, False, 8)):
        for stream in (False, True) if hopper else (False,):
            yield WideConfig(
                block_n, pair, 128 if fp8 else 64, warps, 8 if hopper else 3, tma=hopper,
                deferred=order.split_k > 1, together=hopper and not stream, warp_specialised=stream,
            )  # fmt: skip
