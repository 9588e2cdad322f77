"""Paged attention for decoding and verifying: several programs share a request's keys, the last one merges them.

What there is to look up (whose queries, which pages) was written before the kernel before this one, so a program reads
it, and prefetches its first keys and values, while that kernel still runs.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.attention.merge import merge_compact, merge_stored, merge_streamed
from slipstream.kernels.triton.attention.tile import (
    DESCRIPTION,
    attend_block,
    find_request,
    first_seen,
    key_offsets,
    merge,
    nothing,
)
from slipstream.kernels.triton.launch import (
    arrived_last,
    let_next_start,
    prefetch,
    prefetch_bytes,
    wait_for_previous,
)


@triton.jit
def prefetch_block(k_ptr, v_ptr, at, WIDTH: tl.constexpr, BULK: tl.constexpr):
    """Prefetch the keys and values at these offsets; BULK: by TMA, a request each."""
    ITEM: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    if BULK:
        first = tl.where(tl.arange(0, 2) == 0, k_ptr.to(tl.int64), v_ptr.to(tl.int64))
        prefetch_bytes(first[None, :] + at[:, None] * ITEM, WIDTH * ITEM)
    else:
        for column in tl.static_range(0, WIDTH, 128 // ITEM):
            prefetch(k_ptr + at + column)
            prefetch(v_ptr + at + column)


@triton.jit
def store_result(best, total, acc, sums_at, part_at, place, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Store a result: its maximum, its sum and its values."""
    tl.store(sums_at + place * (2 * ROWS), best, mask=real)
    tl.store(sums_at + place * (2 * ROWS) + ROWS, total, mask=real)
    tl.store(part_at + place * (ROWS * D), acc, mask=real[:, None])


@triton.jit
def load_queries(q_at, WIDTH: tl.constexpr, D: tl.constexpr):
    """Return the queries at these places, zero beyond the width."""
    if D == WIDTH:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=(tl.arange(0, D) < WIDTH)[None, :], other=0.0)
    return q


