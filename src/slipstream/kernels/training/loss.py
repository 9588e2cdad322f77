"""Soft cross-entropy of the draft against the target, with the head's product and its gradient in bounded memory.

Shape letters: N rows (valid slots), D width, V draft vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


def product_f32(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x @ weight.T in float32; half-precision inputs keep the product's own float32 sums. Not differentiable."""
    if x_ND.is_cuda and x_ND.dtype in (torch.bfloat16, torch.float16):
        product: Tensor = torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)
        return product
    with _factors_in_bfloat16(x_ND.dtype == weight_VD.dtype == torch.bfloat16):
        return x_ND.float() @ weight_VD.float().t()


@contextmanager
def _factors_in_bfloat16(allowed: bool) -> Iterator[None]:
    """Let a CPU that has instructions for it multiply float32 as bfloat16: of numbers that are, every product is exact.

    torch has no product of bfloat16 with float32 results on a CPU; this one takes half the time of float32's.
    """
    onednn: Any = torch.backends.mkldnn  # torch makes its settings where types do not see them
    before = onednn.matmul.fp32_precision
    if allowed:
        onednn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        onednn.matmul.fp32_precision = before


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
        overlap: None teaches by cross-entropy alone. A number n mixes in 1 - a, a the overlap of label and draft (the
            chance that sampling keeps the token): cross-entropy counts exp(-n a) and 1 - a the rest, so that a row
            is taught the label as a whole while it is far from it, and what is kept once it is near.
    """

    rows_N: Tensor
    weight_N: Tensor
    hard_share: float = 0.0
    overlap: float | None = None


@dataclass(frozen=True)
class Compared:
    """Of some rows the weighted losses, 1.0 where they agreed, and the gradient of the losses' sum by the logits."""

    loss_N: Tensor
    agreed_N: Tensor
    grad_NV: Tensor


class LossKernels(Protocol):
    """What the loss runs on, `TrainOps` for one; this module has the plain version of each."""

    def read_logits(self, full_NF: Tensor, token_ids_V: Tensor, out_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the draft's columns of whole logits; return each row's best column of all, and logsumexp of the copy."""
        ...

    def compare(self, logits_NV: Tensor, teacher: Teacher, labels: Labels, dtype: torch.dtype) -> Compared:
        """Compare rows of the draft's logits with what they are taught; `logits_NV` may be overwritten."""
        ...


def soft_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, teacher: Teacher, labels: Labels, kernels: LossKernels
) -> StepLoss:
    """Return the weighted sum over rows of -p log q, p the label (and 1 - overlap); rows outside count nothing."""
    apply: Any = _SoftCrossEntropy.apply  # torch leaves it untyped
    loss, agreed_N = apply(hidden_ND, head_VD, teacher, labels, kernels)
    return StepLoss(loss, agreed_N)


def compare(logits_NV: Tensor, teacher: Teacher, labels: Labels, dtype: torch.dtype) -> Compared:
    """Compare rows of the draft's logits with what they are taught; the gradient comes in `dtype`."""
    at = labels.rows_N
    inside = teacher.inside_N[at]
    weight = inside * labels.weight_N
    log_q = torch.log_softmax(logits_NV, -1)
    p = (teacher.logits_NV[at] - teacher.log_total_N[at, None]).exp_()
    best_N1 = teacher.best_N[at].clamp(min=0)[:, None]  # a best token outside has weight 0
    if labels.hard_share > 0:
        hard = p.new_full(best_N1.shape, labels.hard_share)
        p.mul_(1 - labels.hard_share).scatter_add_(1, best_N1, hard)
    loss_N = -(p * log_q).sum(-1)
    agreed_N = (log_q.argmax(-1) == best_N1[:, 0]) * inside
    q = log_q.exp_()
    if labels.overlap is None:
        grad_NV = q.sub_(p)
    else:
        below = q * (q < p)  # where raising q adds to the overlap
        overlap_N = torch.minimum(p, q).sum(-1)
        share_N = torch.exp(-labels.overlap * overlap_N)
        loss_N = share_N * loss_N + (1 - share_N) * (1 - overlap_N)
        grad_overlap_NV = below.sub_(q * below.sum(-1, keepdim=True))
        grad_NV = q.sub_(p).mul_(share_N[:, None]).sub_(grad_overlap_NV.mul_(1 - share_N[:, None]))
    return Compared(loss_N * weight, agreed_N, grad_NV.mul_(weight[:, None]).to(dtype))


def read_logits(full_NF: Tensor, token_ids_V: Tensor, out_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the draft's columns of whole logits; return each row's best column of all, and logsumexp of the copy."""
    torch.index_select(full_NF, 1, token_ids_V, out=out_NV)
    return full_NF.argmax(-1), out_NV.logsumexp(-1)


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward works out the gradient too, a chunk of rows at a time, so no [N, V] tensor outlives its chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, teacher: Teacher, labels: Labels, kernels: LossKernels
    ) -> tuple[Tensor, Tensor]:  # ctx is torch's own
        head = head_VD.to(hidden_ND.dtype)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=torch.float32) if needs_head else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        agreed_N = torch.zeros_like(labels.weight_N)
        for start in range(0, hidden_ND.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            hidden = hidden_ND[rows]
            some = replace(labels, rows_N=labels.rows_N[rows], weight_N=labels.weight_N[rows])
            compared = kernels.compare(product_f32(hidden, head), teacher, some, hidden.dtype)
            loss += compared.loss_N.sum()
            agreed_N[rows] = compared.agreed_N
            if grad_hidden is not None:
                grad_hidden[rows] = compared.grad_NV @ head
            if grad_head is not None:
                grad_head += product_f32(compared.grad_NV.t(), hidden.t())
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
            None,
        )


@torch.no_grad()
def make_teacher(
    last_ND: Tensor, head_full: Tensor, token_ids_V: Tensor, draft_index: Tensor, kernels: LossKernels
) -> Teacher:
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
    log_total = torch.empty(num_rows, dtype=torch.float32, device=last_ND.device)
    for start in range(0, num_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        full = product_f32(last_ND[rows], head_full)
        best[rows], log_total[rows] = kernels.read_logits(full, token_ids_V, logits[rows])
    column = draft_index[best]
    return Teacher(logits, log_total, column, (column >= 0).float())


@torch.no_grad()
def make_narrow_teacher(last_ND: Tensor, head_VD: Tensor, next_N: Tensor) -> Teacher:
    """Read the target's opinion among the draft's tokens alone.

    Args:
        head_VD: the rows of the target's head that the draft has.
        next_N: the draft's token that the text goes on with, or -1.
    """
    logits_NV = product_f32(last_ND, head_VD)
    return Teacher(logits_NV, logits_NV.logsumexp(-1), logits_NV.argmax(-1), (next_N >= 0).float())
