"""Growing level by level: runs the draft on the nodes of one level after another and names their best children.

Shape letters: R requests, W nodes of a level, L nodes of a level of all requests, H draft width, V draft vocabulary, M
masks, B tokens a request has borrowed, K children.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import (
    AttentionBatch,
    Borrowed,
    Candidates,
    Children,
    Growth,
    GrowthRows,
    LevelNodes,
    Ops,
    RowSampling,
    step_ops,
)
from slipstream.kernels.reference.trees import kept_candidates
from slipstream.models.context import KvCache, PagedContext, masks_context, page_table
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.drafter import DraftView
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.tree import TreeShape


def growth_rows(views: Sequence[DraftView], device: torch.device) -> GrowthRows:
    """Return requests as tensors."""
    lengths_R = torch.tensor([len(view.tokens) - 1 for view in views], device=device)
    return GrowthRows(
        page_table([view.pages for view in views], device),
        lengths_R,
        lengths_R + 1,
        torch.tensor([view.temperature for view in views], device=device),
        torch.tensor([view.seed for view in views], device=device),
    )


@dataclass(frozen=True)
class LevelsStart:
    """What the draft left at the requests' last slots, and what they have borrowed (nothing if nobody has)."""

    feedback_RH: Tensor
    logits_RV: Tensor
    borrowed: Sequence[Borrowed | None] = ()


class Levels:
    """Runs the draft on one level of nodes after another; a level's keys go to scratch slots behind the last slot."""

    def __init__(self, draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: GrowthRows, start: LevelsStart) -> None:
        self._draft, self._kv, self._ops, self._rows = draft, kv, ops, rows
        self._best = _Best(draft, ops, rows, start)
        self.feedback_LH: Tensor | None = start.feedback_RH

    def root_children(self, count: int) -> Children:
        """Return the root's best children: the last slot has foretold them already."""
        return self._best.of_root(count)

    def children(self, level: LevelNodes, count: int) -> Children:
        """Run the draft on this level's nodes and return their best children."""
        assert level.hidden_LH is not None, "the level above left its feedback"
        pages_RP, page_size = self._rows.pages_RP, self._kv.page_size
        batch = AttentionBatch(
            query_starts_R1=level.starts_R1,
            kv_lens_R=level.kv_lens_R,
            page_table_RP=pages_RP,
            kv_index_T=level.index_RW.flatten(),
            ancestors_T=level.bits_RW.flatten(),
            page_size=page_size,
            max_queries=level.index_RW.shape[1],
            max_keys=pages_RP.shape[1] * page_size,
        )
        ctx = PagedContext(self._ops, level.position_RW.flatten(), level.slots_RW.flatten(), batch, self._kv)
        hidden = self._draft(level.hidden_LH, level.tokens_RW.flatten(), ctx)
        self.feedback_LH = hidden.feedback_TD
        return self._best.of(hidden.normed_TD, level.sampling, count)


class MaskedLevels:
    """Runs a P-EAGLE draft once, over a mask for each level, so that a level's nodes all have the same children."""

    def __init__(
        self, draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: GrowthRows, start: LevelsStart, num_masks: int
    ) -> None:
        self._best, self.feedback_LH = _Best(draft, ops, rows, start), None
        if num_masks:
            num_requests = len(rows.lengths_R)
            index_RM = rows.lengths_R[:, None] + torch.arange(num_masks, device=rows.lengths_R.device)
            ctx = masks_context(ops, kv, rows.pages_RP, index_RM)
            normed_TD = draft.run_masks(num_requests, num_masks, ctx).normed_TD
            self._normed_MRH = normed_TD.view(num_requests, num_masks, -1).transpose(0, 1).contiguous()

    def root_children(self, count: int) -> Children:
        """Return the root's best children: the last slot has foretold them already."""
        return self._best.of_root(count)

    def children(self, level: LevelNodes, count: int) -> Children:
        """Return the best children of every node of this level: what its mask foretold."""
        (_, width), sampling = level.tokens_RW.shape, level.sampling
        of_first = (sampling.temperature_L[::width], sampling.seed_L[::width], sampling.position_L[::width])
        lone = RowSampling(*(values_R.contiguous() for values_R in of_first))
        found = self._best.of(self._normed_MRH[level.depth - 1], lone, count)
        return Children(*(values_R1K.expand(-1, width, -1).contiguous() for values_R1K in found))


