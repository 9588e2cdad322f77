"""Rotary positions, and the write of keys and values to the cache, between the QKV product and attention."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.triton.gemm.split_k_reduce import PartialSums, scaled_sums, sum_partials
from slipstream.kernels.triton.launch import (
    launch_options,
    let_next_start,
    wait_for_inputs,
    wait_for_previous,
    wait_then_let_start,
)
from slipstream.kernels.triton.norm import Norm


@triton.jit
def _kv_scale_codes(most):
    """Return E8M0 scales of heads from their amax (`reference.kv_fp8`): the least with which no code is above 448."""
    bits = most.to(tl.int32, bitcast=True)
    codes = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(codes, 1), 246)


@triton.jit
def _encode_kv(x, codes, CODES: tl.constexpr):
    """Return keys or values divided by their scale, as FP8."""
    inverse = ((254 - codes) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -448.0), 448.0).to(CODES)


@triton.jit
def _turn_halves(
    row_ptr, q_ptr, keys_ptr, values_ptr, scales, slots_ptr, positions_ptr, cos_ptr, sin_ptr, x_scale_ptr,
    w_scale_ptr, token, first, head, part_stride, slot_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, WAITED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `_rope_kernel` does, for heads that turn whole: each number is read once, all loads in flight at once.

    Where it is WAITED, a token's slot and its angles are loaded before the wait, past the nearest cache, which may
    hold old lines then.
    """
    at = tl.arange(0, HALF)[None, :]
    real = (at < HALF) & (head >= 0)
    if WAITED:
        let_next_start(PDL)
    slot = tl.load(slots_ptr + token, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions_ptr + token, cache_modifier=".cg").to(tl.int64)
    cos, sin = tl.load(cos_ptr + position * HALF + at), tl.load(sin_ptr + position * HALF + at)
    if WAITED:
        wait_for_previous(PDL)
    source = head * (2 * HALF) + at
    x = sum_partials(row_ptr + source, part_stride, real, SPLITS)
    y = sum_partials(row_ptr + source + HALF, part_stride, real, SPLITS)
    dtype = q_ptr.dtype.element_ty
    x = scaled_sums(x, x_scale_ptr, w_scale_ptr, token, source, real).to(dtype)
    y = scaled_sums(y, x_scale_ptr, w_scale_ptr, token, source + HALF, real).to(dtype)
    if first < HEADS + GROUPS:
        one, other = x.to(tl.float32), y.to(tl.float32)
        x = (one * cos - other * sin).to(dtype)
        y = (other * cos + one * sin).to(dtype)
    if first < HEADS:
        target = q_ptr + token * (HEADS * 2 * HALF) + source
        tl.store(target, x)
        tl.store(target + HALF, y)
    else:
        kept = keys_ptr + slot * slot_stride + source - HEADS * 2 * HALF
        if first >= HEADS + GROUPS:
            kept = values_ptr + slot * slot_stride + source - (HEADS + GROUPS) * 2 * HALF
        if scales[0] is not None:
            codes = _kv_scale_codes(tl.max(tl.maximum(tl.abs(x.to(tl.float32)), tl.abs(y.to(tl.float32))), 1))[:, None]
            _store_scales(scales, codes, slot, first, head, HEADS, GROUPS)
            tl.store(kept, _encode_kv(x, codes, keys_ptr.dtype.element_ty))
            tl.store(kept + HALF, _encode_kv(y, codes, keys_ptr.dtype.element_ty))
        else:
            tl.store(kept, x.to(keys_ptr.dtype.element_ty))
            tl.store(kept + HALF, y.to(keys_ptr.dtype.element_ty))


