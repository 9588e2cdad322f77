"""Growing a tree: expand the best nodes level by level (EAGLE-2), or fill a fixed shape; then keep a budget.

A `Grower` runs the draft on a level's nodes and returns their best children; nothing here knows the model.
Shape letters: R requests, W nodes expanded on a level, C candidates, K children tried.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.speculation.tree import TreeBatch, TreeShape


class Children(NamedTuple):
    """The best children of some nodes, best first: log scores and tokens."""

    scores_RWK: Tensor
    tokens_RWK: Tensor


class Grower(Protocol):
    """Runs the draft, level by level."""

    def root_children(self, count: int) -> Children:
        """Return the best children of the root, as those of a level of one node."""
        ...

    def children(self, tokens_RW: Tensor, parents_RW: Tensor, count: int) -> Children:
        """Return the best children of W nodes.

        `parents_RW` says which node of the level before each hangs from (all zeros on the first level, whose parent is
        the root).
        """
        ...


@dataclass(frozen=True)
class Candidates:
    """Drafted nodes in the order they were made: token, parent (-1 = root), log score."""

    tokens_RC: Tensor
    parents_RC: Tensor
    scores_RC: Tensor


def grow(shape: TreeShape, grower: Grower) -> Candidates:
    """Return the nodes of each request's tree, parents before children."""
    return _grow_static(shape, grower) if shape.paths else _keep_budget(_grow_dynamic(shape, grower), shape)


def _grow_dynamic(shape: TreeShape, grower: Grower) -> Candidates:
    width = shape.width
    scores_RW, tokens_RW = (values[:, 0] for values in grower.root_children(width))
    made = [Candidates(tokens_RW, torch.full_like(tokens_RW, -1), scores_RW)]
    ids_RW = torch.arange(width, device=tokens_RW.device).expand_as(tokens_RW)
    hangs_RW = torch.zeros_like(tokens_RW)
    num_made = width
    for _ in range(shape.depth - 1):
        child_RWK, token_RWK = grower.children(tokens_RW, hangs_RW, width)
        scores_RC = (scores_RW[..., None] + child_RWK).flatten(1)
        tokens_RC = token_RWK.flatten(1)
        made.append(Candidates(tokens_RC, ids_RW.repeat_interleave(width, dim=1), scores_RC))
        scores_RW, best_RW = scores_RC.topk(width, dim=-1)
        ids_RW, hangs_RW = best_RW + num_made, best_RW // width
        tokens_RW = tokens_RC.gather(1, best_RW)
        num_made += width * width
    return Candidates(
        torch.cat([part.tokens_RC for part in made], 1),
        torch.cat([part.parents_RC for part in made], 1),
        torch.cat([part.scores_RC for part in made], 1),
    )


def _keep_budget(candidates: Candidates, shape: TreeShape) -> Candidates:
    """Keep the best; a parent never scores below its child, and a stable sort keeps it first when they tie."""
    num_kept = shape.num_nodes - 1
    if num_kept >= candidates.tokens_RC.shape[1]:
        return candidates
    order_RC = candidates.scores_RC.sort(dim=1, descending=True, stable=True).indices
    kept_RC = order_RC[:, :num_kept].sort(dim=1).values
    old_parents_RC = candidates.parents_RC.gather(1, kept_RC)
    parents_RC = torch.searchsorted(kept_RC, old_parents_RC)
    return Candidates(
        candidates.tokens_RC.gather(1, kept_RC),
        torch.where(old_parents_RC < 0, -1, parents_RC),
        candidates.scores_RC.gather(1, kept_RC),
    )


def _grow_static(shape: TreeShape, grower: Grower) -> Candidates:
    paths = sorted(shape.paths, key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate(paths)}
    inner = {path[:-1] for path in paths}
    tried = 1 + max(path[-1] for path in paths)
    level = grower.root_children(tried)
    num_requests, device = len(level.tokens_RWK), level.tokens_RWK.device
    tokens = torch.zeros(num_requests, len(paths), dtype=torch.int64, device=device)
    scores = torch.zeros(num_requests, len(paths), device=device)
    parents = torch.tensor([number.get(path[:-1], -1) for path in paths], device=device)
    expanded: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.depth + 1):
        for path in (path for path in paths if len(path) == depth):
            above, rank = expanded.index(path[:-1]), path[-1]
            tokens[:, number[path]] = level.tokens_RWK[:, above, rank]
            inherited = scores[:, number[path[:-1]]] if depth > 1 else 0.0
            scores[:, number[path]] = level.scores_RWK[:, above, rank] + inherited
        above_level, expanded = expanded, [path for path in paths if len(path) == depth and path in inner]
        if expanded:
            hangs_W = torch.tensor([above_level.index(path[:-1]) for path in expanded], device=device)
            ids_W = [number[path] for path in expanded]
            level = grower.children(tokens[:, ids_W], hangs_W.expand(num_requests, -1), tried)
    return Candidates(tokens, parents.expand(num_requests, -1), scores)


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
