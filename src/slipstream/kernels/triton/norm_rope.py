"""What lies between products: RMSNorm, rotary positions with the write of keys and values, and SiLU times up."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import KvLayer
from slipstream.kernels.triton.launch import (
    launch_options,
    let_next_start,
    wait_for_inputs,
    wait_for_previous,
    wait_then_let_start,
)
from slipstream.kernels.triton.quantize import CODE_DTYPES, Codes, encode, row_scale
from slipstream.kernels.triton.variants import Variant

SQUARED = 64
"""How many numbers of a row share a sum of squares where a product leaves them for the norm."""
SQUARES = tl.constexpr(SQUARED)
SQUARES_LEVELS = tl.constexpr(SQUARED.bit_length() - 1)


@triton.jit
def pair_sums(x, LEVELS: tl.constexpr):
    """Add neighbours [M, n] -> [M, n / 2], so many times: one order of a sum, whatever threads hold the numbers."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return x


@triton.jit
def _norm_kernel(
    x_ptr, other_ptr, weight_ptr, other_weight_ptr, out_ptr, scale_ptr, width, x_stride, other_stride, out_stride, eps,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise a row of `x`, or in the grid's second column one of `other`, which goes behind it in the output."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < width
    source, weight_at = x_ptr + row * x_stride, weight_ptr
    if part == 1:
        source, weight_at = other_ptr + row * other_stride, other_weight_ptr
    x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + at, mask=real, other=0.0).to(tl.float32)
    squares = pair_sums(tl.reshape(x * x, (1, BLOCK)), LEVELS)
    rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (1,)), 0) / width + eps)
    dtype = x_ptr.dtype.element_ty
    # Rounded where torch rounds: after the norm, and after the weight.
    normed = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
    target = out_ptr + row * out_stride + part * width + at
    if CODES == "none":
        tl.store(target, normed, mask=real)
    else:
        numbers = normed.to(tl.float32)
        scale = row_scale(tl.max(tl.abs(numbers), 0), CODES)
        tl.store(scale_ptr + row, scale)
        tl.store(target, encode(numbers, tl.broadcast_to(scale, [BLOCK]), CODES), mask=real)


@dataclass(frozen=True)
class Norm:
    """A norm's weight and eps, as kernels need them."""

    weight_D: Tensor
    eps: float


def rms_norm(x_TD: Tensor, norm: Norm, dependent: bool) -> Tensor:
    """Return normalised rows; the last dimension of `x_TD` is contiguous."""
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch_norm((x_TD, x_TD), (norm, norm), out, out, "none", 1, dependent)
    return out


def norm_codes(x_TD: Tensor, norm: Norm, codes: Codes, dependent: bool) -> tuple[Tensor, Tensor]:
    """Return normalised rows as codes [T, D] and their scales [T]."""
    out = torch.empty(x_TD.shape, dtype=CODE_DTYPES[codes], device=x_TD.device)
    scale_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
    _launch_norm((x_TD, x_TD), (norm, norm), out, scale_T, codes, 1, dependent)
    return out, scale_T


def norm_both(first_TD: Tensor, second_TD: Tensor, norms: tuple[Norm, Norm], dependent: bool) -> Tensor:
    """Return [norm(first) ; norm(second)] in rows of twice the width; both norms share their eps."""
    out = torch.empty(first_TD.shape[0], 2 * first_TD.shape[1], dtype=first_TD.dtype, device=first_TD.device)
    _launch_norm((first_TD, second_TD), norms, out, out, "none", 2, dependent)
    return out


def _launch_norm(
    rows: tuple[Tensor, Tensor], norms: tuple[Norm, Norm], out: Tensor, scale_T: Tensor, codes: str, parts: int,
    dependent: bool,
) -> None:  # fmt: skip
    num_rows, width = rows[0].shape
    assert norms[0].eps == norms[1].eps
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows, parts)](
        *rows, norms[0].weight_D, norms[1].weight_D, out, scale_T, width, rows[0].stride(0), rows[1].stride(0),
        out.stride(0), norms[0].eps, BLOCK=block, LEVELS=block.bit_length() - 1, CODES=codes, PDL=dependent,
        num_warps=8 if width > 1024 else 4, **launch_options(dependent),
    )  # fmt: skip


