"""FP8 codes made inside a product of a few rows: the numbers of `norm_rope` and `quantize`, without their kernels.

A row's scale is its largest magnitude over 448. Where the kernel before wrote the rows as they are, it has left the
largest magnitude of each of its tiles. Where a norm lies between, roundings after it decide which number is largest, so
every program reads whole rows and finds out.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.norm_rope import SQUARES, pair_sums
from slipstream.kernels.triton.quantize import row_scale


@triton.jit
def norm_factor(squares_ptr, rows_M, K, eps, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr):
    """Return each row's factor of its norm, from the sums of squares that the product before has left."""
    part = tl.arange(0, PARTS)
    count = tl.cdiv(K, SQUARES)
    at = squares_ptr + rows_M.to(tl.int64)[:, None] * count + part[None, :]
    sums = tl.load(at, mask=(part < count)[None, :], other=0.0)
    return tl.rsqrt(tl.reshape(pair_sums(sums, LEVELS), (BLOCK_M,)) / K + eps)


@triton.jit
def apply_norm(rows, weight, factor):
    """Return numbers times their row's factor and their column's weight, rounded where torch rounds: after each."""
    normed = (rows.to(tl.float32) * factor).to(rows.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(rows.dtype)


@triton.jit
def scale_of_maxima(maxima_ptr, row, num_parts, PARTS: tl.constexpr):
    """Return each row's scale from the largest magnitudes that the kernel before has left of it."""
    part = tl.arange(0, PARTS)
    at = maxima_ptr + row.to(tl.int64)[:, None] * num_parts + part[None, :]
    found = tl.load(at, mask=(part < num_parts)[None, :], other=0.0)
    return row_scale(tl.max(found, 1), "fp8")


@triton.jit
def factor_and_scale(
    x_ptr, norm_ptr, squares_ptr, row, K, x_stride, eps,
    ROWS: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return each row's factor of its norm, and the scale of what it becomes."""
    WIDTH: tl.constexpr = PARTS * SQUARES
    TAKEN: tl.constexpr = WIDTH // ROWS if WIDTH > ROWS * 64 else 64  # columns that registers hold beside a tile
    row_at = x_ptr + row.to(tl.int64)[:, None] * x_stride
    norm_at = norm_ptr + tl.zeros([ROWS, 1], tl.int32)  # one copy for each row: then it lies as the rows do
    factor = norm_factor(squares_ptr, row, K, eps, ROWS, PARTS, LEVELS)
    largest = tl.zeros([ROWS, TAKEN], tl.float32)
    for first in tl.static_range(0, WIDTH, TAKEN):
        column = (first + tl.arange(0, TAKEN))[None, :]
        rows = tl.load(row_at + column, mask=column < K, other=0.0)
        weight = tl.load(norm_at + column, mask=column < K, other=0.0)
        normed = apply_norm(rows, weight, factor[:, None])
        largest = tl.maximum(largest, tl.abs(normed.to(tl.float32)))
    return factor, row_scale(tl.max(largest, 1), "fp8")


@triton.jit
def repeat_rows(rows, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return columns [n, ROWS] over and over until there are BLOCK_M; what comes of copies is not stored."""
    if ROWS == 1:
        rows = tl.broadcast_to(rows, (rows.shape[0], BLOCK_M))
    elif ROWS < BLOCK_M:
        # Words between the two: the compiler would put the reshape into fast memory, and find no layout for it.
        BITS: tl.constexpr = rows.dtype.primitive_bitwidth
        WORD: tl.constexpr = tl.int8 if BITS == 8 else tl.int16 if BITS == 16 else tl.int32
        words = tl.broadcast_to(rows.to(WORD, bitcast=True)[:, None, :], (rows.shape[0], BLOCK_M // ROWS, ROWS))
        rows = tl.reshape(words, (rows.shape[0], BLOCK_M)).to(rows.dtype, bitcast=True)
    return rows


@triton.jit
def repeat_scales(scale, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return scales [ROWS] over and over until there are BLOCK_M."""
    return tl.reshape(tl.broadcast_to(scale[None, :], (BLOCK_M // ROWS, ROWS)), (BLOCK_M,))


@triton.jit
def encode_with(rows, scale, inverse):
    """Return FP8 codes of numbers / scale as `quantize.encode` makes them, by the scale's inverse.

    One step of correction makes the quotient the nearest float32 to the true one (Markstein 1990). Nothing is past 448
    by more than rounding takes back. A negative zero becomes a positive one, which changes no sum.
    """
    x = rows.to(tl.float32)
    near = x * inverse
    return tl.fma(tl.fma(-near, scale, x), inverse, near).to(tl.float8e4nv)