def levels_of(
    draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: GrowthRows, start: LevelsStart, depth: int
) -> Levels | MaskedLevels:
    """Return what grows trees so deep with a draft of either kind."""
    if draft.mask_features_C is None:
        return Levels(draft, kv, ops, rows, start)
    return MaskedLevels(draft, kv, ops, rows, start, depth - 1)


def grown_trees(
    draft: Eagle3Draft, kv: KvCache, ops: Ops, views: Sequence[DraftView], start: LevelsStart, shape: TreeShape
) -> Candidates:
    """Grow a tree behind the last slot of each request; return the nodes that are kept."""
    device = draft.token_ids_V.device
    growth = Growth.start(plan_of(shape, device), growth_rows(views, device), kv.page_size)
    levels = levels_of(draft, kv, ops, growth.rows, start, shape.depth)
    return kept_candidates(growth, *grow(growth, levels, step_ops(ops)))


class _Best:
    """Names the best children of nodes, by the draft's head and by what requests have borrowed.

    Scores are perturbed with the noise the target will use for the same token, so that both tend to choose alike.
    """

    def __init__(self, draft: Eagle3Draft, ops: Ops, rows: GrowthRows, start: LevelsStart) -> None:
        self._draft, self._ops, self._rows, self._start = draft, ops, rows, start

    def of_root(self, count: int) -> Children:
        """Return the best children of the roots."""
        feedback_RH, ops, rows = self._start.feedback_RH, self._ops, self._rows
        normed_RH = self._draft.head_input(feedback_RH, ops) if any(self._start.borrowed) else feedback_RH  # unread
        sampling = RowSampling(rows.temperature_R, rows.seed_R, rows.foretold_R)
        return self._chosen(self._start.logits_RV, normed_RH, sampling, count)

    def of(self, normed_LH: Tensor, sampling: RowSampling, count: int) -> Children:
        """Return the best children of as many nodes of every request."""
        return self._chosen(self._draft.logits(normed_LH, self._ops), normed_LH, sampling, count)

    def _chosen(self, logits_LV: Tensor, normed_LH: Tensor, sampling: RowSampling, count: int) -> Children:
        draft, num_requests = self._draft, len(self._rows.lengths_R)
        if any(self._start.borrowed):
            scores_LK, tokens_LK = self._with_borrowed(logits_LV, normed_LH, sampling, count)
        else:
            scores_LK, tokens_LK = draft.ranks.top_k(logits_LV, draft.token_ids_V, sampling, self._ops, count)
        return Children(scores_LK.view(num_requests, -1, count), tokens_LK.view(num_requests, -1, count))

    def _with_borrowed(
        self, logits_LV: Tensor, normed_LH: Tensor, sampling: RowSampling, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens of the best among the draft's own and those each request has borrowed."""
        ops, own_V, lent = self._ops, self._draft.token_ids_V, self._start.borrowed
        most = max(borrowed.count for borrowed in lent if borrowed is not None)
        width = len(logits_LV) // len(lent)
        values_LB = torch.full((len(logits_LV), most), -torch.inf)
        tokens_LB = torch.zeros((len(logits_LV), most), dtype=torch.int64)
        for request, borrowed in enumerate(lent):
            if borrowed is not None:
                rows, columns = slice(request * width, (request + 1) * width), slice(borrowed.count)
                logits = ops.linear(normed_LH[rows].float(), borrowed.rows_BD[columns]) + borrowed.bonus
                noise = RowSampling(sampling.temperature_L[rows], sampling.seed_L[rows], sampling.position_L[rows])
                values_LB[rows, columns] = ops.perturb(logits, borrowed.tokens_B[columns], noise)
                tokens_LB[rows, columns] = borrowed.tokens_B[columns]
        values = torch.cat([ops.perturb(logits_LV, own_V, sampling), values_LB], dim=-1)
        tokens = torch.cat([own_V.expand(len(logits_LV), -1), tokens_LB], dim=-1)
        best = torch.log_softmax(values, dim=-1).topk(count, dim=-1)
        return best.values, tokens.gather(1, best.indices)
