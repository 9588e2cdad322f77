"""Queries, keys and values as a product of a few rows ends with them: rotated, and written to the cache.

A tile's columns are pairs of a head: values, and those they are rotated with.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl


@triton.jit
def rope_rows(n, n_tile, N, BLOCK_N: tl.constexpr, HALF: tl.constexpr, PROGRAM_N: tl.constexpr):
    """Return the weight rows of places in a tile: values, then those they are rotated with; see `weight_rows`."""
    pair = n_tile * (PROGRAM_N // 2) + n % (BLOCK_N // 2)
    return tl.minimum(pair // HALF * (2 * HALF) + pair % HALF + n // (BLOCK_N // 2) * HALF, N - 1)


@triton.jit
def places(slots_ptr, positions_ptr, M, BLOCK_M: tl.constexpr):
    """Return each token's slot and position."""
    token = tl.arange(0, BLOCK_M)
    slot = tl.load(slots_ptr + token, mask=token < M, other=0).to(tl.int64)
    return slot, tl.load(positions_ptr + token, mask=token < M, other=0).to(tl.int64)


@triton.jit
def angles(
    position, n_tile, cos_ptr, sin_ptr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, PROGRAM_N: tl.constexpr
):  # fmt: skip
    """Return the angles of a tile's columns at tokens' positions [tokens, BLOCK_N / 2]."""
    column = (n_tile * (PROGRAM_N // 2) + tl.arange(0, BLOCK_N // 2)) % HALF
    angle = position[:, None] * HALF + column[None, :]
    return tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)


@triton.jit
def rotate_and_store(
    total, slot, cos, sin, n_tile, bias_ptr, q_ptr, keys_ptr, values_ptr, M, N, q_stride, slot_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, PROGRAM_N: tl.constexpr,
):  # fmt: skip
    """Finish float32 sums [BLOCK_N, BLOCK_M]: rotate and store queries, rotate and write keys, write values.

    The arithmetic is that of `rope.rope_and_write`.
    """
    dtype = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = BLOCK_N // 2
    if HAS_BIAS:
        rows_N = rope_rows(tl.arange(0, BLOCK_N), n_tile, N, BLOCK_N, HALF, PROGRAM_N)
        total += tl.load(bias_ptr + rows_N).to(tl.float32)[:, None]
    first, second = tl.split(tl.permute(tl.reshape(total, (2, PAIRS, BLOCK_M)), (2, 1, 0)))
    first, second = first.to(dtype), second.to(dtype)
    pair = n_tile * (PROGRAM_N // 2) + tl.arange(0, PAIRS)
    head, column = (pair // HALF)[None, :], (pair % HALF)[None, :]
    x, partner = first.to(tl.float32), second.to(tl.float32)
    is_turned = head < HEADS + GROUPS
    first = tl.where(is_turned, (x * cos + -1.0 * partner * sin).to(dtype), first)
    second = tl.where(is_turned, (partner * cos + 1.0 * x * sin).to(dtype), second)
    token = tl.arange(0, BLOCK_M)
    real = (token < M)[:, None] & (pair < tl.minimum((n_tile + 1) * (PROGRAM_N // 2), N // 2))[None, :]
    q_at = q_ptr + token.to(tl.int64)[:, None] * q_stride + head * (2 * HALF) + column
    written = slot[:, None] * slot_stride + column
    k_at = keys_ptr + written + (head - HEADS) * (2 * HALF)
    v_at = values_ptr + written + (head - HEADS - GROUPS) * (2 * HALF)
    _store_halves(q_at, first, second, real & (head < HEADS), HALF)
    _store_halves(k_at, first, second, real & (head >= HEADS) & is_turned, HALF)
    _store_halves(v_at, first, second, real & (head >= HEADS + GROUPS), HALF)


@triton.jit
def _store_halves(at, first, second, mask, HALF: tl.constexpr):
    tl.store(at, first, mask=mask)
    tl.store(at + HALF, second, mask=mask)
