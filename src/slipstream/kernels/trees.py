"""The trees of a step as tensors: how they are grown level by level, where their nodes lie, what is kept of them.

Shape letters: R rows, P pages of a row, W nodes of a level, A nodes of the level above, K children tried of each, C
candidates, N nodes of a tree with its root (node 0), D drafted tokens on the longest path, E = D + 1, H draft width,
L = R * N nodes of all rows, X values handed out per row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.chains import ChainOutcome
from slipstream.kernels.ops import RowSampling


@dataclass(frozen=True)
class GrowthPlan:
    """Which nodes the draft is run on, and which candidates are kept; the same for every row.

    The children tried of a level's nodes are the next level's candidates, in the order of their parents and, of one
    parent, the likeliest first. Candidates are numbered in that order, level after level.

    Args:
        tried: children of each node.
        widths: how many nodes the draft is run on at depth 1, 2, ...: of that level's candidates those of the best
            cumulative scores, equal ones in their order.
        num_kept: likewise, how many candidates are kept in all.
        expanded: of a static tree, which of a level's candidates the draft is run on instead, int64 [W] for each level.
        kept_C: of a static tree, whether each candidate is kept instead.
    """

    tried: int
    widths: tuple[int, ...]
    num_kept: int
    expanded: tuple[Tensor, ...] = ()
    kept_C: Tensor | None = None

    def first(self, depth: int) -> int:
        """Return the number of the first candidate so deep."""
        return self.tried * sum((1, *self.widths)[: depth - 1])

    @property
    def num_candidates(self) -> int:
        """Candidates of all levels."""
        return self.first(len(self.widths) + 2)


@dataclass(frozen=True)
class GrowthRows:
    """The requests whose trees are grown.

    Args:
        pages_RP: int32; the rows may lie apart.
        lengths_R: int64, keys the draft has committed.
        foretold_R: int64, the position of the root's children.
    """

    pages_RP: Tensor
    lengths_R: Tensor
    foretold_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor


class Children(NamedTuple):
    """The best children of a level's nodes, best first: log-probabilities and tokens. Both are contiguous."""

    scores_RAK: Tensor
    tokens_RAK: Tensor


@dataclass(frozen=True)
class Candidates:
    """Drafted nodes in the order they were made: token, parent (-1 = root), cumulative log-probability."""

    tokens_RC: Tensor
    parents_RC: Tensor
    scores_RC: Tensor

    @staticmethod
    def allocate(num_rows: int, count: int, device: torch.device) -> "Candidates":
        """Return room for so many candidates of every row."""
        tokens_RC = torch.empty(num_rows, count, dtype=torch.int64, device=device)
        return Candidates(tokens_RC, torch.empty_like(tokens_RC), torch.empty_like(tokens_RC, dtype=torch.float32))


@dataclass(frozen=True)
class Growth:
    """Trees that are growing; `StepOps.expand_level` writes the candidates."""

    plan: GrowthPlan
    rows: GrowthRows
    made: Candidates
    page_size: int

    @staticmethod
    def start(plan: GrowthPlan, rows: GrowthRows, page_size: int) -> "Growth":
        """Return trees of roots alone."""
        num_rows, device = len(rows.lengths_R), rows.lengths_R.device
        return Growth(plan, rows, Candidates.allocate(num_rows, plan.num_candidates, device), page_size)