@triton.jit
def added_stretches(at, stride, real, SPLITS: tl.constexpr):
    """Return numbers as they are stored, or the sums of a product's stretches, added in their order."""
    x = tl.load(at, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride, mask=real, other=0.0)
    return x


@triton.jit
def scaled_sums(sums, x_scale_ptr, w_scale_ptr, row, at, real):
    """Turn a row's sums of codes into numbers, as a product's end does; without scales they are numbers."""
    if x_scale_ptr is not None:
        sums *= tl.load(x_scale_ptr + row) * tl.load(w_scale_ptr + at, mask=real, other=0.0)
    return sums


@triton.jit
def _turn_halves(
    row_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, x_scale_ptr, w_scale_ptr,
    token, first, head, part_stride, slot_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `_rope_kernel` does, for heads that turn whole: each number is read once, and all are asked for at once.

    Where it is SETTLED, a token's place and its angles are asked for before the wait, past the nearest cache, which may
    hold old lines then.
    """
    at = tl.arange(0, HALF)[None, :]
    real = (at < HALF) & (head >= 0)
    if SETTLED:
        let_next_start(PDL)
    slot = tl.load(slots_ptr + token, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions_ptr + token, cache_modifier=".cg").to(tl.int64)
    cos, sin = tl.load(cos_ptr + position * HALF + at), tl.load(sin_ptr + position * HALF + at)
    if SETTLED:
        wait_for_previous(PDL)
    source = head * (2 * HALF) + at
    x = added_stretches(row_ptr + source, part_stride, real, SPLITS)
    y = added_stretches(row_ptr + source + HALF, part_stride, real, SPLITS)
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
        target = keys_ptr + slot * slot_stride + source - HEADS * 2 * HALF
        if first >= HEADS + GROUPS:
            target = values_ptr + slot * slot_stride + source - (HEADS + GROUPS) * 2 * HALF
        tl.store(target, x.to(keys_ptr.dtype.element_ty))
        tl.store(target + HALF, y.to(keys_ptr.dtype.element_ty))


@triton.jit
def _rope_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    x_scale_ptr, w_scale_ptr, qkv_stride, part_stride, slot_stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, QK_NORM: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take TAKEN heads of one token: rotate queries, or rotate keys and write them, or write values.

    With SPLITS heads are float32 sums of so many stretches, `part_stride` apart, and are added and rounded first; sums
    of codes have scales. Attention follows, which reads early what was written before the product of these heads: it is
    there once that product is done, and where it is SETTLED as soon as the programs here run (see `Stretches`).
    """
    HALVES: tl.constexpr = WIDTH == 2 * HALF and BLOCK == WIDTH and not QK_NORM
    if not SETTLED:
        wait_then_let_start(PDL)
    elif not HALVES:
        wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TAKEN
    head = (first + tl.arange(0, TAKEN))[:, None]
    if HALVES:
        _turn_halves(
            qkv_ptr + token * qkv_stride, q_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
            x_scale_ptr, w_scale_ptr, token, first, head, part_stride, slot_stride, HEADS, GROUPS, HALF, SPLITS,
            SETTLED, PDL,
        )  # fmt: skip
        return
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


@dataclass(frozen=True)
class Stretches:
    """Float32 sums [S, T, N] of a product's stretches of columns, still to be added in their order.

    Args:
        scales: of the rows [T] and of the outputs [N], if these are sums of codes.
        settled: whether the product has waited for its inputs before it let the next kernel start.
    """

    parts_STN: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    settled: bool = False


def rope_and_write(
    qkv: Tensor | Stretches, write: RopeWrite, qk_norm: tuple[Norm, Norm] | None, dtype: torch.dtype, dependent: bool
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
    settled = isinstance(qkv, Stretches) and qkv.settled
    if isinstance(qkv, Stretches):
        scales, qkv = qkv.scales or scales, qkv.parts_STN
    num_tokens, splits = qkv.shape[-2], len(qkv) if qkv.dim() == 3 else 1
    q = torch.empty(num_tokens, num_heads, width, dtype=dtype, device=qkv.device)
    norms = qk_norm or (Norm(q, 0.0), Norm(q, 0.0))
    taken = _heads_taken(num_heads, num_groups)
    _rope_kernel[(num_tokens, (num_heads + 2 * num_groups) // taken)](
        qkv, q, layer.keys_SGd, layer.values_SGd, rope.slots_T, rope.positions_T, rope.cos_Pr, rope.sin_Pr,
        norms[0].weight_D, norms[1].weight_D, *scales, qkv.stride(-2), qkv.stride(0), layer.keys_SGd.stride(0),
        norms[0].eps,
        HEADS=num_heads, GROUPS=num_groups, TAKEN=taken, WIDTH=width, HALF=rope.cos_Pr.shape[1],
        BLOCK=triton.next_power_of_2(width), SPLITS=splits, QK_NORM=qk_norm is not None, SETTLED=settled,
        PDL=dependent, num_warps=1 if taken < 4 else 4, **launch_options(dependent),
    )  # fmt: skip
    return q


def _heads_taken(num_heads: int, num_groups: int) -> int:
    """Return how many heads a program takes: a power of two that divides those of queries and those of keys."""
    return math.gcd(num_heads, num_groups, 8)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    dtype = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + at, mask=real, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up).to(dtype), mask=real)


def silu_mul(gate_up_TN: Tensor, dependent: bool) -> Tensor:
    """Return silu(first half) * second half of each row."""
    num_rows, width = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up_TN.dtype, device=gate_up_TN.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, 1024))](
        gate_up_TN, out, width, gate_up_TN.stride(0), BLOCK=1024, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip
    return out


def variants(architecture: str) -> list[Variant]:
    """List what ships, at the widths of an 8B model."""
    norm = {
        "x_ptr": "*bf16", "other_ptr": "*bf16", "weight_ptr": "*bf16", "other_weight_ptr": "*bf16", "out_ptr": "*bf16",
        "scale_ptr": "*fp32", "width": "i32", "x_stride": "i32", "other_stride": "i32", "out_stride": "i32",
        "eps": "fp32",
    }  # fmt: skip
    rope = {
        "qkv_ptr": "*bf16", "q_ptr": "*bf16", "keys_ptr": "*bf16", "values_ptr": "*bf16", "slots_ptr": "*i64",
        "positions_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "q_norm_ptr": "*bf16",
        "k_norm_ptr": "*bf16", "qkv_stride": "i32", "part_stride": "i32", "slot_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    silu = {"x_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32", "x_stride": "i32"}
    heads = {"HEADS": 32, "GROUPS": 8, "TAKEN": 8, "WIDTH": 128, "HALF": 64, "BLOCK": 128, "PDL": False}
    scales = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}

    def whole(signature: dict[str, str]) -> tuple[str, ...]:
        return tuple(name for name, kind in signature.items() if kind != "fp32")

    norms = [
        Variant(f"norm {codes}", _norm_kernel, {**norm, "out_ptr": pointer},
                {"BLOCK": 4096, "LEVELS": 12, "CODES": codes, "PDL": False}, 8, 2, divisible=whole(norm))
        for codes, pointer in (("none", "*bf16"), ("fp8", "*fp8e4nv"), ("int8", "*i8"))
    ]  # fmt: skip
    ropes = [
        Variant(f"{'settled ' if splits > 1 else ''}rope, qk norm {on}, {splits} stretches", _rope_kernel,
                {**rope, "qkv_ptr": pointer},
                {**heads, **dict.fromkeys(scales), "SPLITS": splits, "QK_NORM": on, "SETTLED": splits > 1}, 4, 2,
                divisible=whole(rope))
        for on, splits, pointer in ((False, 1, "*bf16"), (True, 1, "*bf16"), (False, 2, "*fp32"))
    ]  # fmt: skip
    ropes.append(
        Variant("settled rope, 2 stretches of codes", _rope_kernel, {**rope, "qkv_ptr": "*fp32", **scales},
                {**heads, "SPLITS": 2, "QK_NORM": False, "SETTLED": True}, 4, 2, divisible=(*whole(rope), *scales))
    )  # fmt: skip
    return [*norms, *ropes, Variant("silu_mul", _silu_mul_kernel, silu, {"BLOCK": 1024, "PDL": False}, 4, 2,
                                    divisible=whole(silu))]  # fmt: skip
