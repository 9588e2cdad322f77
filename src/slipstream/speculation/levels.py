"""Growing level by level: runs the draft on the nodes of one level after another and names their best children.

Shape letters: R requests, W nodes of a level, T slots, L rows of logits, D draft width, V draft vocabulary, B tokens a
request has borrowed, K children.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import Borrowed, Ops, RowSampling
from slipstream.models.context import KvCache, level_context, page_table
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.drafter import DraftView
from slipstream.speculation.grow import Children


@dataclass(frozen=True)
class LevelRows:
    """The requests whose trees are grown: their pages, keys the draft has committed, temperatures and seeds."""

    pages_RP: Tensor
    lengths_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor

    @staticmethod
    def of(views: Sequence[DraftView], device: torch.device) -> "LevelRows":
        """Return requests as tensors."""
        return LevelRows(
            page_table([view.pages for view in views], device),
            torch.tensor([len(view.tokens) - 1 for view in views], device=device),
            torch.tensor([view.temperature for view in views], device=device),
            torch.tensor([view.seed for view in views], device=device),
        )


@dataclass(frozen=True)
class LevelsStart:
    """What the draft left at the requests' last slots, and what they have borrowed (nothing if nobody has)."""

    feedback_RD: Tensor
    logits_RV: Tensor
    borrowed: Sequence[Borrowed | None] = ()


class Levels:
    """Runs the draft on one level of nodes after another; a level's keys go to scratch slots behind the last slot."""

    def __init__(self, draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: LevelRows, start: LevelsStart) -> None:
        self._draft, self._kv, self._ops, self._rows = draft, kv, ops, rows
        self._feedback_RWD, self._best = start.feedback_RD[:, None], _Best(draft, ops, rows, start)
        # Attention bits of the last level's nodes, and where the first of them lies behind the committed keys; the
        # level before the first is the last committed key.
        self._bits_RW = torch.full_like(rows.lengths_R, -1)[:, None]
        self._first, self._written, self._depth = -1, 0, 0

    def root_children(self, count: int) -> Children:
        """Return the root's best children: the last slot has foretold them already."""
        return self._best.of_root(count)

    def children(self, tokens_RW: Tensor, parents_RW: Tensor, count: int) -> Children:
        """Run the draft on this level's nodes and return their best children."""
        num_requests, width = tokens_RW.shape
        self._depth += 1
        place_W = self._written + torch.arange(width, device=tokens_RW.device)
        # A node sees itself, and what its parent sees.
        self._bits_RW = 1 | self._bits_RW.gather(1, parents_RW) << (place_W - self._first - parents_RW)
        self._first, self._written = self._written, self._written + width
        hidden_RWD = self._feedback_RWD.gather(1, parents_RW[..., None].expand(-1, -1, self._feedback_RWD.shape[-1]))
        lengths_R1 = self._rows.lengths_R[:, None]
        position_RW = (lengths_R1 + self._depth - 1).expand(-1, width)
        ctx = level_context(self._ops, self._kv, self._rows.pages_RP, lengths_R1 + place_W, position_RW, self._bits_RW)
        hidden = self._draft(hidden_RWD.flatten(0, 1), tokens_RW.flatten(), ctx)
        self._feedback_RWD = hidden.feedback_TD.view(num_requests, width, -1)
        return self._best.of(hidden.normed_TD, self._depth, count)


