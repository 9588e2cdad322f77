"""The loss between its products as Triton kernels, a program a row: two looks at a row instead of some twenty-five.

Specified by `slipstream.kernels.training.loss`; imported only where a GPU was chosen.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.training.loss import Compared, Labels, Teacher

_COLUMNS_PER_STEP = 4096
_WARPS = 8


@triton.jit
def _compare_kernel(
    logits_ptr, taught_ptr, log_total_ptr, best_ptr, inside_ptr, at_ptr, weight_ptr, loss_ptr, agreed_ptr, grad_ptr,
    hard_share, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(at_ptr + row)
    inside = tl.load(inside_ptr + at)
    weight = inside * tl.load(weight_ptr + row)
    taught_best = tl.maximum(tl.load(best_ptr + at), 0)
    log_total = tl.load(log_total_ptr + at)
    logits_ptr += row * V
    taught_ptr += at * V
    grad_ptr += row * V
    best = tl.full([], float("-inf"), tl.float32)
    best_at = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < V, other=float("-inf"))
        block_best = tl.max(x, 0)
        block_at = tl.min(tl.where(x == block_best, column, V), 0)
        best_at = tl.where(block_best > best, block_at, best_at)
        new_best = tl.maximum(best, block_best)
        total = total * tl.exp(best - new_best) + tl.sum(tl.exp(x - new_best), 0)
        best = new_best
    log_sum = best + tl.log(total)
    loss = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < V
        log_q = tl.load(logits_ptr + column, mask=real, other=0.0) - log_sum
        p = tl.exp(tl.load(taught_ptr + column, mask=real, other=float("-inf")) - log_total)
        p = p * (1.0 - hard_share) + tl.where(column == taught_best, hard_share, 0.0)
        loss -= tl.sum(tl.where(real, p * log_q, 0.0), 0)
        grad = (tl.exp(log_q) - p) * weight
        tl.store(grad_ptr + column, grad.to(grad_ptr.dtype.element_ty), mask=real)
    tl.store(loss_ptr + row, loss * weight)
    tl.store(agreed_ptr + row, tl.where(best_at == taught_best, inside, 0.0))


def compare(logits_NV: Tensor, teacher: Teacher, labels: Labels, dtype: torch.dtype) -> Compared:
    """Compare rows of the draft's logits with what they are taught; the gradient comes in `dtype`."""
    num_rows, width = logits_NV.shape
    loss_N, agreed_N = (torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    grad_NV = torch.empty(num_rows, width, dtype=dtype, device=logits_NV.device)
    if num_rows:
        assert teacher.logits_NV.is_contiguous()
        _compare_kernel[(num_rows,)](
            logits_NV.contiguous(), teacher.logits_NV, teacher.log_total_N, teacher.best_N, teacher.inside_N,
            labels.rows_N.contiguous(), labels.weight_N.contiguous(), loss_N, agreed_N, grad_NV,
            float(labels.hard_share), width, BLOCK=_COLUMNS_PER_STEP, num_warps=_WARPS,
        )  # fmt: skip
    return Compared(loss_N, agreed_N, grad_NV)


@triton.jit
def _read_kernel(full_ptr, token_ids_ptr, out_ptr, best_ptr, log_total_ptr, F, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    full_ptr += row * F
    out_ptr += row * V
    best = tl.full([], float("-inf"), tl.float32)
    best_at = tl.full([], 0, tl.int32)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(full_ptr + column, mask=column < F, other=float("-inf"))
        block_best = tl.max(x, 0)
        block_at = tl.min(tl.where(x == block_best, column, F), 0)
        best_at = tl.where(block_best > best, block_at, best_at)
        best = tl.maximum(best, block_best)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < V
        token = tl.load(token_ids_ptr + column, mask=real, other=0)
        x = tl.load(full_ptr + token, mask=real, other=float("-inf"))
        tl.store(out_ptr + column, x, mask=real)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
        largest = new_largest
    tl.store(best_ptr + row, best_at.to(tl.int64))
    tl.store(log_total_ptr + row, largest + tl.log(total))


def read_logits(full_NF: Tensor, token_ids_V: Tensor, out_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the draft's columns of whole logits; return each row's best column of all, and logsumexp of the copy."""
    num_rows, full_width = full_NF.shape
    assert out_NV.is_contiguous() and full_NF.is_contiguous() and full_NF.dtype == torch.float32
    best_N = torch.empty(num_rows, dtype=torch.int64, device=full_NF.device)
    log_total_N = torch.empty(num_rows, dtype=torch.float32, device=full_NF.device)
    if num_rows:
        _read_kernel[(num_rows,)](
            full_NF, token_ids_V.contiguous(), out_NV, best_N, log_total_N, full_width, out_NV.shape[1],
            BLOCK=_COLUMNS_PER_STEP, num_warps=_WARPS,
        )  # fmt: skip
    return best_N, log_total_N
