"""A captured step's bookkeeping for trees: the paths and the choice that plain lists give."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.chains import ChainRows
from slipstream.kernels.reference.bookkeeping import TorchBookkeeping
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.reference.trees import node_paths
from slipstream.kernels.trees import TreeNodes, TreeOutcome
from slipstream.speculation.accept import Accepted, accept
from slipstream.speculation.simulate import simulate, simulated_counts, thresholds
from slipstream.speculation.tree import TreeBatch, nodes_to

CPU = torch.device("cpu")
NODES = 9


@st.composite
def batches(draw) -> tuple[TreeBatch, torch.Tensor, int]:
    """Return trees of one size whose siblings differ, tokens the target chooses, and the depth of the deepest tree."""
    trees, chosen = [], []
    for _ in range(draw(st.integers(1, 3))):
        parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, NODES))]
        rank = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        trees.append(([7, *rank[1:]], parents))
        chosen.append([draw(st.integers(0, 2)) for _ in range(NODES)])
    packed = TreeBatch.pack(trees, CPU)
    return packed, torch.tensor(chosen), max(max(tree.depths) for tree in packed.unpack())


def settled(trees: TreeBatch, chosen_RN: torch.Tensor, depth: int, rates: tuple[float, ...] = ()) -> Accepted:
    """Accept as a captured step does; a row is so many tokens long as its number says."""
    count = len(chosen_RN)
    zeros_R = torch.zeros(count, dtype=torch.int64)
    rows = ChainRows(zeros_R + 4, zeros_R + 7, zeros_R + 1, zeros_R.float(), torch.arange(count), zeros_R + 99,
                     torch.zeros(count, 1, dtype=torch.int32))  # fmt: skip
    limits = torch.tensor(thresholds(rates) if rates else [-1] * depth)
    nodes = TreeNodes.allocate(trees.tokens_RN, torch.zeros_like(trees.tokens_RN), depth)
    paths = node_paths(trees.parents_RN, depth)
    for field, values in (("parents", trees.parents_RN), ("depth", paths.depth_RN)):
        getattr(nodes, f"{field}_RN").copy_(values)
    nodes.nodes_RND.copy_(paths.nodes_RND)
    outcome = TreeOutcome.allocate(count, depth, CPU)
    TorchBookkeeping(ReferenceOps(CPU)).accept_trees(rows, nodes, chosen_RN, limits, outcome)
    path_RE = outcome.node_L.view(count, depth + 1) - torch.arange(count)[:, None] * NODES
    return Accepted(outcome.chain.out_RE[:, 1:], path_RE, outcome.out_RX[:, 0])


def said(accepted: Accepted) -> list[list[tuple[int, int]]]:
    """Return each row's emitted tokens with their nodes."""
    columns = zip(accepted.tokens_RE.tolist(), accepted.nodes_RE.tolist(), accepted.counts_R.tolist(), strict=True)
    return [list(zip(tokens[:count], nodes[:count], strict=True)) for tokens, nodes, count in columns]


@given(batches())
@settings(max_examples=60, deadline=None)
def test_paths_lead_from_the_root_to_each_node(given_batch):
    trees, _, depth = given_batch
    paths = node_paths(trees.parents_RN, depth)
    for row, tree in enumerate(trees.unpack()):
        for node in range(NODES):
            way = nodes_to(tree.parents, node)
            assert int(paths.depth_RN[row, node]) == len(way)
            assert paths.nodes_RND[row, node].tolist() == way + [node] * (depth - len(way))
            assert paths.on_path_RND[row, node].tolist() == [level < len(way) for level in range(depth)]


@given(batches())
@settings(max_examples=60, deadline=None)
def test_the_path_kept_is_the_one_that_agrees_with_the_target(given_batch):
    trees, chosen_RN, depth = given_batch
    assert said(settled(trees, chosen_RN, depth)) == said(accept(trees, chosen_RN))


@given(batches(), st.lists(st.sampled_from([0.0, 0.4, 0.8, 1.0]), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_simulated_acceptance_keeps_the_first_path_as_far_as_rates_say(given_batch, rates):
    trees, chosen_RN, depth = given_batch
    falling = tuple(sorted(rates, reverse=True))[:depth]
    counts = simulated_counts(falling, torch.arange(len(chosen_RN)), torch.full((len(chosen_RN),), 5))
    expected = simulate(trees.unpack(), chosen_RN, counts.tolist())
    assert said(settled(trees, chosen_RN, depth, falling)) == said(expected)
