"""FP8 codes made inside a product of a few rows: the numbers of `norm` and `quantize`, without their kernels.

A row's scale is its largest magnitude over 448. Where the kernel before wrote the rows as they are, it has left the
largest magnitude of each of its tiles. Where a norm lies between, roundings after it decide which number is largest, so
every program reads whole rows and finds out.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.quantize import row_scale
from slipstream.kernels.triton.norm import pair_sums


@triton.jit
def _combined(a, b, ADD: tl.constexpr):
    return a + b if ADD else tl.maximum(a, b)


@triton.jit
def _left(at, part, count):
    return tl.load(at + part[None, :], mask=(part < count)[None, :], other=0.0)


@triton.jit
def _left_two(at, part, count, ADD: tl.constexpr):
    return _combined(_left(at, part, count), _left(at, part + 1, count), ADD)


@triton.jit
def _left_four(at, part, count, ADD: tl.constexpr):
    return _combined(_left_two(at, part, count, ADD), _left_two(at, part + 2, count, ADD), ADD)


@triton.jit
def left_of_rows(left_ptr, row, count, PARTS: tl.constexpr, ADD: tl.constexpr):
    """Return what the kernel before has left of rows, `count` numbers each: sums of neighbours, or the larger of them.

    Of up to 256 numbers, 32 come of it: a warp has them all then, and what comes next needs no shared memory.
    """
    at = left_ptr + row.to(tl.int64)[:, None] * count
    if PARTS >= 256:
        part = tl.arange(0, PARTS // 8) * 8
        found = _combined(_left_four(at, part, count, ADD), _left_four(at, part + 4, count, ADD), ADD)
    elif PARTS == 128:
        found = _left_four(at, tl.arange(0, 32) * 4, count, ADD)
    elif PARTS == 64:
        found = _left_two(at, tl.arange(0, 32) * 2, count, ADD)
    else:
        found = _left(at, tl.arange(0, PARTS), count)
    return found


@triton.jit
def norm_factor(
    squares_ptr, rows_M, K, eps, BLOCK_M: tl.constexpr, SQUARED: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr
):
    """Return each row's factor of its norm, from the sums of SQUARED squares that the product before has left."""
    FOLDED: tl.constexpr = 3 if PARTS >= 256 else 2 if PARTS == 128 else 1 if PARTS == 64 else 0
    sums = left_of_rows(squares_ptr, rows_M, tl.cdiv(K, SQUARED), PARTS, True)
    return tl.rsqrt(tl.reshape(pair_sums(sums, LEVELS - FOLDED), (BLOCK_M,)) / K + eps)


@triton.jit
def apply_norm(rows, weight, factor):
    """Return numbers times their row's factor and their column's weight, rounded where torch rounds: after each."""
    normed = (rows.to(tl.float32) * factor).to(rows.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(rows.dtype)


@triton.jit
def scale_of_maxima(maxima_ptr, row, num_parts, PARTS: tl.constexpr):
    """Return each row's scale from the largest magnitudes that the kernel before has left of it."""
    return row_scale(tl.max(left_of_rows(maxima_ptr, row, num_parts, PARTS, False), 1), "fp8")


@triton.jit
def factor_and_scale(
    x_ptr, norm_ptr, squares_ptr, row, K, x_stride, eps,
    ROWS: tl.constexpr, SQUARED: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return each row's factor of its norm, and the scale of what it becomes."""
    WIDTH: tl.constexpr = PARTS * SQUARED
    HELD: tl.constexpr = WIDTH // ROWS if WIDTH > ROWS * 64 else 64  # columns that registers hold beside a tile
    row_at = x_ptr + row.to(tl.int64)[:, None] * x_stride
    norm_at = norm_ptr + tl.zeros([ROWS, 1], tl.int32)  # one copy for each row: then it lies as the rows do
    column = tl.arange(0, HELD)[None, :]
    rows = tl.load(row_at + column, mask=column < K, other=0.0)  # on their way while the factor is found
    weight = tl.load(norm_at + column, mask=column < K, other=0.0)
    factor = norm_factor(squares_ptr, row, K, eps, ROWS, SQUARED, PARTS, LEVELS)
    largest = tl.abs(apply_norm(rows, weight, factor[:, None]).to(tl.float32))
    for first in tl.static_range(HELD, WIDTH, HELD):
        rows = tl.load(row_at + first + column, mask=first + column < K, other=0.0)
        weight = tl.load(norm_at + first + column, mask=first + column < K, other=0.0)
        normed = apply_norm(rows, weight, factor[:, None])
        largest = tl.maximum(largest, tl.abs(normed.to(tl.float32)))
    return factor, row_scale(tl.max(largest, 1), "fp8")


@triton.jit
def repeat_rows(rows, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return columns [n, ROWS] over and over until there are BLOCK_M; what comes of copies is not stored."""
    if ROWS == 1:
        rows = tl.broadcast_to(rows, (rows.shape[0], BLOCK_M))
    elif ROWS < BLOCK_M:
        # Words between the two: the compiler would put the reshape into shared memory, and find no layout for it.
        BITS: tl.constexpr = rows.dtype.primitive_bitwidth
        WORD: tl.constexpr = tl.int8 if BITS == 8 else tl.int16 if BITS == 16 else tl.int32
        words = tl.broadcast_to(rows.to(WORD, bitcast=True)[:, None, :], (rows.shape[0], BLOCK_M // ROWS, ROWS))
        rows = tl.reshape(words, (rows.shape[0], BLOCK_M)).to(rows.dtype, bitcast=True)
    return rows


@triton.jit
def repeat_numbers(numbers, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return numbers [ROWS] over and over until there are BLOCK_M."""
    return tl.reshape(tl.broadcast_to(numbers[None, :], (BLOCK_M // ROWS, ROWS)), (BLOCK_M,))


@triton.jit
def add_slices(sums, SLICES: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr):
    """Add 2 or 4 splits' sums in their order: [SLICES * OUTPUTS, SLICES * TOKENS] -> [OUTPUTS, TOKENS].

    A split's sums are where its weights were multiplied by its own columns of the rows.
    """
    tl.static_assert(SLICES == 2 or SLICES == 4)
    if SLICES == 2:
        by_weight_and_row = tl.permute(tl.reshape(sums, (2, OUTPUTS, 2, TOKENS)), (1, 3, 0, 2))
        row_0, row_1 = tl.split(by_weight_and_row)
        total = tl.split(row_0)[0] + tl.split(row_1)[1]
    else:
        halved = tl.reshape(sums, (2, 2, OUTPUTS, 2, 2, TOKENS))
        even, odd = tl.split(tl.permute(halved, (2, 5, 0, 1, 3, 4)))
        row_0, row_2 = tl.split(even)
        row_1, row_3 = tl.split(odd)
        total = tl.split(tl.split(row_0)[0])[0] + tl.split(tl.split(row_1)[1])[0]
        total += tl.split(tl.split(row_2)[0])[1]
        total += tl.split(tl.split(row_3)[1])[1]
    return total


@triton.jit
def encode_with(rows, scale, inverse):
    """Return FP8 codes of numbers / scale as `quantize.encode` makes them, by the scale's inverse.

    One step of correction makes the quotient the nearest float32 to the true one (Markstein 1990). Nothing is past 448
    by more than rounding takes back. A negative zero becomes a positive one, which changes no sum.
    """
    x = rows.to(tl.float32)
    near = x * inverse
    return tl.fma(tl.fma(-near, scale, x), inverse, near).to(tl.float8e4nv)
