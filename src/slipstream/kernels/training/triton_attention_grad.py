"""The gradients of the draft's attention over packed rows, as Triton kernels; `triton_attention` calls them.

Scores are worked out anew from queries and keys, and weights from them and each query's logsumexp (in powers of two).
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.training.seen import Seen
from slipstream.kernels.triton.launch import show_copies

BLOCK = 64
OWN_BLOCK = 32
LOG2_E = 1.4426950408889634
Pair = tuple[Tensor, Tensor]


@triton.jit(do_not_specialize=["num_own"])
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, out_ptr, grad_ptr, lse_ptr, first_ptr, grad_q_ptr, drop_ptr,
    scale, log2_scale, T, num_own, own_step, q_row, q_slot, k_row, k_slot, v_row, v_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FENCE: tl.constexpr,
):  # fmt: skip
    """Work out the gradient of a block of one head's queries, and leave each one's sum of output times gradient."""
    block = tl.program_id(0)
    row = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    group = head // (H // G)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    real = slot < T
    at = tl.arange(0, D)
    first = tl.load(first_ptr + row * T + slot, mask=real, other=T)
    q = tl.load(q_ptr + row * q_row + slot[:, None] * q_slot + head * D + at[None, :], mask=real[:, None], other=0.0)
    out_at = ((row * T + slot) * H + head)[:, None] * D + at[None, :]
    grad = tl.load(grad_ptr + out_at, mask=real[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=real[:, None], other=0.0)
    drop = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + (row * H + head) * T + slot, mask=real, other=0.0)
    acc = tl.zeros([BLOCK, D], tl.float32)
    lowest = tl.min(first, 0) // BLOCK * BLOCK
    for start in range(lowest, tl.minimum(block * BLOCK + BLOCK, T), BLOCK):
        other = start + tl.arange(0, BLOCK)
        exists = (other < T)[:, None]
        k = tl.load(k_ptr + row * k_row + other[:, None] * k_slot + group * D + at[None, :], mask=exists, other=0.0)
        v = tl.load(v_ptr + row * v_row + other[:, None] * v_slot + group * D + at[None, :], mask=exists, other=0.0)
        show_copies(FENCE)
        scores = tl.dot(q, tl.trans(k)) * log2_scale
        sees = (other[None, :] >= first[:, None]) & (other[None, :] <= slot[:, None])
        weight = tl.where(sees, tl.exp2(scores - lse[:, None]), 0.0)
        show_copies(FENCE)
        grad_score = weight * (tl.dot(grad, tl.trans(v)) - drop[:, None])
        show_copies(FENCE)
        acc = tl.dot(grad_score.to(k.dtype), k, acc)
    own_at = ((row * T + slot) * G + group)[:, None] * D + at[None, :]
    for step in range(num_own):
        k = tl.load(own_k_ptr + (step + tl.zeros([], tl.int64)) * own_step + own_at, mask=real[:, None], other=0.0).to(
            tl.float32
        )
        v = tl.load(own_v_ptr + (step + tl.zeros([], tl.int64)) * own_step + own_at, mask=real[:, None], other=0.0).to(
            tl.float32
        )
        weight = tl.exp2(tl.sum(q.to(tl.float32) * k, 1) * log2_scale - lse)
        grad_score = weight * (tl.sum(grad.to(tl.float32) * v, 1) - drop)
        acc += grad_score[:, None] * k
    tl.store(grad_q_ptr + out_at, (acc * scale).to(grad_q_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(drop_ptr + (row * H + head) * T + slot, drop, mask=real)


@triton.jit
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, drop_ptr, first_ptr, end_ptr, grad_k_ptr, grad_v_ptr,
    scale, log2_scale, T, q_row, q_slot, k_row, k_slot, v_row, v_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FENCE: tl.constexpr,
):  # fmt: skip
    """Work out the gradients of a block of one group's keys and values, over all queries that see them."""
    block = tl.program_id(0)
    row = (tl.program_id(1) // G).to(tl.int64)
    group = tl.program_id(1) % G
    slot = block * BLOCK + tl.arange(0, BLOCK)
    real = slot < T
    at = tl.arange(0, D)
    k = tl.load(k_ptr + row * k_row + slot[:, None] * k_slot + group * D + at[None, :], mask=real[:, None], other=0.0)
    v = tl.load(v_ptr + row * v_row + slot[:, None] * v_slot + group * D + at[None, :], mask=real[:, None], other=0.0)
    end = tl.max(tl.load(end_ptr + row * T + slot, mask=real, other=0), 0)
    acc_k = tl.zeros([BLOCK, D], tl.float32)
    acc_v = tl.zeros([BLOCK, D], tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        for start in range(block * BLOCK, end, BLOCK):
            other = start + tl.arange(0, BLOCK)
            exists = other < T
            q = tl.load(
                q_ptr + row * q_row + other[:, None] * q_slot + head * D + at[None, :], mask=exists[:, None], other=0.0
            )
            grad = tl.load(
                grad_ptr + ((row * T + other) * H + head)[:, None] * D + at[None, :], mask=exists[:, None], other=0.0
            )
            lse = tl.load(lse_ptr + (row * H + head) * T + other, mask=exists, other=0.0)
            drop = tl.load(drop_ptr + (row * H + head) * T + other, mask=exists, other=0.0)
            first = tl.load(first_ptr + row * T + other, mask=exists, other=T)
            sees = (slot[:, None] >= first[None, :]) & (slot[:, None] <= other[None, :])
            show_copies(FENCE)
            scores = tl.dot(k, tl.trans(q)) * log2_scale
            weight = tl.where(sees, tl.exp2(scores - lse[None, :]), 0.0)
            show_copies(FENCE)
            acc_v = tl.dot(weight.to(grad.dtype), grad, acc_v)
            show_copies(FENCE)
            grad_score = weight * (tl.dot(v, tl.trans(grad)) - drop[None, :])
            show_copies(FENCE)
            acc_k = tl.dot(grad_score.to(q.dtype), q, acc_k)
    out_at = ((row * T + slot) * G + group)[:, None] * D + at[None, :]
    tl.store(grad_k_ptr + out_at, (acc_k * scale).to(grad_k_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(grad_v_ptr + out_at, acc_v.to(grad_v_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _own_kernel(
    q_ptr, own_k_ptr, own_v_ptr, grad_ptr, lse_ptr, drop_ptr, grad_k_ptr, grad_v_ptr,
    scale, log2_scale, T, own_step, q_row, q_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Work out the gradients of a block of slots' own keys and values of one step and group."""
    row = (tl.program_id(1) // G).to(tl.int64)
    group = tl.program_id(1) % G
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = slot < T
    at = tl.arange(0, D)
    own_at = tl.program_id(2).to(tl.int64) * own_step + ((row * T + slot) * G + group)[:, None] * D + at[None, :]
    k = tl.load(own_k_ptr + own_at, mask=real[:, None], other=0.0).to(tl.float32)
    v = tl.load(own_v_ptr + own_at, mask=real[:, None], other=0.0).to(tl.float32)
    acc_k = tl.zeros([BLOCK, D], tl.float32)
    acc_v = tl.zeros([BLOCK, D], tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        q_at = row * q_row + slot[:, None] * q_slot + head * D + at[None, :]
        q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0).to(tl.float32)
        out_at = ((row * T + slot) * H + head)[:, None] * D + at[None, :]
        grad = tl.load(grad_ptr + out_at, mask=real[:, None], other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + (row * H + head) * T + slot, mask=real, other=0.0)
        drop = tl.load(drop_ptr + (row * H + head) * T + slot, mask=real, other=0.0)
        weight = tl.exp2(tl.sum(q * k, 1) * log2_scale - lse)
        grad_score = weight * (tl.sum(grad * v, 1) - drop)
        acc_v += weight[:, None] * grad
        acc_k += grad_score[:, None] * q
    tl.store(grad_k_ptr + own_at, (acc_k * scale).to(grad_k_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(grad_v_ptr + own_at, acc_v.to(grad_v_ptr.dtype.element_ty), mask=real[:, None])


def fences(x: Tensor) -> bool:
    """Tell whether copies are to be fenced before products read them: on NVIDIA's GPUs (see `show_copies`)."""
    return x.is_cuda and torch.version.hip is None


def warps(width: int) -> int:
    """Return how many warps a block of queries of this width takes."""
    return 4 if width <= 64 else 8


def grad_by_queries(
    qkv: tuple[Tensor, Tensor, Tensor], own: Pair | None, out_grad: Pair, lse: Tensor, first_BT: Tensor, scale: float
) -> Pair:
    """Return the gradient of the queries [B, T, H, d], and each query's output times gradient, summed, [B, H, T]."""
    q, k, v = qkv
    num_rows, length, num_heads, width = q.shape
    own_k, own_v = own or (k, v)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    drop = torch.empty_like(lse)
    _queries_kernel[(triton.cdiv(length, BLOCK), num_rows * num_heads)](
        q, k, v, own_k, own_v, *out_grad, lse, first_BT, grad_q, drop, scale, scale * LOG2_E, length,
        0 if own is None else own_k.shape[0], own_k.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        H=num_heads, G=k.shape[2], D=width, BLOCK=BLOCK, FENCE=fences(q),
        num_warps=warps(width), num_stages=2,
    )  # fmt: skip
    return grad_q, drop


def grad_by_keys(qkv: tuple[Tensor, Tensor, Tensor], grad: Tensor, lse_drop: Pair, seen: Seen, scale: float) -> Pair:
    """Return the gradients of the first step's keys and values, [B, T, G, d]."""
    q, k, v = qkv
    num_rows, length, num_heads, width = q.shape
    num_groups = k.shape[2]
    grad_k, grad_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    _keys_kernel[(triton.cdiv(length, BLOCK), num_rows * num_groups)](
        q, k, v, grad, *lse_drop, seen.first_BT, seen.end_BT, grad_k, grad_v, scale, scale * LOG2_E, length,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        H=num_heads, G=num_groups, D=width, BLOCK=BLOCK, FENCE=fences(q), num_warps=warps(width), num_stages=2,
    )  # fmt: skip
    return grad_k, grad_v


def grad_by_own(q: Tensor, own: Pair, grad: Tensor, lse_drop: Pair, scale: float) -> Pair:
    """Return the gradients of the later steps' keys and values, [J, B, T, G, d]."""
    own_k, own_v = own
    num_steps, num_rows, length, num_groups, width = own_k.shape
    grad_k, grad_v = torch.empty_like(own_k), torch.empty_like(own_v)
    _own_kernel[(triton.cdiv(length, OWN_BLOCK), num_rows * num_groups, num_steps)](
        q, own_k, own_v, grad, *lse_drop, grad_k, grad_v, scale, scale * LOG2_E, length, own_k.stride(0),
        q.stride(0), q.stride(1), H=q.shape[2], G=num_groups, D=width, BLOCK=OWN_BLOCK, num_warps=4,
    )  # fmt: skip
    return grad_k, grad_v
