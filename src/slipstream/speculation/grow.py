"""Growing a tree: expand the best nodes level by level (EAGLE-2), or fill a fixed shape; then keep a budget.

A `Grower` runs the draft on a level's nodes and returns their best children; nothing here knows the model. Shapes
follow from the tree's, and nothing is asked of the host, so that growing can be captured in a graph.

Shape letters: R requests, L nodes of a level of all requests, H draft width.
"""

from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels import Candidates, Children, Growth, GrowthPlan, LevelNodes, StepOps
from slipstream.speculation.tree import TreeBatch, TreeShape


class Grower(Protocol):
    """Runs the draft, level by level."""

    @property
    def feedback_LH(self) -> Tensor | None:
        """What the last pass left for each of its nodes, at first for the root; None if one pass is over all levels."""
        ...

    def root_children(self, count: int) -> Children:
        """Return the best children of the root, as those of a level of one node."""
        ...

    def children(self, level: LevelNodes, count: int) -> Children:
        """Return the best children of a level's nodes."""
        ...


def plan_of(shape: TreeShape, device: torch.device) -> GrowthPlan:
    """Return which nodes of trees of a shape are expanded, and which are kept."""
    if not shape.paths:
        return GrowthPlan(shape.width, (shape.width,) * (shape.depth - 1), shape.num_nodes - 1)
    tried = 1 + max(path[-1] for path in shape.paths)
    inner = {path[:-1] for path in shape.paths}
    above: list[tuple[int, ...]] = [()]
    expanded, kept = [], []
    for _ in range(shape.depth):
        candidates = [(*path, rank) for path in above for rank in range(tried)]
        kept += [path in shape.paths for path in candidates]
        above = [path for path in candidates if path in inner]
        expanded.append([place for place, path in enumerate(candidates) if path in inner])
    levels = tuple(torch.tensor(places, dtype=torch.int64, device=device) for places in expanded[:-1])
    kept_C = torch.tensor(kept, device=device)
    return GrowthPlan(tried, tuple(map(len, levels)), len(shape.paths), levels, kept_C)


def grow(growth: Growth, grower: Grower, ops: StepOps) -> tuple[LevelNodes | None, Children]:
    """Run the draft on one level after another; return the last one's nodes, None if it is the root, and children."""
    level, children = None, grower.root_children(growth.plan.tried)
    for _ in growth.plan.widths:
        level = ops.expand_level(growth, level, children, grower.feedback_LH)
        children = grower.children(level, growth.plan.tried)
    return level, children


def with_trees(roots: TreeBatch, known: list[int], candidates: Candidates) -> TreeBatch:
    """Hang the candidates of the known requests on their roots; the others stay lone."""
    num_requests, num_drafted = len(roots.sizes_R), candidates.tokens_RC.shape[1]
    tokens_RN = roots.tokens_RN.new_zeros(num_requests, 1 + num_drafted)
    parents_RN = torch.full_like(tokens_RN, -1)
    tokens_RN[:, :1] = roots.tokens_RN
    tokens_RN[known, 1:] = candidates.tokens_RC
    parents_RN[known, 1:] = candidates.parents_RC + 1
    sizes_R = roots.sizes_R.clone()
    sizes_R[known] = 1 + num_drafted
    return TreeBatch(tokens_RN, parents_RN, sizes_R)
