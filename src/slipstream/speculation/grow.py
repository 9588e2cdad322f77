"""Growing a tree: expand the best nodes level by level (EAGLE-2), or fill a fixed shape; then keep a budget.

A `Grower` runs the draft on a level's nodes and returns their children's scores; nothing here knows the model.
Shape letters: R requests, W nodes expanded on a level, C candidates, K children tried, V draft vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.speculation.tree import TreeShape


class Grower(Protocol):
    """Runs the draft on the nodes of one level."""

    def __call__(self, entries_RW: Tensor, parents_RW: Tensor) -> Tensor:
        """Return log scores [R, W, V] of the children of W nodes.

        `entries_RW` are the nodes' entries in the draft vocabulary; `parents_RW` says which node of the level before
        each hangs from (all zeros on the first level, whose parent is the root).
        """
        ...


@dataclass(frozen=True)
class Candidates:
    """Drafted nodes in the order they were made: entry in the draft vocabulary, parent (-1 = root), log score."""

    entries_RC: Tensor
    parents_RC: Tensor
    scores_RC: Tensor


def grow(shape: TreeShape, root_scores_RV: Tensor, expand: Grower) -> Candidates:
    """Return the nodes of each request's tree, parents before children."""
    if shape.paths:
        return _grow_static(shape, root_scores_RV, expand)
    return _keep_budget(_grow_dynamic(shape, root_scores_RV, expand), shape)


def _grow_dynamic(shape: TreeShape, root_scores_RV: Tensor, expand: Grower) -> Candidates:
    width = min(shape.width, root_scores_RV.shape[-1])
    scores_RW, entries_RW = root_scores_RV.topk(width, dim=-1)
    made = [Candidates(entries_RW, torch.full_like(entries_RW, -1), scores_RW)]
    ids_RW = torch.arange(width, device=entries_RW.device).expand_as(entries_RW)
    hangs_RW = torch.zeros_like(entries_RW)
    num_made = width
    for _ in range(shape.depth - 1):
        child_RWK, entry_RWK = expand(entries_RW, hangs_RW).topk(width, dim=-1)
        scores_RC = (scores_RW[..., None] + child_RWK).flatten(1)
        entries_RC = entry_RWK.flatten(1)
        made.append(Candidates(entries_RC, ids_RW.repeat_interleave(width, dim=1), scores_RC))
        scores_RW, best_RW = scores_RC.topk(width, dim=-1)
        ids_RW, hangs_RW = best_RW + num_made, best_RW // width
        entries_RW = entries_RC.gather(1, best_RW)
        num_made += width * width
    return Candidates(
        torch.cat([part.entries_RC for part in made], 1),
        torch.cat([part.parents_RC for part in made], 1),
        torch.cat([part.scores_RC for part in made], 1),
    )


def _keep_budget(candidates: Candidates, shape: TreeShape) -> Candidates:
    """Keep the best; a parent never scores below its child, and a stable sort keeps it first when they tie."""
    num_kept = shape.num_nodes - 1
    if num_kept >= candidates.entries_RC.shape[1]:
        return candidates
    order_RC = candidates.scores_RC.sort(dim=1, descending=True, stable=True).indices
    kept_RC = order_RC[:, :num_kept].sort(dim=1).values
    old_parents_RC = candidates.parents_RC.gather(1, kept_RC)
    parents_RC = torch.searchsorted(kept_RC, old_parents_RC)
    return Candidates(
        candidates.entries_RC.gather(1, kept_RC),
        torch.where(old_parents_RC < 0, -1, parents_RC),
        candidates.scores_RC.gather(1, kept_RC),
    )


def _grow_static(shape: TreeShape, root_scores_RV: Tensor, expand: Grower) -> Candidates:
    paths = sorted(shape.paths, key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate(paths)}
    inner = {path[:-1] for path in paths}
    num_requests, device = len(root_scores_RV), root_scores_RV.device
    entries = torch.zeros(num_requests, len(paths), dtype=torch.int64, device=device)
    scores = torch.zeros(num_requests, len(paths), device=device)
    parents = torch.tensor([number.get(path[:-1], -1) for path in paths], device=device)
    expanded: list[tuple[int, ...]] = [()]
    level_scores_RWV = root_scores_RV[:, None]
    for depth in range(1, shape.depth + 1):
        for path in (path for path in paths if len(path) == depth):
            above = expanded.index(path[:-1])
            best = level_scores_RWV[:, above].topk(path[-1] + 1, dim=-1)
            entries[:, number[path]] = best.indices[:, -1]
            scores[:, number[path]] = best.values[:, -1] + (scores[:, number[path[:-1]]] if depth > 1 else 0.0)
        above_level, expanded = expanded, [path for path in paths if len(path) == depth and path in inner]
        if expanded:
            hangs_W = torch.tensor([above_level.index(path[:-1]) for path in expanded], device=device)
            ids_W = [number[path] for path in expanded]
            level_scores_RWV = expand(entries[:, ids_W], hangs_W.expand(num_requests, -1))
    return Candidates(entries, parents.expand(num_requests, -1), scores)
