"""Paged attention for decoding and verifying: several programs share a request's keys, the last one merges them.

What there is to look up (whose queries, which pages) was written before the kernel before this one, so a program reads
it, and asks for its first keys and values, while that kernel still runs.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_blocks import DESCRIPTION, attend_block, find_request, key_offsets, merge
from slipstream.kernels.triton.launch import arrived_last, let_next_start, prefetch, wait_for_previous


@triton.jit
def _prefetch_block(k_ptr, v_ptr, at, WIDTH: tl.constexpr):
    """Ask for the keys and values at these offsets."""
    LINE: tl.constexpr = 128 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    for column in tl.static_range(0, WIDTH, LINE):
        prefetch(k_ptr + at + column)
        prefetch(v_ptr + at + column)


@triton.jit
def _stored(sums_at, part_at, place, count, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Return the result of a split as another program has stored it; past the last one, of a split nobody sees."""
    is_there = real & (place < count)
    best = tl.load(sums_at + place * (2 * ROWS), mask=is_there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums_at + place * (2 * ROWS) + ROWS, mask=is_there, other=0.0, cache_modifier=".cg")
    acc = tl.load(part_at + place * (ROWS * D), mask=is_there[:, None], other=0.0, cache_modifier=".cg")
    return best, total, acc


@triton.jit
def _merge_stored(sums_at, part_at, count, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Merge the results of `count` splits in their order; four are read at a time."""
    best, total, acc = _stored(sums_at, part_at, 0, count, real, ROWS, D)
    for place in range(1, count, 4):
        best_0, total_0, acc_0 = _stored(sums_at, part_at, place, count, real, ROWS, D)
        best_1, total_1, acc_1 = _stored(sums_at, part_at, place + 1, count, real, ROWS, D)
        best_2, total_2, acc_2 = _stored(sums_at, part_at, place + 2, count, real, ROWS, D)
        best_3, total_3, acc_3 = _stored(sums_at, part_at, place + 3, count, real, ROWS, D)
        best, total, acc = merge(best, total, acc, best_0, total_0, acc_0)
        best, total, acc = merge(best, total, acc, best_1, total_1, acc_1)
        best, total, acc = merge(best, total, acc, best_2, total_2, acc_2)
        best, total, acc = merge(best, total, acc, best_3, total_3, acc_3)
    return best, total, acc


@triton.jit(
    do_not_specialize=["num_requests", "num_splits", "each", "pages_stride", "window"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def splits_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, num_requests, num_splits, each, slot_stride, pages_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to `each` consecutive splits of a tile's request; EARLY: look things up before the inputs are there."""
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
    request, q_from, q_to = find_request(starts_ptr, tile, num_requests, TOKENS, REQUESTS)
    q_first = q_from + (tile - (q_from // TOKENS + request)) * TOKENS
    row = tl.arange(0, ROWS)
    # Rows past the last query repeat it, and are not stored.
    last_token = tl.minimum(q_first + TOKENS, q_to) - 1
    token = tl.maximum(tl.minimum(q_first + row // REPEATS, last_token), 0)
    own = tl.load(index_ptr + token, cache_modifier=".cg").to(tl.int32)
    ancestors = tl.load(ancestors_ptr + token, cache_modifier=".cg")
    end = tl.minimum(tl.load(lens_ptr + request, cache_modifier=".cg"), tl.max(own, 0) + 1)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(tl.min(own, 0) - window + 1, 0) // SPLIT
    last_split = tl.cdiv(end, SPLIT)
    from_split = first_split + tl.program_id(2) * each
    to_split = tl.minimum(from_split + each, last_split)
    busy = (q_first < q_to) & (from_split < to_split)
    pages_at = pages_ptr + request.to(tl.int64) * pages_stride
    k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
    at = key_offsets(pages_at, slot_stride, tl.minimum(from_split * SPLIT, tl.maximum(end - 1, 0)), end, BLOCK, PAGE)
    if EARLY:
        if PDL and busy:
            _prefetch_block(k_at, v_at, at, WIDTH)
        # Programs past a context's end leave at once, to make room; the first of a tile waits even so, that whoever
        # waits for this kernel has waited for those before.
        if busy | (tl.program_id(2) == 0):
            wait_for_previous(PDL)
    if busy:
        column = tl.arange(0, D)
        q_at = (token.to(tl.int64) * HEADS + group * REPEATS + row % REPEATS)[:, None] * WIDTH + column[None, :]
        real = q_first + row // REPEATS <= last_token
        cell = tile.to(tl.int64) * GROUPS + group
        sums_at = sums_ptr + cell * num_splits * (2 * ROWS) + row
        part_at = partial_ptr + cell * num_splits * (ROWS * D) + (row[:, None] * D + column[None, :])
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, 16], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for start in range(from_split * SPLIT, tl.minimum(to_split * SPLIT, end), BLOCK):
            # Queries are read along with the keys: before the loop they would hold the keys up.
            if D == WIDTH:
                q = tl.load(q_ptr + q_at)
            else:
                q = tl.load(q_ptr + q_at, mask=(column < WIDTH)[None, :], other=0.0)
            next_at = key_offsets(pages_at, slot_stride, start + BLOCK, end, BLOCK, PAGE)
            best, total, acc = attend_block(
                best, total, acc, q, k_at, v_at, at, own, ancestors, start, end, scale, window,
                WIDTH, D, BLOCK, HAS_WINDOW, True,
            )  # fmt: skip
            at = next_at
            if ((start + BLOCK) % SPLIT == 0) | (start + BLOCK >= end):
                place = start // SPLIT - first_split
                tl.store(sums_at + place * (2 * ROWS), best, mask=real)
                tl.store(sums_at + place * (2 * ROWS) + ROWS, tl.max(total, 1), mask=real)
                tl.store(part_at + place * (ROWS * D), acc, mask=real[:, None])
                best = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS, 16], tl.float32)
                acc = tl.zeros([ROWS, D], tl.float32)
        if arrived_last(counter_ptr + cell, tl.cdiv(last_split - first_split, each)):
            best, sums, acc = _merge_stored(sums_at, part_at, last_split - first_split, real, ROWS, D)
            out = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
            is_out = real[:, None] & (column < WIDTH)[None, :]
            tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_out)
