"""Soft cross-entropy of the draft against the target, with the head's product and its gradient in bounded memory.

Shape letters: N rows (valid slots), D width, V draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.train.ops import product_f32

CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Teacher:
    """The target's opinion at each supervised position, over the draft's vocabulary.

    Args:
        logits_NV: float32, the draft vocabulary's columns of the target's logits.
        log_total_N: logsumexp of those columns, so that exp(logits - log_total) is the renormalised distribution.
        best_N: the column of the largest logit.
        inside_N: 1.0 where the target's own most likely token is in the draft vocabulary, else 0.0.
    """

    logits_NV: Tensor
    log_total_N: Tensor
    best_N: Tensor
    inside_N: Tensor


@dataclass(frozen=True)
class StepLoss:
    """One unrolled step's loss (differentiable, already divided) and, for each row, 1.0 where it agreed (not)."""

    loss: Tensor
    agreed_N: Tensor


@dataclass(frozen=True)
class Labels:
    """What a step's rows are taught.

    Args:
        rows_N: each row's place in the teacher.
        weight_N: each row's weight, the loss's scale included.
        hard_share: share of the label that is the target's best token alone; the rest is its whole distribution.
    """

    rows_N: Tensor
    weight_N: Tensor
    hard_share: float = 0.0


def soft_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, teacher: Teacher, labels: Labels) -> StepLoss:
    """Return the weighted sum over rows of -p log q, p the label; rows outside count nothing."""
    apply: Any = _SoftCrossEntropy.apply  # torch leaves it untyped
    loss, agreed_N = apply(hidden_ND, head_VD, teacher, labels)
    return StepLoss(loss, agreed_N)


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward works out the gradient too, a chunk of rows at a time, so no [N, V] tensor outlives its chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, teacher: Teacher, labels: Labels
    ) -> tuple[Tensor, Tensor]:  # ctx is torch's own
        head = head_VD.to(hidden_ND.dtype)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=torch.float32) if needs_head else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        agreed_N = torch.zeros_like(labels.weight_N)
        for start in range(0, hidden_ND.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            hidden, at = hidden_ND[rows], labels.rows_N[rows]
            inside = teacher.inside_N[at]
            weight = inside * labels.weight_N[rows]
            log_q = torch.log_softmax(product_f32(hidden, head), -1)
            p = (teacher.logits_NV[at] - teacher.log_total_N[at, None]).exp_()
            best_N1 = teacher.best_N[at].clamp(min=0)[:, None]  # a best token outside has weight 0
            if labels.hard_share > 0:
                hard = p.new_full(best_N1.shape, labels.hard_share)
                p.mul_(1 - labels.hard_share).scatter_add_(1, best_N1, hard)
            loss -= ((p * log_q).sum(-1) * weight).sum()
            agreed_N[rows] = (log_q.argmax(-1) == best_N1[:, 0]) * inside
            grad_logits = log_q.exp_().sub_(p).mul_(weight[:, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ head
            if grad_head is not None:
                grad_head += product_f32(grad_logits.t(), hidden.t())
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(agreed_N)
        return loss, agreed_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        grad_hidden, grad_head = ctx.saved_tensors
        outer = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * outer.to(grad_hidden.dtype),
            None if grad_head is None else grad_head * outer,
            None,
            None,
        )


@torch.no_grad()
def make_teacher(last_ND: Tensor, head_full: Tensor, token_ids_V: Tensor, draft_index: Tensor) -> Teacher:
    """Read the target's opinion off its normed last states.

    Args:
        last_ND: the target's final states (normed) at the supervised positions.
        head_full: the target's whole head, [full vocabulary, D].
        token_ids_V: the target token of each draft token.
        draft_index: for each target token its draft token, or -1.
    """
    num_rows, num_tokens = last_ND.shape[0], token_ids_V.shape[0]
    logits = torch.empty(num_rows, num_tokens, dtype=torch.float32, device=last_ND.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=last_ND.device)
    for start in range(0, num_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        full = product_f32(last_ND[rows], head_full)
        best[rows] = full.argmax(-1)
        torch.index_select(full, 1, token_ids_V, out=logits[rows])
    column = draft_index[best]
    return Teacher(logits, logits.logsumexp(-1), column, (column >= 0).float())
