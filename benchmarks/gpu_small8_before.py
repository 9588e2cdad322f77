"""Two kernels as they were, for `gpu_small8.py` to time beside what they became."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# ruff: noqa: ANN001, ANN201, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import wait_for_inputs, wait_then_let_start
from slipstream.kernels.triton.norm_rope import added_stretches, pair_sums, scaled_sums
from slipstream.kernels.triton.quantize import encode, row_scale


@triton.jit
def add_kernel(
    parts_ptr, residual_ptr, weight_ptr, hidden_ptr, normed_ptr, x_scale_ptr, w_scale_ptr, scale_ptr, width,
    part_stride, residual_stride, eps,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Finish a row of hidden states, and normalise it; with CODES what is normalised is stored as codes and a scale."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    dtype = hidden_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * residual_stride + at, mask=real, other=0.0).to(tl.float32)
    total = added_stretches(parts_ptr + row * width + at, part_stride, real, SPLITS)
    total = scaled_sums(total, x_scale_ptr, w_scale_ptr, row, at, real)
    hidden = (total.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(hidden_ptr + row * width + at, hidden, mask=real)
    if NORM:
        x = hidden.to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(tl.float32)
        squares = pair_sums(tl.reshape(x * x, (1, BLOCK)), LEVELS)
        rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (1,)), 0) / width + eps)
        # Rounded where torch rounds: after the norm, and after the weight.
        normed = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
        if CODES == "none":
            tl.store(normed_ptr + row * width + at, normed, mask=real)
        else:
            numbers = normed.to(tl.float32)
            scale = row_scale(tl.max(tl.abs(numbers), 0), CODES)
            tl.store(scale_ptr + row, scale)
            codes = encode(numbers, tl.broadcast_to(scale, [BLOCK]), CODES)
            tl.store(normed_ptr + row * width + at, codes, mask=real)


@triton.jit
def rope_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    x_scale_ptr, w_scale_ptr, qkv_stride, part_stride, slot_stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take TAKEN heads of one token: rotate queries, or rotate keys and write them, or write values.

    With SPLITS heads are float32 sums of so many stretches, `part_stride` apart, and are added and rounded first; sums
    of codes have scales.
    """
    wait_then_let_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TAKEN
    head = (first + tl.arange(0, TAKEN))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    real = (at < WIDTH) & (head >= 0)
    source = qkv_ptr + token * qkv_stride + head * WIDTH
    dtype = q_ptr.dtype.element_ty
    x = added_stretches(source + at, part_stride, real, SPLITS)
    x = scaled_sums(x, x_scale_ptr, w_scale_ptr, token, head * WIDTH + at, real).to(dtype)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if first >= HEADS + GROUPS:
        target = values_ptr + slot * slot_stride + (head - HEADS - GROUPS) * WIDTH + at
        tl.store(target, x.to(values_ptr.dtype.element_ty), mask=real)
    else:
        mate = tl.where(at < HALF, at + HALF, at - HALF)
        turned = at < 2 * HALF
        partner = added_stretches(source + mate, part_stride, turned & real, SPLITS)
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
            tl.store(target, rotated.to(dtype).to(keys_ptr.dtype.element_ty), mask=real)
