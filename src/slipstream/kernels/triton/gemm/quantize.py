"""Activations as FP8 or INT8 codes, one scale per token, in the arithmetic of `slipstream.quant.formats`.

Rows rounded to MXFP4 are written as the bfloat16 numbers that their codes and scales stand for, bit for bit as
`quant.formats.mxfp4` rounds. That loses nothing: E2M1 has one mantissa bit and E8M0 is bfloat16's range of exponents.
So a product with weights widened alike multiplies exact numbers on any matrix unit, and all its rounding is that of
float32 sums, as the reference's is.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import launch_options, wait_for_inputs

Codes = Literal["fp8", "int8"]
_WIDEST = 16384  # numbers of a row that a program holds at once
CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
GROUP = tl.constexpr(32)
_MX_BLOCK = 1024
_QUARTER = tl.constexpr(0x3E800000)
_THREE_QUARTERS = tl.constexpr(0x3F400000)
_ONE = tl.constexpr(254)  # 1.0 in half binades, as the bits of a float count them
_TINY = tl.constexpr(-100)
_LIFT = tl.constexpr(64)
_LIFT_FACTOR = tl.constexpr(2.0**64)


@triton.jit
def round_even(x):
    """Round to the nearest integer, ties to even, for magnitudes below 2^22: adding 1.5 * 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def row_scale(amax, CODES: tl.constexpr):
    """Return the scale of a row with this largest magnitude."""
    if CODES == "fp8":
        return tl.div_rn(tl.maximum(amax, 1e-12), 448.0)
    return tl.div_rn(amax, 127.0)


@triton.jit
def encode(x, scale, CODES: tl.constexpr):
    """Return the codes of float32 numbers."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    if CODES == "fp8":
        codes = tl.clamp(tl.div_rn(x, divisor), -448.0, 448.0).to(tl.float8e4nv)
    else:
        codes = tl.clamp(round_even(tl.div_rn(x, divisor)), -127.0, 127.0).to(tl.int8)
    return codes


@triton.jit
def _quantize_kernel(
    x_ptr, static_ptr, codes_ptr, scale_ptr, width, x_stride,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, CODES: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Turn a row into codes; WHOLE: it fits in one block, and is read once."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
    else:
        amax = tl.abs(x)
        for start in range(BLOCK, width, BLOCK):
            at = start + column
            more = tl.load(x_ptr + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(more))
        scale = row_scale(tl.max(amax, 0), CODES)
    tl.store(scale_ptr + row, scale)
    divisor = tl.broadcast_to(scale, [BLOCK])
    tl.store(codes_ptr + row * width + column, encode(x, divisor, CODES), mask=column < width)
    if not WHOLE:
        for start in range(BLOCK, width, BLOCK):
            at = start + column
            x = tl.load(x_ptr + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
            tl.store(codes_ptr + row * width + at, encode(x, divisor, CODES), mask=at < width)


def quantize_rows(
    x_TD: Tensor, codes: Codes, static: Tensor | None, dependent: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes [T, D] and scales [T] of rows whose last dimension is contiguous.

    Args:
        static: one float32 scale for all rows, where a checkpoint fixes it.
        dtype: a wider type to keep the codes in, for a product that would widen them.
    """
    num_rows, width = x_TD.shape
    codes_TD = torch.empty(num_rows, width, dtype=dtype or CODE_DTYPES[codes], device=x_TD.device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=x_TD.device)
    block = min(triton.next_power_of_2(width), _WIDEST)
    _quantize_kernel[(num_rows,)](
        x_TD, scale_T if static is None else static, codes_TD, scale_T, width, x_TD.stride(0),
        BLOCK=block, WHOLE=width <= block, CODES=codes, STATIC=static is not None, PDL=dependent,
        num_warps=_num_warps(block), **launch_options(dependent),
    )  # fmt: skip
    return codes_TD, scale_T


def _num_warps(block: int) -> int:
    """Return as many warps as give a thread 32 numbers at most."""
    return min(max(block // 1024, 4), 16)


@triton.jit
def mxfp4_value(code, dtype: tl.constexpr):
    """Return E2M1 codes 0 to 15 as numbers; twice a magnitude is an integer."""
    magnitude = code & 7
    double = tl.where(magnitude < 2, magnitude, (2 | (magnitude & 1)) << (tl.maximum(magnitude >> 1, 1) - 1))
    value = double.to(tl.float32) * 0.5
    return tl.where(code < 8, value, -value).to(dtype)


@triton.jit
def mxfp4_codes(x):
    """Return the codes [G, 32] (int32) and the scales [G] as stored (int32, 1 to 254) of float32 groups [G, 32].

    The arithmetic is on bits, as in `quant.formats.mxfp4`: the exponent is that of the largest magnitude rounded to one
    mantissa bit, ties go to even codes, and what rounds to zero loses its sign.
    """
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(tl.maximum(((largest + (1 << 21)) >> 23) - 129, -127), 127)
    stored = tl.maximum(exponent, -126) + 127
    # Subnormal numbers do not divide by subtraction, so groups that could hold some are lifted first.
    tiny = exponent < _TINY
    x *= tl.where(tiny, _LIFT_FACTOR, 1.0)[:, None]
    exponent = tl.where(tiny, exponent + _LIFT, exponent)
    bits = x.to(tl.int32, bitcast=True)
    value = (bits & 0x7FFFFFFF) - (exponent << 23)[:, None]
    # From 1 up: round to one mantissa bit, and count half binades; below 1 this gives code 2, or fewer.
    half_binades = (value + ((value >> 22) & 1) + ((1 << 21) - 1)) >> 22
    codes = tl.minimum(tl.maximum(half_binades, _ONE), _ONE + 5) - _ONE + 2
    codes = codes - (value <= _QUARTER).to(tl.int32) - (value < _THREE_QUARTERS).to(tl.int32)
    sign = tl.where(codes > 0, (bits >> 28) & 8, 0)
    return codes | sign, stored


@triton.jit
def mxfp4_rounded(x):
    """Return float32 groups [G, 32] after a round trip through MXFP4."""
    codes, stored = mxfp4_codes(x)
    power = (stored << 23).to(tl.float32, bitcast=True)
    return mxfp4_value(codes, tl.float32) * power[:, None]


@triton.jit
def _round_kernel(x_ptr, out_ptr, width, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    x = tl.reshape(mxfp4_rounded(tl.reshape(x, [BLOCK // GROUP, GROUP])), [BLOCK])
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=column < width)


def round_rows(x_TD: Tensor, dependent: bool) -> Tensor:
    """Return rows, whose last dimension is contiguous and a multiple of 32, after a round trip through MXFP4."""
    num_rows, width = x_TD.shape
    assert width % GROUP.value == 0, "groups are whole"
    out_TD = torch.empty(num_rows, width, dtype=torch.bfloat16, device=x_TD.device)
    _round_kernel[(num_rows, triton.cdiv(width, _MX_BLOCK))](
        x_TD, out_TD, width, x_TD.stride(0), BLOCK=_MX_BLOCK, PDL=dependent, num_warps=4, **launch_options(dependent)
    )
    return out_TD
