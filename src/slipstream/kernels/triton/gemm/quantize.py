"""Activations as FP8 or INT8 codes, one scale per token, in the arithmetic of `slipstream.quant.formats`."""
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
