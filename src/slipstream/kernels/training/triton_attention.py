"""Attention over packed rows as Triton kernels that never visit other texts, nor write scores to memory.

Specified by `attention.py` beside this; imported only where a GPU was chosen. A text's slots lie side by side, so a
block of queries reads the keys from the first slot any of them sees up to its own last one.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.training.seen import Seen
from slipstream.kernels.training.triton_attention_grad import (
    BLOCK,
    LOG2_E,
    fences,
    grad_by_keys,
    grad_by_own,
    grad_by_queries,
    warps,
)
from slipstream.kernels.triton.launch import show_copies

WIDTHS = (16, 32, 64, 128)


@triton.jit(do_not_specialize=["num_own"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, first_ptr, out_ptr, lse_ptr, scale, T, num_own, own_step,
    q_row, q_slot, k_row, k_slot, v_row, v_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FENCE: tl.constexpr,
):  # fmt: skip
    """Let a block of one head's queries attend; scores are in powers of two, as is what `lse_ptr` is given."""
    block = tl.program_id(0)
    row = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    group = head // (H // G)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    real = slot < T
    at = tl.arange(0, D)
    first = tl.load(first_ptr + row * T + slot, mask=real, other=T)
    q = tl.load(q_ptr + row * q_row + slot[:, None] * q_slot + head * D + at[None, :], mask=real[:, None], other=0.0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    lowest = tl.min(first, 0) // BLOCK * BLOCK
    for start in range(lowest, tl.minimum(block * BLOCK + BLOCK, T), BLOCK):
        other = start + tl.arange(0, BLOCK)
        exists = (other < T)[:, None]
        k = tl.load(k_ptr + row * k_row + other[:, None] * k_slot + group * D + at[None, :], mask=exists, other=0.0)
        show_copies(FENCE)
        scores = tl.dot(q, tl.trans(k)) * scale
        sees = (other[None, :] >= first[:, None]) & (other[None, :] <= slot[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(new_best == float("-inf"), 0.0, new_best)  # a slot whose text begins further on
        shrink = tl.exp2(best - level)
        weight = tl.exp2(scores - level[:, None])
        v = tl.load(v_ptr + row * v_row + other[:, None] * v_slot + group * D + at[None, :], mask=exists, other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        show_copies(FENCE)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
        best = new_best
    own_at = ((row * T + slot) * G + group)[:, None] * D + at[None, :]
    for step in range(num_own):
        k = tl.load(own_k_ptr + (step + tl.zeros([], tl.int64)) * own_step + own_at, mask=real[:, None], other=0.0)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        new_best = tl.maximum(best, score)
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best)
        v = tl.load(own_v_ptr + (step + tl.zeros([], tl.int64)) * own_step + own_at, mask=real[:, None], other=0.0)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)
        best = new_best
    out = acc / tl.where(real, total, 1.0)[:, None]
    out_at = ((row * T + slot) * H + head)[:, None] * D + at[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(lse_ptr + (row * H + head) * T + slot, best + tl.log2(tl.where(real, total, 1.0)), mask=real)


def fits(q_BTHd: Tensor, *others: Tensor) -> bool:
    """Tell whether the kernels take these queries, keys and values."""
    width = q_BTHd.shape[-1]
    return (
        width in WIDTHS
        and q_BTHd.dtype in (torch.bfloat16, torch.float16)
        and all(x.shape[-1] == width and x.dtype == q_BTHd.dtype for x in others)
    )


def attention(q_BTHd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Seen, scale: float) -> Tensor:
    """Attend to the first keys [B, T, G, d] that each slot sees, and to its own of each later step."""
    apply: Any = _Attention.apply  # torch leaves it untyped
    out: Tensor = apply(seen, scale, q_BTHd, *keys, *values)
    return out


class _Attention(torch.autograd.Function):
    """The forward pass keeps what it was given, its output and each query's logsumexp; the rest is worked out again."""

    @staticmethod
    def forward(ctx: Any, seen: Seen, scale: float, q: Tensor, *keys_values: Tensor) -> Tensor:  # torch's own ctx
        count = len(keys_values) // 2
        keys, values = keys_values[:count], keys_values[count:]
        own = None if count == 1 else (torch.stack(keys[1:]), torch.stack(values[1:]))
        q, key, value = (_by_slot(x) for x in (q, keys[0], values[0]))
        out, lse = _forward((q, key, value), own, seen, scale)
        ctx.save_for_backward(q, key, value, out, lse, *(own or ()))
        ctx.seen, ctx.scale = seen, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        q, key, value, out, lse, *own = ctx.saved_tensors
        pair = (own[0], own[1]) if own else None
        grad, scale = grads[0].contiguous(), ctx.scale
        grad_q, drop = grad_by_queries((q, key, value), pair, (out, grad), lse, ctx.seen.first_BT, scale)
        grad_key, grad_value = grad_by_keys((q, key, value), grad, (lse, drop), ctx.seen, scale)
        if pair is None:
            return None, None, grad_q, grad_key, grad_value
        own_keys, own_values = grad_by_own(q, pair, grad, (lse, drop), scale)
        return None, None, grad_q, grad_key, *own_keys.unbind(), grad_value, *own_values.unbind()


def _by_slot(x_BTHd: Tensor) -> Tensor:
    """Return the same numbers with the heads of a slot side by side, as kernels read them."""
    return x_BTHd if x_BTHd.stride()[2:] == (x_BTHd.shape[3], 1) else x_BTHd.contiguous()


def _forward(
    qkv: tuple[Tensor, Tensor, Tensor], own: tuple[Tensor, Tensor] | None, seen: Seen, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what the queries gather [B, T, H, d], and their logsumexp [B, H, T] in powers of two."""
    q, k, v = qkv
    num_rows, length, num_heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, length, dtype=torch.float32, device=q.device)
    own_k, own_v = own or (k, v)
    assert own is None or (own_k.is_contiguous() and own_v.is_contiguous())
    _forward_kernel[(triton.cdiv(length, BLOCK), num_rows * num_heads)](
        q, k, v, own_k, own_v, seen.first_BT, out, lse, scale * LOG2_E, length,
        0 if own is None else own_k.shape[0], own_k.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        H=num_heads, G=k.shape[2], D=width, BLOCK=BLOCK, FENCE=fences(q),
        num_warps=warps(width), num_stages=2,
    )  # fmt: skip
    return out, lse
