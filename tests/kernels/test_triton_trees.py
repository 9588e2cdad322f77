"""Trees are grown, reranked and accepted by kernels as torch does it, to the bit, equal scores included."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_samples import PAGE_SIZE, assert_same, copied, rows_of
from triton_samples import triton_ops

from interpreted import DEVICE
from slipstream.kernels import Children, Growth, GrowthRows, RowSampling, TreeNodes, TreeOutcome
from slipstream.kernels.reference.bookkeeping import TorchBookkeeping
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.tree import TreeShape

OPS, TORCH = triton_ops(), TorchBookkeeping(ReferenceOps(DEVICE))
VOCAB, HIDDEN = 11, 6
INF, NAN = float("inf"), float("nan")
SCORES = torch.tensor([0.0, -0.0, -0.5, -0.5, -1.25, -2.0, -INF, 1e-7, NAN])
"""What children score: many alike, some above 0 as rounding may have it, and what a broken draft says."""
SHAPES = {
    "narrow": TreeShape(depth=3, width=2, budget=5),
    "all kept": TreeShape(depth=3, width=2),
    "one level": TreeShape(depth=1, width=5, budget=3),
    "a chain": TreeShape(depth=17, width=1),
    "as many as there may be": TreeShape(depth=5, width=8, budget=63),
    "wide": TreeShape(depth=2, width=64, budget=63),
    "static": TreeShape(paths=((0,), (2,), (1,), (0, 1), (2, 0), (0, 0), (0, 1, 0), (0, 1, 2), (0, 1, 2, 0))),
}


class Drawn:
    """Grows trees whose children are drawn; keeps what it was given."""

    def __init__(self, num_rows: int, feeds: bool, seed: int) -> None:
        self._generator, self._num_rows, self._feeds = torch.Generator().manual_seed(seed), num_rows, feeds
        self.levels = []
        self.feedback_LH = self._feedback(num_rows)

    def root_children(self, count):
        return self._drawn(1, count)

    def children(self, level, count):
        self.levels.append(level)
        self.feedback_LH = self._feedback(level.ids_RW.numel())
        return self._drawn(level.ids_RW.shape[1], count)

    def _feedback(self, count):
        return torch.randn(count, HIDDEN, generator=self._generator).to(DEVICE) if self._feeds else None

    def _drawn(self, width, count):
        shape = (self._num_rows, width, count)
        likely = torch.rand(shape, generator=self._generator) < 0.97
        chosen = torch.randint(0, len(SCORES), shape, generator=self._generator).clamp(max=6).where(likely, 8)
        tokens = torch.randint(0, VOCAB, shape, generator=self._generator)
        return Children(SCORES[chosen].to(DEVICE), tokens.to(DEVICE))


def grown(ops, shape, num_rows, feeds, seed):
    """Return the levels that grew, the candidates that were noted and the nodes that were kept."""
    generator = torch.Generator().manual_seed(seed)
    batch = dataclasses.replace(rows_of(num_rows, 1, generator), pages_RP=pages_of(num_rows, generator))
    rows = GrowthRows(batch.pages_RP, batch.committed_R, batch.committed_R + 1, batch.temperature_R, batch.seed_R)
    growth, grower = Growth.start(plan_of(shape, DEVICE), rows, PAGE_SIZE), Drawn(num_rows, feeds, seed)
    tokens = torch.randint(0, VOCAB, (num_rows, shape.num_nodes), generator=generator).to(DEVICE)
    slots = torch.randint(0, 999, tokens.shape, generator=generator).to(DEVICE)
    nodes = TreeNodes.allocate(tokens, slots, shape.depth)
    last = grow(growth, grower, ops)
    ops.rerank_trees(growth, *last, nodes)
    noted = growth.plan.num_candidates - last[1].tokens_RAK[0].numel()
    made = [getattr(growth.made, field.name)[:, :noted] for field in dataclasses.fields(growth.made)]
    return grower.levels, made, nodes


def pages_of(num_rows, generator):
    """Return tables of pages that lie apart, as a step's do."""
    return torch.randint(0, 100, (num_rows, 40), generator=generator, dtype=torch.int32).to(DEVICE)[:, :33]


def bits(value):
    return value.view(torch.int32) if value.dtype == torch.float32 else value


def assert_levels_same(got, expected):
    for field in dataclasses.fields(expected):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(other, RowSampling):
            assert_same(one, other)
        elif isinstance(other, torch.Tensor):
            assert torch.equal(one, other), field.name
            assert one.dtype == other.dtype and one.is_contiguous(), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("num_rows", "feeds", "seed"), [(1, True, 0), (3, False, 1)])
def test_trees_grow_as_torch_grows_them(name, num_rows, feeds, seed):
    given_shape = (SHAPES[name], num_rows, feeds, seed)
    levels, made, nodes = grown(OPS, *given_shape)
    expected_levels, expected_made, expected = grown(TORCH, *given_shape)
    for level, expected_level in zip(levels, expected_levels, strict=True):
        assert_levels_same(level, expected_level)
    for one, other in zip(made, expected_made, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert_same(nodes, expected)


@given(st.sampled_from(list(SHAPES)), st.integers(1, 4), st.integers(0, 2**32), st.booleans())
@settings(max_examples=40, deadline=None)
def test_paths_are_accepted_as_torch_accepts_them(name, num_rows, seed, simulated):
    shape = SHAPES[name]
    _, _, nodes = grown(TORCH, shape, num_rows, False, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, count = rows_of(num_rows, 1, generator), shape.num_nodes
    # Siblings have different tokens, and the target's are those of children, or nothing.
    earlier_N = torch.arange(count, device=DEVICE)
    same_RNN = (nodes.parents_RN[:, :, None] == nodes.parents_RN[:, None]) & (earlier_N[:, None] > earlier_N)
    nodes.tokens_RN[:, 1:] = same_RNN.sum(-1)[:, 1:]
    chosen = torch.randint(-1, 3, (num_rows, count), generator=generator).to(DEVICE)
    rates = torch.rand(shape.depth, generator=generator).sort(descending=True).values
    limits = (rates.double() * 2**32).long() if simulated else torch.full((shape.depth,), -1)
    outcome, expected = (TreeOutcome.allocate(num_rows, shape.depth, DEVICE) for _ in range(2))
    same_rows = copied(rows)
    TORCH.accept_trees(same_rows, nodes, chosen, limits.to(DEVICE), expected)
    OPS.accept_trees(rows, nodes, chosen, limits.to(DEVICE), outcome)
    assert_same(rows, same_rows)
    assert_same(outcome.chain, expected.chain)
    for field in ("out_RX", "node_L", "from_RD"):
        assert torch.equal(getattr(outcome, field), getattr(expected, field)), field
