"""Rows as products of 1 to 4 rows multiply them (`hopper_gemv`): normed, made codes, and put where matrix units read.

A pass's rows are cut in chunks of steps. A chunk has SLICES * MP rows, those of each token in each split of K,
and is stored over and over until a tile of BN is full; what comes of copies is not stored.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton.gemm.prologue import apply_norm, encode_with
from slipstream.kernels.triton.gemm.quantize import row_scale

WARPS = gl.constexpr(4)
EACH = gl.constexpr(8)
"""Numbers of a row that lie together in a thread."""


@gluon.constexpr_function
def chunk_layout(C, BK):
    """Return how a chunk [C, copies, SLICES, MP, BK] lies in threads: copies and mostly rows in one thread."""
    across = BK // EACH.value
    down = 32 // across
    by_step = min(WARPS.value, max(C // down, 1))
    return gl.BlockedLayout(
        [1, 1, 1, 1, EACH.value], [down, 1, 1, 1, across], [by_step, 1, WARPS.value // by_step, 1, 1], [4, 3, 2, 1, 0]
    )


@gluon.constexpr_function
def left_layout(MP, PARTS):
    """Return a layout in which every warp has all that was left of the rows."""
    return gl.BlockedLayout([MP, max(PARTS // 32, 1)], [1, 32], [1, WARPS.value], [1, 0])


@gluon.jit
def chunk_places(
    M, x_stride, SLICES: gl.constexpr, MP: gl.constexpr, STEPS: gl.constexpr, C: gl.constexpr, BK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Return where a first chunk's numbers are in the rows [C, SLICES, MP, BK]; rows past the last repeat it.

    And where they are in a norm's weights [C, SLICES, 1, BK].
    """
    BY_TOKEN: gl.constexpr = gl.SliceLayout(2, ROWS)
    BY_SIDE: gl.constexpr = gl.SliceLayout(1, BY_TOKEN)
    c = gl.arange(0, C, gl.SliceLayout(1, BY_SIDE))
    k = gl.arange(0, BK, gl.SliceLayout(0, BY_SIDE))
    piece = gl.arange(0, SLICES, gl.SliceLayout(0, gl.SliceLayout(2, BY_TOKEN)))
    column = gl.expand_dims((c * BK)[:, None] + k[None, :], 1)
    column = gl.expand_dims(column + gl.expand_dims((piece * (STEPS * BK))[None, :], 2), 2)
    return gl.minimum(tokens(MP, ROWS), M - 1) * x_stride + column, column


@gluon.jit
def tokens(MP: gl.constexpr, ROWS: gl.constexpr):
    """Return the numbers of tokens [1, 1, MP, 1]."""
    token = gl.arange(0, MP, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, ROWS))))
    return gl.expand_dims(token[None, :][None, :], 3)


@gluon.jit
def _pair_sums(x, LEVELS: gl.constexpr):
    """Add neighbours of rows [M, n] as `norm.pair_sums` does."""
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
def factor_of(left, K, eps, LEVELS: gl.constexpr):
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
def for_rows(numbers, MP: gl.constexpr, ROWS: gl.constexpr):
    """Return numbers, one for each token, for the rows of a chunk: [1, 1, MP, 1], or one for all."""
    found = of_tokens(numbers, 0, 1)
    if MP > 1:
        found = of_tokens(numbers, tokens(MP, ROWS), MP)
    return found


@gluon.jit
def largest(normed, C: gl.constexpr, MP: gl.constexpr, BK: gl.constexpr):
    """Return the largest magnitudes [MP] of rows that are one chunk; warps synchronise once; every thread has all."""
    DOWN: gl.constexpr = 32 // (BK // EACH)
    gl.static_assert(C >= DOWN * WARPS)
    ALL: gl.constexpr = gl.BlockedLayout([WARPS, MP], [32, 1], [WARPS, 1], [1, 0])
    by_step = gl.max(gl.max(gl.abs(normed.to(gl.float32)), 3), 1)
    by_warp = gl.max(gl.max(by_step.reshape([C // (DOWN * WARPS), WARPS, DOWN, MP]), 2), 0)
    return gl.max(gl.convert_layout(by_warp, ALL), 0)


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
    rows, store, C: gl.constexpr, SLICES: gl.constexpr, MP: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Store a chunk [C, SLICES, MP, BK] as tiles of BN rows [C * BN, BK], for matrix units once warps have met."""
    COPIES: gl.constexpr = BN // (SLICES * MP)
    tiles, _ = gl.broadcast(gl.expand_dims(rows, 1), gl.full([C, COPIES, SLICES, MP, BK], 0.0, rows.dtype, CHUNK))
    store.store(tiles.reshape([C * BN, BK]))