@triton.jit
def _store_scales(scales, codes, slot, first, head, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Write the scales of some heads' keys, or of their values.

    Args:
        scales: where those of keys and of values are, and how far apart slots' and heads' are.
    """
    target = scales[0] + slot * scales[2] + (head - HEADS) * scales[3]
    if first >= HEADS + GROUPS:
        target = scales[1] + slot * scales[2] + (head - (HEADS + GROUPS)) * scales[3]
    tl.store(target, codes.to(tl.uint8))


@triton.jit(do_not_specialize=["scale_stride"])
def _rope_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, k_scales_ptr, v_scales_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    q_norm_ptr, k_norm_ptr, x_scale_ptr, w_scale_ptr, qkv_stride, part_stride, slot_stride, scale_step, scale_stride,
    eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, QK_NORM: tl.constexpr, WAITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take TAKEN heads of one token: rotate queries, or rotate keys and write them, or write values.

    With SPLITS heads are float32 sums of so many splits, `part_stride` apart, and are added and rounded first; sums
    of codes have scales. Attention follows, which reads early what was written before the product of these heads: it is
    there once that product is done, and where it is WAITED as soon as the programs here run (see `PartialSums`).
    """
    HALVES: tl.constexpr = WIDTH == 2 * HALF and BLOCK == WIDTH and not QK_NORM
    if not WAITED:
        wait_then_let_start(PDL)
    elif not HALVES:
        wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TAKEN
    head = (first + tl.arange(0, TAKEN))[:, None]
    scales = (k_scales_ptr, v_scales_ptr, scale_step, scale_stride)
    if HALVES:
        _turn_halves(
            qkv_ptr + token * qkv_stride, q_ptr, keys_ptr, values_ptr, scales, slots_ptr, positions_ptr, cos_ptr,
            sin_ptr, x_scale_ptr, w_scale_ptr, token, first, head, part_stride, slot_stride,
            HEADS, GROUPS, HALF, SPLITS, WAITED, PDL,
        )  # fmt: skip
        return
    at = tl.arange(0, BLOCK)[None, :]
    real = (at < WIDTH) & (head >= 0)
    source = qkv_ptr + token * qkv_stride + head * WIDTH
    dtype = q_ptr.dtype.element_ty
    x = sum_partials(source + at, part_stride, real, SPLITS)
    x = scaled_sums(x, x_scale_ptr, w_scale_ptr, token, head * WIDTH + at, real).to(dtype)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if first >= HEADS + GROUPS:
        target = values_ptr + slot * slot_stride + (head - HEADS - GROUPS) * WIDTH + at
        _store_heads(target, x, real, scales, slot, first, head, values_ptr.dtype.element_ty, HEADS, GROUPS)
    else:
        mate = tl.where(at < HALF, at + HALF, at - HALF)
        turned = at < 2 * HALF
        partner = sum_partials(source + mate, part_stride, turned & real, SPLITS)
        partner = scaled_sums(
            partner, x_scale_ptr, w_scale_ptr, token, head * WIDTH + mate, turned & real
        ).to(dtype)  # fmt: skip
        if QK_NORM:
            x_f32 = x.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x_f32 * x_f32, 1) / WIDTH + eps)[:, None]
            norm_at = q_norm_ptr if first < HEADS else k_norm_ptr
            own = tl.load(norm_at + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            other = tl.load(norm_at + mate, mask=turned, other=0.0).to(tl.float32)
            x = ((x_f32 * rstd).to(dtype).to(tl.float32) * own).to(dtype)
            partner = ((partner.to(tl.float32) * rstd).to(dtype).to(tl.float32) * other).to(dtype)
        position = tl.load(positions_ptr + token).to(tl.int64)
        angle = position * HALF + at % HALF
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
        sign = tl.where(at < HALF, -1.0, 1.0)
        rotated = x.to(tl.float32) * cos + sign * partner.to(tl.float32) * sin
        if first < HEADS:
            tl.store(q_ptr + (token * HEADS + head) * WIDTH + at, rotated.to(dtype), mask=real)
        else:
            target = keys_ptr + slot * slot_stride + (head - HEADS) * WIDTH + at
            _store_heads(
                target, rotated.to(dtype), real, scales, slot, first, head, keys_ptr.dtype.element_ty, HEADS, GROUPS
            )  # fmt: skip


@triton.jit
def _store_heads(
    target, x, real, scales, slot, first, head,
    KEPT: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write some heads' keys or values in the type they are kept in."""
    if scales[0] is not None:
        codes = _kv_scale_codes(tl.max(tl.where(real, tl.abs(x.to(tl.float32)), 0.0), 1))[:, None]
        _store_scales(scales, codes, slot, first, head, HEADS, GROUPS)
        tl.store(target, _encode_kv(x, codes, KEPT), mask=real)
    else:
        tl.store(target, x.to(KEPT), mask=real)


@dataclass(frozen=True)
class Rope:
    """Where tokens are: their slots and positions, and the table of rotary angles [P, r]."""

    slots_T: Tensor
    positions_T: Tensor
    cos_Pr: Tensor
    sin_Pr: Tensor

    def __post_init__(self) -> None:
        """Refuse numbers that do not lie side by side: kernels would take others for them, and write anywhere."""
        for name in self.__dataclass_fields__:
            assert getattr(self, name).is_contiguous(), f"{name} is not contiguous"


@dataclass(frozen=True)
class RopeWrite:
    """What becomes of queries, keys and values: the `heads` of queries and of keys in a row, and where they go."""

    heads: tuple[int, int]
    rope: Rope
    layer: KvLayer


def rope_and_write(
    qkv: Tensor | PartialSums, write: RopeWrite, qk_norm: tuple[Norm, Norm] | None, dtype: torch.dtype, dependent: bool
) -> Tensor:
    """Return rotated queries [T, H, d], having written rotated keys, and values, into their slots.

    Args:
        qkv: numbers [T, C], or what is still to be added up to them.
        qk_norm: norms of each head's query and key before they are rotated.
        dtype: the numbers' type, to which sums are rounded.
    """
    (num_heads, num_groups), rope, layer = write.heads, write.rope, write.layer
    width = layer.keys_SGd.shape[2]
    assert layer.keys_SGd.stride() == layer.values_SGd.stride() and layer.keys_SGd.stride(1) == width
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    waited = isinstance(qkv, PartialSums) and qkv.waited
    if isinstance(qkv, PartialSums):
        scales, qkv = qkv.scales or scales, qkv.parts_STN
    num_tokens, splits = qkv.shape[-2], len(qkv) if qkv.dim() == 3 else 1
    q = torch.empty(num_tokens, num_heads, width, dtype=dtype, device=qkv.device)
    norms = qk_norm or (Norm(q, 0.0), Norm(q, 0.0))
    taken = _heads_taken(num_heads, num_groups)
    _rope_kernel[(num_tokens, (num_heads + 2 * num_groups) // taken)](
        qkv, q, layer.keys_SGd, layer.values_SGd, *(layer.scales or (None, None)), rope.slots_T, rope.positions_T,
        rope.cos_Pr, rope.sin_Pr, norms[0].weight_D, norms[1].weight_D, *scales, qkv.stride(-2), qkv.stride(0),
        layer.keys_SGd.stride(0), *layer.scale_strides, norms[0].eps,
        HEADS=num_heads, GROUPS=num_groups, TAKEN=taken, WIDTH=width, HALF=rope.cos_Pr.shape[1],
        BLOCK=triton.next_power_of_2(width), SPLITS=splits, QK_NORM=qk_norm is not None, WAITED=waited,
        PDL=dependent, num_warps=1 if taken < 4 else 4, **launch_options(dependent),
    )  # fmt: skip
    return q


def _heads_taken(num_heads: int, num_groups: int) -> int:
    """Return how many heads a program takes: a power of two that divides those of queries and those of keys."""
    return math.gcd(num_heads, num_groups, 8)
