"""Growing a tree: expand the best nodes level by level (EAGLE-2), or fill a fixed shape; then keep a budget.

A `Grower` runs the draft on a level's nodes and returns their best children; nothing here knows the model. Shapes
follow from the tree's, and nothing is asked of the host, so that growing can be captured in a graph.

Shape letters: R requests, W nodes expanded on a level, C candidates, K children tried.
"""

from collections.abc import Callable
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


def growth(shape: TreeShape, device: torch.device) -> Callable[[Grower], Candidates]:
    """Return what grows each request's tree, its nodes with parents before children."""
    if shape.paths:
        return _static(shape, device)
    return lambda grower: _keep_budget(_grow_dynamic(shape, grower), shape)


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


def _static(shape: TreeShape, device: torch.device) -> Callable[[Grower], Candidates]:
    """Lay a static tree out level by level: which child of which expanded node each node is, and who is expanded."""
    paths = sorted(shape.paths, key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate(paths)}
    inner = {path[:-1] for path in paths}
    tried = 1 + max(path[-1] for path in paths)
    levels: list[_Level] = []
    above: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.depth + 1):
        nodes = [path for path in paths if len(path) == depth]
        taken = [above.index(path[:-1]) * tried + path[-1] for path in nodes]
        before = [path for path in paths if len(path) == depth - 1]
        parents = [before.index(path[:-1]) for path in nodes] if depth > 1 else []
        expanded = [path for path in nodes if path in inner]
        places = [nodes.index(path) for path in expanded]
        hangs = [above.index(path[:-1]) for path in expanded]
        columns = (taken, parents, places, hangs)
        levels.append(_Level(*(torch.tensor(column, dtype=torch.int64, device=device) for column in columns)))
        above = expanded
    parents_C = torch.tensor([number.get(path[:-1], -1) for path in paths], device=device)

    def grow(grower: Grower) -> Candidates:
        children = grower.root_children(tried)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for level in levels:
            tokens.append(children.tokens_RWK.flatten(1)[:, level.taken])
            own_RC = children.scores_RWK.flatten(1)[:, level.taken]
            scores.append(own_RC + scores[-1][:, level.parents] if scores else own_RC)
            if len(level.places):
                hangs_RW = level.hangs.expand(len(own_RC), -1)
                children = grower.children(tokens[-1][:, level.places], hangs_RW, tried)
        tokens_RC = torch.cat(tokens, 1)
        return Candidates(tokens_RC, parents_C.expand_as(tokens_RC), torch.cat(scores, 1))

    return grow


class _Level(NamedTuple):
    """A level of a static tree.

    Args:
        taken: for each node, its place among the children of the nodes expanded above.
        parents: for each node, its parent's place on the level above; empty on the first level.
        places: which nodes are expanded.
        hangs: for each of those, its parent's place among the nodes expanded above.
    """

    taken: Tensor
    parents: Tensor
    places: Tensor
    hangs: Tensor


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
