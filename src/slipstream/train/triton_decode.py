"""Triton forms of the two operations that dominate generation: attention over the static cache, and sampling.

Specified by `static_cache.decode_attention` and `sampling.sample`; imported only where a GPU was chosen.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import KvLayer

_KEYS_PER_STEP = 64
_VOCAB_PER_STEP = 4096


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    out_ptr,
    scale,
    window,
    S,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    lane = tl.arange(0, 16)
    column = tl.arange(0, D)
    head = group * R + lane
    q_at = (row * G * R + head)[:, None] * D + column[None, :]
    is_head = (lane < R)[:, None]
    q = tl.load(q_ptr + q_at, mask=is_head, other=0.0)
    base = (row * G + group) * S * D
    best = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    first = tl.maximum(length - window, 0)
    for start in range((first // BLOCK) * BLOCK, length, BLOCK):
        index = start + tl.arange(0, BLOCK)
        seen = (index < length) & (index >= first)
        at = base + index[:, None] * D + column[None, :]
        k = tl.load(k_ptr + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - new_best)
        weight = tl.exp(scores - new_best[:, None])
        v = tl.load(v_ptr + at, mask=seen[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = new_best
    tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_head)


def decode_attention(q_BHd: Tensor, layer: KvLayer, lengths_B: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend one query per row to the first `lengths_B` keys of its row; reads no key beyond them."""
    num_rows, num_heads, width = q_BHd.shape
    num_groups, cache_length = layer.keys_SGd.shape[1:3]
    repeats = num_heads // num_groups
    assert repeats <= 16 and width & (width - 1) == 0, "the kernel holds up to 16 query heads of a power-of-two width"
    q_BHd = q_BHd.contiguous()
    out_BHd = torch.empty_like(q_BHd)
    _attention_kernel[(num_rows, num_groups)](
        q_BHd, layer.keys_SGd, layer.values_SGd, lengths_B, out_BHd, scale,
        cache_length if window is None else window, cache_length,
        G=num_groups, R=repeats, D=width, BLOCK=_KEYS_PER_STEP,
    )  # fmt: skip
    return out_BHd


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    uniform_ptr,
    out_ptr,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    warm = temperature > 0
    inverse = 1.0 / tl.where(warm, temperature, 1.0)
    base = logits_ptr + row * V
    best = tl.full([], float("-inf"), tl.float32)
    best_at = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
        block_best = tl.max(x, 0)
        block_at = tl.min(tl.where(x == block_best, index, V), 0)
        best_at = tl.where(block_best > best, block_at, best_at)
        best = tl.maximum(best, block_best)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
        total += tl.sum(tl.exp(x - best), 0)
    u0 = tl.load(uniform_ptr + row * 3) * total
    u1 = tl.load(uniform_ptr + row * 3 + 1) * total
    u2 = tl.load(uniform_ptr + row * 3 + 2) * total
    before = tl.full([], 0.0, tl.float32)
    at0 = tl.full([], 0, tl.int32)
    at1 = tl.full([], 0, tl.int32)
    at2 = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
        weight = tl.exp(x - best)
        reached = before + tl.cumsum(weight, 0)
        real = index < V
        at0 += tl.sum((real & (reached <= u0)).to(tl.int32), 0)
        at1 += tl.sum((real & (reached <= u1)).to(tl.int32), 0)
        at2 += tl.sum((real & (reached <= u2)).to(tl.int32), 0)
        before += tl.sum(weight, 0)
    at0 = tl.minimum(at0, V - 1)
    at1 = tl.minimum(at1, V - 1)
    at2 = tl.minimum(at2, V - 1)
    x0 = tl.load(base + at0).to(tl.float32) * inverse
    x1 = tl.load(base + at1).to(tl.float32) * inverse
    x2 = tl.load(base + at2).to(tl.float32) * inverse
    above0 = tl.full([], 0.0, tl.float32)
    above1 = tl.full([], 0.0, tl.float32)
    above2 = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
        weight = tl.exp(x - best)
        above0 += tl.sum(tl.where(x > x0, weight, 0.0), 0)
        above1 += tl.sum(tl.where(x > x1, weight, 0.0), 0)
        above2 += tl.sum(tl.where(x > x2, weight, 0.0), 0)
    limit = tl.load(top_p_ptr + row) * total
    token = tl.where(above2 < limit, at2, best_at)
    token = tl.where(above1 < limit, at1, token)
    token = tl.where(above0 < limit, at0, token)
    tl.store(out_ptr + row, tl.where(warm, token, best_at).to(tl.int64))


def sample(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B3: Tensor) -> Tensor:
    """Return a token per row; temperature 0 is the most likely one. `uniform_B3` is noise in [0, 1)."""
    num_rows, vocab_size = logits_BV.shape
    out_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    _sample_kernel[(num_rows,)](
        logits_BV.contiguous(),
        temperature_B,
        top_p_B,
        uniform_B3,
        out_B,
        vocab_size,
        BLOCK=_VOCAB_PER_STEP,
        num_warps=8,
    )
    return out_B