@triton.jit
def _attend_splits(
    q_at, k_at, v_at, scales, at, pages_at, slot_stride, own, ancestors, from_split, to_split,
    first_split, last_split, end, scale, first, sums_at, part_at, real,
    WIDTH: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to the splits from_split..to_split, whose first keys are `at`; store the result of each, or of groups."""
    if WHOLE:
        q = load_queries(q_at, WIDTH, D)
    best, _, acc = nothing(ROWS, D)
    group_best, group_total, group_acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for start in range(from_split * SPLIT, tl.minimum(to_split * SPLIT, end), BLOCK):
        if not WHOLE:  # read along with the keys: before so short a loop they would hold the keys up
            q = load_queries(q_at, WIDTH, D)
        here = at
        at = key_offsets(pages_at, slot_stride, start + BLOCK, end, BLOCK, PAGE, True)
        best, total, acc = attend_block(
            best, total, acc, q, k_at, v_at, scales, here, own, ancestors, start, end, scale, first,
            WIDTH, D, SLOT, BLOCK, HAS_WINDOW, True,
        )  # fmt: skip
        if ((start + BLOCK) % SPLIT == 0) | (start + BLOCK >= end):
            split, sums = start // SPLIT, tl.max(total, 1)
            if WHOLE:
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best, sums, acc)
                if ((split + 1) % IN_GROUP == 0) | (split + 1 == last_split):
                    place = split // IN_GROUP - first_split // IN_GROUP
                    store_result(group_best, group_total, group_acc, sums_at, part_at, place, real, ROWS, D)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            else:
                place = split - first_split // IN_GROUP * IN_GROUP
                store_result(best, sums, acc, sums_at, part_at, place, real, ROWS, D)
            best, sums, acc = nothing(ROWS, D)
            total = tl.zeros([ROWS, 16], tl.float32)


@triton.jit
def _share(first_split, last_split, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr):
    """Return where programs' shares begin, and how many splits one has: 1, or several or groups, shared out evenly."""
    aligned, each = first_split, 1
    if WHOLE:  # as many groups as there really are
        aligned = first_split // IN_GROUP * IN_GROUP
        groups = tl.cdiv(last_split - aligned, IN_GROUP)
        each = tl.maximum(tl.cdiv(groups, tl.num_programs(2)), 1) * IN_GROUP
    elif SHARED:
        each = tl.maximum(tl.cdiv(last_split - first_split, tl.num_programs(2)), 1)
    return aligned, each


@triton.jit(
    do_not_specialize=["num_requests", "num_splits", "pages_stride", "scale_stride", "window"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def splits_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr,
    sums_ptr, partial_ptr, counter_ptr, maxima_ptr, num_requests, num_splits, slot_stride, pages_stride, scale_step,
    scale_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
    SHARED: tl.constexpr, BULK: tl.constexpr, COMPACT: tl.constexpr, MAXIMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a tile's request, or with WHOLE to this program's share of its groups of splits.

    Args:
        ONE: every request's queries fit one tile, so a tile is a request.
        EARLY: look things up before the inputs are there.
        SHARED: there may be more splits than programs, which then take several, and store the result of each.
        BULK: the first keys and values are prefetched by TMA.
        COMPACT: a tile has one query, and results are merged in tiles of so many rows; 0: in tiles of ROWS.
        MAXIMA: leave the largest magnitude of each head's output.
    """
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
    scales = (k_scales_ptr, v_scales_ptr, group * scale_stride, scale_step)
    if ONE:
        request = tile
        q_first = tl.load(starts_ptr + tile, cache_modifier=".cg")
        q_to = tl.load(starts_ptr + tile + 1, cache_modifier=".cg")
    else:
        request, q_from, q_to = find_request(starts_ptr, tile, num_requests, TOKENS, REQUESTS)
        q_first = q_from + (tile - (q_from // TOKENS + request)) * TOKENS
    row = tl.arange(0, ROWS)
    # Rows past the last query repeat it, and are not stored.
    last_token = tl.minimum(q_first + TOKENS, q_to) - 1
    token = tl.maximum(tl.minimum(q_first + row // REPEATS, last_token), 0)
    own = tl.load(index_ptr + token, cache_modifier=".cg").to(tl.int32)
    ancestors = tl.load(ancestors_ptr + token, cache_modifier=".cg")
    end = tl.minimum(tl.load(lens_ptr + request, cache_modifier=".cg"), tl.max(own, 0) + 1)
    first, first_split = tl.zeros_like(own), 0
    if HAS_WINDOW:
        first = first_seen(own, ancestors, window, 0)
        first_split = tl.min(first, 0) // SPLIT
    last_split = tl.cdiv(end, SPLIT)
    aligned, each = _share(first_split, last_split, IN_GROUP, WHOLE, SHARED)
    to_split = tl.minimum(aligned + (tl.program_id(2) + 1) * each, last_split)
    from_split = tl.maximum(aligned + tl.program_id(2) * each, first_split)
    busy = (q_first < q_to) & (from_split < to_split)
    pages_at = pages_ptr + request.to(tl.int64) * pages_stride
    k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
    first_key = tl.minimum(from_split * SPLIT, tl.maximum(end - 1, 0))
    at = key_offsets(pages_at, slot_stride, first_key, end, BLOCK, PAGE)
    if EARLY:
        if PDL and busy and not WHOLE:
            prefetch_block(k_at, v_at, at, WIDTH, BULK)
        # Programs past a context's end leave at once, to free their SM; the first of a tile waits even so, that whoever
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
        _attend_splits(
            q_ptr + q_at, k_at, v_at, scales, at, pages_at, slot_stride, own, ancestors, from_split, to_split,
            first_split, last_split, end, scale, first, sums_at, part_at, real,
            WIDTH, D, GROUPS * WIDTH, ROWS, SPLIT, BLOCK, PAGE, IN_GROUP, HAS_WINDOW, WHOLE,
        )  # fmt: skip
        if arrived_last(counter_ptr + cell, tl.cdiv(last_split - aligned, each)):
            finish_tile(
                out_ptr, maxima_ptr, sums_ptr, partial_ptr, cell, num_splits, group, q_first, last_token, first_split,
                last_split, HEADS, REPEATS, WIDTH, D, ROWS, IN_GROUP, WHOLE, COMPACT, MAXIMA, PDL,
            )  # fmt: skip


@triton.jit
def finish_tile(
    out_ptr, maxima_ptr, sums_ptr, partial_ptr, cell, num_splits, group, q_first, last_token, first_split, last_split,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    IN_GROUP: tl.constexpr, WHOLE: tl.constexpr, COMPACT: tl.constexpr, MAXIMA: tl.constexpr, PDL: tl.constexpr,
    STREAMED: tl.constexpr = 0,
):  # fmt: skip
    """Merge the results of a tile, and store its outputs.

    Args:
        STREAMED: if not 0, results are those of groups from the first on, and pass through shared memory in so many
            stages.
    """
    row, column = tl.arange(0, COMPACT if COMPACT else ROWS), tl.arange(0, D)
    real = q_first + row // REPEATS <= last_token
    token = tl.minimum(q_first + row // REPEATS, last_token).to(tl.int64)
    head = group * REPEATS + row % REPEATS
    sums_at = sums_ptr + cell * num_splits * (2 * ROWS) + row
    part_at = partial_ptr + cell * num_splits * (ROWS * D) + (row[:, None] * D + column[None, :])
    if COMPACT:
        sums, acc = merge_compact(
            sums_at, part_at, first_split, last_split, real, COMPACT, ROWS, D, IN_GROUP, WHOLE, PDL
        )
    elif STREAMED:
        count = tl.cdiv(last_split, IN_GROUP)
        sums, acc = merge_streamed(sums_at, part_at, count, real, ROWS, D, STREAMED)
    else:
        sums, acc = merge_stored(sums_at, part_at, first_split, last_split, real, ROWS, D, IN_GROUP, WHOLE)
    out = (acc / tl.where(sums == 0.0, 1.0, sums)[:, None]).to(out_ptr.dtype.element_ty)
    is_out = real[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :], out, mask=is_out)
    if MAXIMA:
        largest = tl.max(tl.where(is_out, tl.abs(out.to(tl.float32)), 0.0), 1)
        tl.store(maxima_ptr + token * HEADS + head, largest, mask=real)