class MaskedLevels:
    """Runs a P-EAGLE draft once, over a mask for each level, so that a level's nodes all have the same children."""

    def __init__(
        self, draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: LevelRows, start: LevelsStart, num_masks: int
    ) -> None:
        self._best, self._depth = _Best(draft, ops, rows, start), 0
        if num_masks:
            num_requests = len(rows.lengths_R)
            index_RM = rows.lengths_R[:, None] + torch.arange(num_masks, device=rows.lengths_R.device)
            ctx = level_context(ops, kv, rows.pages_RP, index_RM, index_RM, torch.full_like(index_RM, -1))
            normed_TD = draft.run_masks(num_requests, num_masks, ctx).normed_TD
            self._normed_MRD = normed_TD.view(num_requests, num_masks, -1).transpose(0, 1).contiguous()

    def root_children(self, count: int) -> Children:
        """Return the root's best children: the last slot has foretold them already."""
        return self._best.of_root(count)

    def children(self, tokens_RW: Tensor, parents_RW: Tensor, count: int) -> Children:
        """Return the best children of every node of this level: what its mask foretold."""
        self._depth += 1
        found = self._best.of(self._normed_MRD[self._depth - 1], self._depth, count)
        return Children(*(values_R1K.expand(-1, tokens_RW.shape[1], -1) for values_R1K in found))


def levels_of(
    draft: Eagle3Draft, kv: KvCache, ops: Ops, rows: LevelRows, start: LevelsStart, depth: int
) -> Levels | MaskedLevels:
    """Return what grows trees so deep with a draft of either kind."""
    if draft.mask_features_C is None:
        return Levels(draft, kv, ops, rows, start)
    return MaskedLevels(draft, kv, ops, rows, start, depth - 1)


class _Best:
    """Names the best children of nodes, by the draft's head and by what requests have borrowed.

    Scores are perturbed with the noise the target will use for the same token, so that both tend to choose alike.
    """

    def __init__(self, draft: Eagle3Draft, ops: Ops, rows: LevelRows, start: LevelsStart) -> None:
        self._draft, self._ops, self._rows, self._start = draft, ops, rows, start

    def of_root(self, count: int) -> Children:
        """Return the best children of the roots."""
        feedback_RD, ops = self._start.feedback_RD, self._ops
        normed_RD = self._draft.head_input(feedback_RD, ops) if any(self._start.borrowed) else feedback_RD  # unread
        return self._chosen(self._start.logits_RV, normed_RD, 0, count)

    def of(self, normed_LD: Tensor, depth: int, count: int) -> Children:
        """Return the best children of as many nodes of every request, so deep in its tree."""
        return self._chosen(self._draft.logits(normed_LD, self._ops), normed_LD, depth, count)

    def _chosen(self, logits_LV: Tensor, normed_LD: Tensor, depth: int, count: int) -> Children:
        """Choose; the committed text ends at `length`, the root is at that position, its children one further on."""
        rows, width = self._rows, len(logits_LV) // len(self._rows.lengths_R)

        def each(values_R: Tensor) -> Tensor:
            return values_R[:, None].expand(-1, width).flatten().contiguous()  # or one request's number is seen as many

        sampling = RowSampling(each(rows.temperature_R), each(rows.seed_R), each(rows.lengths_R + 1 + depth))
        draft = self._draft
        if any(self._start.borrowed):
            scores_LK, tokens_LK = self._with_borrowed(logits_LV, normed_LD, sampling, count)
        else:
            scores_LK, entries_LK = draft.ranks.top_k(logits_LV, draft.token_ids_V, sampling, self._ops, count)
            tokens_LK = draft.token_ids_V[entries_LK]
        return Children(scores_LK.view(-1, width, count), tokens_LK.view(-1, width, count))

    def _with_borrowed(
        self, logits_LV: Tensor, normed_LD: Tensor, sampling: RowSampling, count: int
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
                logits = ops.linear(normed_LD[rows].float(), borrowed.rows_BD[columns]) + borrowed.bonus
                noise = RowSampling(sampling.temperature_L[rows], sampling.seed_L[rows], sampling.position_L[rows])
                values_LB[rows, columns] = ops.perturb(logits, borrowed.tokens_B[columns], noise)
                tokens_LB[rows, columns] = borrowed.tokens_B[columns]
        values = torch.cat([ops.perturb(logits_LV, own_V, sampling), values_LB], dim=-1)
        tokens = torch.cat([own_V.expand(len(logits_LV), -1), tokens_LB], dim=-1)
        best = torch.log_softmax(values, dim=-1).topk(count, dim=-1)
        return best.values, tokens.gather(1, best.indices)
