"""Trees: shapes that are possible, masks that follow ancestry, growth that keeps the best and whole paths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.kernels import Candidates, Children, Growth, GrowthRows, LevelNodes, select, step_ops
from slipstream.kernels.reference.trees import kept_candidates
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.tree import MAX_NODES, TreeBatch, TreeShape, relative_bits

CPU = torch.device("cpu")
trees = st.integers(1, 20).flatmap(
    lambda n: st.tuples(*[st.integers(0, i - 1) for i in range(1, n)]).map(lambda parents: [-1, *parents])
)


def ancestors(parents: list[int], node: int) -> set[int]:
    """Return a node's path by walking up."""
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[node]
    return path


@given(trees)
def test_masks_and_depths_follow_the_parents(parents):
    size = len(parents)
    batch = TreeBatch(torch.arange(size)[None], torch.tensor([parents]), torch.tensor([size]))
    (tree,) = batch.unpack()
    for node in range(size):
        path = ancestors(parents, node)
        assert tree.depths[node] == len(path) - 1
        assert tree.path(node) == tuple(sorted(path - {0}))
        for distance in range(64):
            sees = bool(tree.bits[node] >> distance & 1)
            before_the_tree = distance > node
            assert sees == (before_the_tree or node - distance in path), (node, distance)


def test_padding_is_left_out():
    batch = TreeBatch.chains([[1, 2, 3], [4]], CPU)
    long, lone = batch.unpack()
    assert (long.tokens, long.parents, long.depths) == ([1, 2, 3], [-1, 0, 1], [0, 1, 2])
    assert (lone.tokens, lone.parents, lone.depths) == ([4], [-1], [0])
    assert lone.nodes_by_depth() == []
    assert long.nodes_by_depth() == [1, 1]


def test_the_last_of_64_nodes_sees_its_whole_chain():
    chain = relative_bits(torch.ones(1, MAX_NODES, MAX_NODES, dtype=torch.bool).tril())
    assert set(chain[0].tolist()) == {-1}


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 0},
        {"depth": 64},
        {"width": 0},
        {"budget": -1},
        {"depth": 6, "width": 4},  # 84 candidates and no budget
        {"depth": 8, "width": 10, "budget": 60},  # 70 drafted keys
        {"paths": ((0, 0),)},
        {"paths": ((0,), (0,))},
        {"paths": ((-1,),)},
    ],
)
def test_impossible_shapes_are_refused(settings):
    with pytest.raises(ConfigError):
        TreeShape(**settings)


class ScriptedGrower:
    """A grower whose scores depend only on a node's path."""

    feedback_LH = None

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._seed = vocab, seed
        self._level: list[tuple[int, ...]] = [()]

    def scores(self, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, path)) % 2**31)
        return torch.log_softmax(torch.randn(self._vocab, generator=generator) * 3, 0)

    def root_children(self, count: int) -> Children:
        return self._best(count)

    def children(self, level: LevelNodes, count: int) -> Children:
        pairs = zip(level.tokens_RW[0].tolist(), level.parents_RW[0].tolist(), strict=True)
        self._level = [(*self._level[parent], entry) for entry, parent in pairs]
        return self._best(count)

    def _best(self, count: int) -> Children:
        best = torch.stack([self.scores(path) for path in self._level])[None].topk(count, dim=-1)
        return Children(best.values, best.indices)


def grown(shape: TreeShape, grower: ScriptedGrower) -> Candidates:
    zero_R = torch.zeros(1, dtype=torch.int64)
    rows = GrowthRows(torch.zeros(1, 64, dtype=torch.int32), zero_R, zero_R, zero_R.float(), zero_R)
    growth = Growth.start(plan_of(shape, CPU), rows, 4)
    return kept_candidates(growth, *grow(growth, grower, step_ops(select(CPU, "reference"))))


def paths_of(candidates) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for entry, parent in zip(candidates.tokens_RC[0].tolist(), candidates.parents_RC[0].tolist(), strict=True):
        assert parent < len(paths)
        paths.append(((*paths[parent], entry)) if parent >= 0 else (entry,))
    return paths


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(0, 10**6))
def test_a_dynamic_tree_is_the_best_of_what_was_expanded(depth, width, budget, seed):
    if width + (depth - 1) * width**2 > 63 and not budget:
        return
    grower = ScriptedGrower(11, seed)
    scores = grower.scores
    candidates = grown(TreeShape(depth=depth, width=width, budget=budget), grower)
    # The same by hand: expand `width` nodes a level, keep every child tried, then the best of all.
    made: list[tuple[float, tuple[int, ...]]] = []
    beam = [(0.0, ())]
    for _ in range(depth):
        children = []
        for total, path in beam:
            best = scores(path).topk(width)
            children += [
                (total + float(v), (*path, i)) for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        made += children
        beam = sorted(children, key=lambda item: -item[0])[:width]
    wanted = sorted(made, key=lambda item: -item[0])[: budget or len(made)]
    assert set(paths_of(candidates)) == {path for _, path in wanted}


def test_a_static_tree_takes_the_ranks_it_names():
    grower = ScriptedGrower(11, 3)
    scores = grower.scores
    shape = TreeShape(paths=((1,), (0,), (0, 2), (0, 0), (0, 2, 1)))
    paths = set(paths_of(grown(shape, grower)))
    rank = {}
    for named in sorted(shape.paths, key=len):
        above = rank.get(named[:-1], ())
        rank[named] = (*above, int(scores(above).topk(named[-1] + 1).indices[-1]))
    assert paths == set(rank.values())


@given(
    st.one_of(
        st.builds(TreeShape, depth=st.integers(1, 5), width=st.integers(1, 4), budget=st.integers(1, 40)),
        st.just(TreeShape(paths=((0,), (1,), (0, 0), (1, 2), (0, 0, 3)))),
    ),
    st.integers(-1, 40),
)
def test_a_shape_within_a_number_of_nodes_drafts_no_more_and_is_left_alone_where_it_fits(shape, most):
    within = shape.within(most)
    if most >= shape.num_nodes - 1:
        assert within == shape
    elif most < 1:
        assert within is None
    else:
        assert 1 <= within.num_nodes - 1 <= most
        assert within.depth <= shape.depth