@dataclass(frozen=True)
class LevelNodes:
    """The nodes of a level that the draft is run on, and the pass over them; contiguous, int64 unless said.

    The level's keys lie behind those of the levels above, which lie behind the committed ones.

    Args:
        ids_RW: which candidates they are.
        parents_RW: the place of each one's parent on the level above.
        bits_RW: which of the keys before each it sees, as `AttentionBatch.ancestors_T`.
        index_RW: where their keys lie among their rows' keys; `slots_RW` in the cache.
        position_RW: their positions.
        starts_R1: int32, as `AttentionBatch.query_starts_R1`; `kv_lens_R` likewise.
        sampling: how their children are drawn.
        hidden_LH: what the draft is fed for each, of what it left for its parent; None if nothing was given.
    """

    depth: int
    ids_RW: Tensor
    parents_RW: Tensor
    tokens_RW: Tensor
    bits_RW: Tensor
    index_RW: Tensor
    slots_RW: Tensor
    position_RW: Tensor
    starts_R1: Tensor
    kv_lens_R: Tensor
    sampling: RowSampling
    hidden_LH: Tensor | None

    @staticmethod
    def allocate(growth: Growth, above: "LevelNodes | None", feedback_LH: Tensor | None) -> "LevelNodes":
        """Return room for the nodes behind those of the level above, the root if that is None."""
        depth = 1 if above is None else above.depth + 1
        num_rows, width, device = len(growth.rows.lengths_R), growth.plan.widths[depth - 1], growth.rows.seed_R.device

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        count = num_rows * width
        return LevelNodes(
            depth=depth,
            ids_RW=empty(num_rows, width),
            parents_RW=empty(num_rows, width),
            tokens_RW=empty(num_rows, width),
            bits_RW=empty(num_rows, width),
            index_RW=empty(num_rows, width),
            slots_RW=empty(num_rows, width),
            position_RW=empty(num_rows, width),
            starts_R1=empty(num_rows + 1, dtype=torch.int32),
            kv_lens_R=empty(num_rows, dtype=torch.int32),
            sampling=RowSampling(empty(count, dtype=torch.float32), empty(count), empty(count)),
            hidden_LH=None if feedback_LH is None else feedback_LH.new_empty(count, feedback_LH.shape[1]),
        )


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of a step's trees, written by `StepOps.rerank_trees`; contiguous, int64 unless said.

    Args:
        tokens_RN, slots_RN: as `ChainPlaces` has them: the roots' tokens and every node's slot are there.
        parents_RN: -1 for the root.
        depth_RN: 0 for the root.
        position_RN: positions; the token a node foretells is one further on (`foretold_RN`).
        nodes_RND: the node at depth 1, 2, ... on the way from the root; from the node's own depth on itself.
        path_RND: their tokens; from the node's own depth on, -1 behind it.
        slots_RND: int32, their slots, as `TreePaths.slots_TD`; `root_R` likewise.
    """

    tokens_RN: Tensor
    slots_RN: Tensor
    parents_RN: Tensor
    depth_RN: Tensor
    position_RN: Tensor
    foretold_RN: Tensor
    nodes_RND: Tensor
    path_RND: Tensor
    slots_RND: Tensor
    root_R: Tensor

    @staticmethod
    def allocate(tokens_RN: Tensor, slots_RN: Tensor, depth: int) -> "TreeNodes":
        """Return room for trees no deeper than `depth`."""
        path_RND = tokens_RN.new_zeros(*tokens_RN.shape, depth)
        return TreeNodes(
            tokens_RN=tokens_RN,
            slots_RN=slots_RN,
            parents_RN=torch.zeros_like(tokens_RN),
            depth_RN=torch.zeros_like(tokens_RN),
            position_RN=torch.zeros_like(tokens_RN),
            foretold_RN=torch.zeros_like(tokens_RN),
            nodes_RND=torch.zeros_like(path_RND),
            path_RND=path_RND,
            slots_RND=torch.zeros_like(path_RND, dtype=torch.int32),
            root_R=tokens_RN.new_zeros(len(tokens_RN), dtype=torch.int32),
        )


@dataclass(frozen=True)
class TreeOutcome:
    """What a step with trees came to, written by `StepOps.accept_trees`.

    Args:
        chain: the path that is kept, as if it had been a chain.
        out_RX: of each row, a count and E tokens (`chain.out_RE`), the E nodes they were chosen at (0 past the end),
            and how many nodes each of the D depths had.
        node_L: which of all nodes those of the path are, the root past its end, int64 [R * E].
        from_RD: the slots to move the path's keys from; past its end, where they lie already.
    """

    chain: ChainOutcome
    out_RX: Tensor
    node_L: Tensor
    from_RD: Tensor

    @staticmethod
    def allocate(num_rows: int, depth: int, device: torch.device) -> "TreeOutcome":
        """Return room for what a batch comes to."""
        chain, longest = ChainOutcome.allocate(num_rows, depth + 1, device), depth + 1
        out_RX = torch.zeros(num_rows, 1 + 2 * longest + depth, dtype=torch.int64, device=device)
        chain = ChainOutcome(
            chain.emitted_RN, chain.last_R, chain.last_index_R, chain.last_keys_R, out_RX[:, : 1 + longest]
        )
        return TreeOutcome(chain, out_RX, out_RX.new_zeros(num_rows * longest), out_RX.new_zeros(num_rows, depth))
