"""Rows as products of 1 to 4 rows multiply them (`lean`): normed, made codes, and put where matrix units read.

A pass's rows are cut in chunks of steps. A chunk has R rows, those of each token in each stretch of columns, and is
stored over and over until a tile of BN is full; what comes of copies is not stored.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton.narrow_codes import apply_norm, encode_with
from slipstream.kernels.triton.quantize import row_scale

WARPS = gl.constexpr(4)
EACH = gl.constexpr(8)
"""Numbers of a row that lie together in a thread."""


@gluon.constexpr_function
def chunk_layout(C, BK):
    """Return how a chunk [C, copies, rows, BK] lies in threads: copies, and mostly rows, in one thread."""
    across = BK // EACH.value
    down = 32 // across
    by_step = min(WARPS.value, max(C // down, 1))
    return gl.BlockedLayout(
        [1, 1, 1, EACH.value], [down, 1, 1, across], [by_step, 1, WARPS.value // by_step, 1], [3, 2, 1, 0]
    )


@gluon.constexpr_function
def left_layout(MP, PARTS):
    """Return a layout in which every warp has all that was left of the rows."""
    return gl.BlockedLayout([MP, max(PARTS // 32, 1)], [1, 32], [1, WARPS.value], [1, 0])


@gluon.jit
def chunk_places(
    M, x_stride, SIDE: gl.constexpr, MP: gl.constexpr, STEPS: gl.constexpr, C: gl.constexpr, BK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Return where a first chunk's numbers are in the rows, and where in the weights of a norm; [C, R, BK] both."""
    c = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    r = gl.arange(0, SIDE * MP, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    k = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    column = (c * BK)[:, None, None] + (r // MP * (STEPS * BK))[None, :, None] + k[None, None, :]
    return (gl.minimum(r % MP, M - 1) * x_stride)[None, :, None] + column, column


@gluon.jit
def _pair_sums(x, LEVELS: gl.constexpr):
    """Add neighbours of rows [M, n] as `norm_rope.pair_sums` does."""
    for _ in gl.static_range(LEVELS):
        x = gl.sum(x.reshape([x.shape[0], x.shape[1] // 2, 2]), 2)
    return x


@gluon.jit
def left_of_rows(left_ptr, M, num_parts, MP: gl.constexpr, PARTS: gl.constexpr):
    """Return what the kernel before has left of the rows [MP, PARTS], zeros past the last."""
    LEFT: gl.constexpr = left_layout(MP, PARTS)
    row = gl.minimum(gl.arange(0, MP, gl.SliceLayout(1, LEFT)), M - 1)[:, None]
    part = gl.arange(0, PARTS, gl.SliceLayout(0, LEFT))[None, :]
    return gl.load(left_ptr + row * num_parts + part, mask=(part < num_parts) & (row >= 0), other=0.0)


@gluon.jit
def factor_of(left, K, eps, MP: gl.constexpr, LEVELS: gl.constexpr):
    """Return each row's factor of its norm, from its sums of squares."""
    return gl.rsqrt(gl.sum(_pair_sums(left, LEVELS), 1) / K + eps)


@gluon.jit
def scale_of(left):
    """Return each row's scale from the largest magnitudes of its parts."""
    return row_scale(gl.max(left, 1), "fp8")


@gluon.jit
def of_tokens(numbers, token, MP: gl.constexpr):
    """Return the numbers, one for each of MP tokens, that belong to `token`; every thread has them all."""
    own = gl.arange(0, MP, numbers.type.layout)
    found = gl.sum(gl.where(own == 0, numbers, 0.0), 0)
    if MP > 1:
        found = gl.where(token == 0, found, gl.sum(gl.where(own == 1, numbers, 0.0), 0))
    if MP > 2:
        found = gl.where(token == 2, gl.sum(gl.where(own == 2, numbers, 0.0), 0), found)
        found = gl.where(token == 3, gl.sum(gl.where(own == 3, numbers, 0.0), 0), found)
    return found


@gluon.jit
def for_rows(numbers, SIDE: gl.constexpr, MP: gl.constexpr, ROWS: gl.constexpr):
    """Return numbers, one for each token, for the rows of a chunk: [1, R, 1], or one for all."""
    found = of_tokens(numbers, 0, 1)
    if MP > 1:
        token = gl.arange(0, SIDE * MP, gl.SliceLayout(0, gl.SliceLayout(2, ROWS))) % MP
        found = of_tokens(numbers, token, MP)[None, :, None]
    return found


@gluon.jit
def largest(normed, C: gl.constexpr, BK: gl.constexpr):
    """Return the largest magnitude of a single row's chunk, [1]; warps meet once."""
    DOWN: gl.constexpr = 32 // (BK // EACH)
    ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    by_step = gl.max(gl.max(gl.abs(normed.to(gl.float32)), 2), 1)
    gl.static_assert(C >= DOWN * WARPS)
    by_warp = gl.max(gl.max(by_step.reshape([C // (DOWN * WARPS), WARPS, DOWN]), 2), 0)
    return gl.max(gl.convert_layout(by_warp, ALL).reshape([1, WARPS]), 1)


@gluon.jit
def normed_rows(raw, weight, factor, NORM: gl.constexpr):
    """Return numbers after their norm, if there is one."""
    if NORM:
        raw = apply_norm(raw, weight, factor)
    return raw


@gluon.jit
def coded_rows(rows, scale, inverse, CODES: gl.constexpr):
    """Return codes of numbers, if they are not what is multiplied already."""
    if CODES:
        rows = encode_with(rows, scale, inverse)
    return rows


@gluon.jit
def store_chunk(
    rows, store, C: gl.constexpr, R: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """Store a chunk [C, R, BK] as tiles of BN rows [C * BN, BK], where matrix units see it once warps have met."""
    copies = gl.expand_dims(rows, 1)
    tiles, _ = gl.broadcast(copies, gl.full([C, BN // R, R, BK], 0.0, rows.dtype, CHUNK))
    store.store(tiles.reshape([C * BN, BK]))
