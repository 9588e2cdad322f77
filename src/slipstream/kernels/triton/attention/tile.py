"""What attention is made of: whose queries a tile holds, a block of keys, and the merging of results.

A split's result is a maximum, a sum and a weighted sum of values. Results are merged in the order of splits, those of a
group first, then those of groups. A split, a block or a key that a row does not see changes none of its bits,
so they depend on the row's own keys alone.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

DESCRIPTION = ["starts_ptr", "lens_ptr", "pages_ptr", "index_ptr", "ancestors_ptr"]
"""What tells a kernel whose queries and keys there are. Few numbers, so their alignment makes no kernels of its own.

It may be read before a kernel has waited, and is then read past the nearest cache (.cg), which might hold old lines.
"""
SPLITS_IN_GROUP = 4
"""Splits whose results are merged among themselves first: those from a multiple of this number on."""


@triton.jit
def nothing(ROWS: tl.constexpr, D: tl.constexpr):
    """Return the result of no keys."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)


@triton.jit
def find_request(starts_ptr, tile, num_requests, TOKENS: tl.constexpr, REQUESTS: tl.constexpr):
    """Return the request of a tile of TOKENS queries, its first query and the first of the next request.

    Request r's tiles start at starts[r] // TOKENS + r.
    """
    r = tl.arange(0, REQUESTS)
    starts = tl.load(starts_ptr + r, mask=r < num_requests, other=2147480000, cache_modifier=".cg")
    ends = tl.load(starts_ptr + r + 1, mask=r < num_requests, other=0, cache_modifier=".cg")
    request = tl.sum(((starts // TOKENS + r <= tile) & (r < num_requests)).to(tl.int32), 0) - 1
    return request, tl.sum(tl.where(r == request, starts, 0), 0), tl.sum(tl.where(r == request, ends, 0), 0)


@triton.jit
def first_seen(own_R, ancestors_R, window, chunk):
    """Return the first key that each row's window or chunk shows, by index; one of 0 shows all.

    Both count positions, and a key's position is how many keys its row sees before it: of a tree, those of its path.
    """
    distance = tl.arange(0, 64)
    seen_R64 = (ancestors_R[:, None] >> distance[None, :].to(tl.int64)).to(tl.int32) & 1
    seen_R64 = seen_R64 & ((distance[None, :] - own_R[:, None] - 1) >> 31)  # nothing lies before the first key
    near_R = tl.sum(seen_R64, 1)
    position_R = own_R - (tl.minimum(own_R + 1, 64) - near_R)
    first_R = tl.zeros_like(own_R)
    if window > 0:
        first_R = tl.maximum(position_R - window + 1, first_R)
    if chunk > 0:
        first_R = tl.maximum(position_R // chunk * chunk, first_R)
    shown_R = position_R + 1 - first_R
    nearer_R64 = tl.cumsum(seen_R64, 1)
    # As many keys back as it takes to have seen those shown; further back than 64, index and position are the same.
    back_R = tl.sum(((nearer_R64 - shown_R[:, None]) >> 31) & 1, 1)
    return tl.where(shown_R < near_R, own_R - back_R, first_R)


@triton.jit
def hide(scores, index, own_R, ancestors_R, end, first_R, HAS_WINDOW: tl.constexpr):
    """Return scores with -inf where a row does not see a key; signs make the masks, which are numbers, not predicates.

    AMD keeps a predicate of every element in scalar registers, of which there are few.
    """
    distance = own_R[:, None] - index[None, :]
    bit = (ancestors_R[:, None] >> tl.minimum(tl.maximum(distance, 0), 63).to(tl.int64)).to(tl.int32) & 1
    seen = (bit | ((63 - distance) >> 31)) & ((-1 - distance) >> 31) & ((index - end) >> 31)[None, :]
    if HAS_WINDOW:
        seen = seen & ((first_R[:, None] - 1 - index[None, :]) >> 31)
    return tl.where(seen != 0, scores, float("-inf"))


@triton.jit
def key_offsets(
    pages_at, slot_stride, start, end, BLOCK: tl.constexpr, PAGE: tl.constexpr, CACHED: tl.constexpr = False
):
    """Return where in the cache the keys from `start` on lie; past the end, where the last one does.

    Args:
        CACHED: pages are read through the nearest cache, which only who has waited for the kernel before may do.
    """
    key = tl.minimum(start + tl.arange(0, BLOCK), end - 1)
    if CACHED:
        page = tl.load(pages_at + key // PAGE).to(tl.int64)
    else:
        page = tl.load(pages_at + key // PAGE, cache_modifier=".cg").to(tl.int64)
    return (page * PAGE + key % PAGE) * slot_stride


@triton.jit
def _larger(a, b):
    """Return the larger of two bytes."""
    return tl.maximum(a, b)


@triton.jit
def _as_wide(codes):
    """Return what was loaded as bytes so that nothing is multiplied in another order for it.

    Where an operand comes from loads of bytes, Triton gives a thread four columns in a row of it, and the sixteen
    that an instruction sums are then not those of other operands. It looks no further back than to a reduction,
    and one over a single number is none.
    """
    whole = tl.reduce(tl.expand_dims(codes.to(tl.uint8, bitcast=True), 0), 0, _larger)
    return whole.to(codes.dtype, bitcast=True)


@triton.jit
def load_scales(scales, at, WHOSE: tl.constexpr, SLOT: tl.constexpr):
    """Return the scales of the FP8 keys or values at these offsets, powers of two, stored as exponents (E8M0).

    Args:
        scales: those of keys and of values, each None where there are none; how far from there those of this head
            begin, and how far apart slots' are.
        WHOSE: 0 for keys, 1 for values.
        SLOT: numbers of a slot, of all heads.
    """
    codes = _as_wide(tl.load(scales[WHOSE] + scales[2] + at // SLOT * scales[3]))
    return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def widen(codes, q):
    """Return FP8 keys or values in the type of the queries, exactly; other types as they are.

    Where few rows share them, by way of float32: from float16, which is what codes become first, sm_90 has but a slow
    instruction to bfloat16. Many rows need the registers more.
    """
    if codes.dtype != q.dtype:
        codes = _as_wide(codes)
        if q.shape[0] <= 16:
            codes = codes.to(tl.float32)
    return codes.to(q.dtype)


@triton.jit
def add_block(best, total, acc, scores, v, scales, at, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Add a block's values, weighted by its scores, which are powers of two.

    Args:
        v: in the type they are multiplied in; FP8 is widened to it.
        scales: as `load_scales` takes them; the values' go to the weights: exact, as powers of two are.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(scores - pivot[:, None]).to(v.dtype)
    shrink = tl.exp2(best - pivot)
    # The sum is a product with ones: its order is the matrix instruction's, not that of however many warps there are.
    ones = tl.full([BLOCK, 16], 1.0, tl.float32).to(v.dtype)
    total = tl.dot(weight, ones, total * shrink[:, None], input_precision="ieee")
    if scales[1] is not None:
        weight = (weight.to(tl.float32) * load_scales(scales, at, 1, SLOT)[None, :]).to(v.dtype)
    acc = tl.dot(weight, v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def attend_block(
    best, total, acc, q, k_ptr, v_ptr, scales, at, own_R, ancestors_R, start, end, scale, first_R,
    WIDTH: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the BLOCK keys at the offsets `at`; those past the end are hidden.

    Args:
        scales: of FP8 keys and values, as `load_scales` takes them.
    """
    column = tl.arange(0, D)
    if D != WIDTH:
        column = tl.minimum(column, WIDTH - 1)  # queries are zero beyond the width
    k = tl.load(k_ptr + at[None, :] + column[:, None])
    v = tl.load(v_ptr + at[:, None] + column[None, :])
    scores = tl.dot(q, widen(k, q), input_precision="ieee") * scale
    if scales[0] is not None:
        scores = scores * load_scales(scales, at, 0, SLOT)[None, :]
        v = widen(v, q)
    if MASKED:
        scores = hide(scores, start + tl.arange(0, BLOCK), own_R, ancestors_R, end, first_R, HAS_WINDOW)
    return add_block(best, total, acc, scores, v, scales, at, SLOT, BLOCK)


@triton.jit
def merge(best, total, acc, best_s, total_s, acc_s):
    """Add a later split's result; total is [rows], acc [rows, D]."""
    new_best = tl.maximum(best, best_s)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    a, b = tl.exp2(best - pivot), tl.exp2(best_s - pivot)
    return new_best, total * a + total_s * b, acc * a[:, None] + acc_s * b[:, None]
