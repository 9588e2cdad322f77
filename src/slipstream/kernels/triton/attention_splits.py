"""Paged attention for decoding and verifying: several programs share a request's keys, the last one merges them.

What there is to look up (whose queries, which pages) was written before the kernel before this one, so a program reads
it, and asks for its first keys and values, while that kernel still runs.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_blocks import (
    DESCRIPTION,
    attend_block,
    find_request,
    key_offsets,
    merge,
    nothing,
)
from slipstream.kernels.triton.launch import arrived_last, let_next_start, prefetch, wait_for_previous


@triton.jit
def _prefetch_block(k_ptr, v_ptr, at, WIDTH: tl.constexpr):
    """Ask for the keys and values at these offsets."""
    LINE: tl.constexpr = 128 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    for column in tl.static_range(0, WIDTH, LINE):
        prefetch(k_ptr + at + column)
        prefetch(v_ptr + at + column)


@triton.jit
def _stored(sums_at, part_at, place, first, count, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Return a result as another program has stored it; before the first and past the last, that of no keys."""
    is_there = real & (place >= first) & (place < count)
    best = tl.load(sums_at + place * (2 * ROWS), mask=is_there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums_at + place * (2 * ROWS) + ROWS, mask=is_there, other=0.0, cache_modifier=".cg")
    acc = tl.load(part_at + place * (ROWS * D), mask=is_there[:, None], other=0.0, cache_modifier=".cg")
    return best, total, acc


@triton.jit
def _store(best, total, acc, sums_at, part_at, place, real, ROWS: tl.constexpr, D: tl.constexpr):
    tl.store(sums_at + place * (2 * ROWS), best, mask=real)
    tl.store(sums_at + place * (2 * ROWS) + ROWS, total, mask=real)
    tl.store(part_at + place * (ROWS * D), acc, mask=real[:, None])


@triton.jit
def _merge_four(best, total, acc, sums_at, part_at, place, first, count, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Merge four stored results in their order, all read at once where registers allow it."""
    if ROWS > 16:
        for other in range(place, place + 4):
            best_0, total_0, acc_0 = _stored(sums_at, part_at, other, first, count, real, ROWS, D)
            best, total, acc = merge(best, total, acc, best_0, total_0, acc_0)
    else:
        best_0, total_0, acc_0 = _stored(sums_at, part_at, place, first, count, real, ROWS, D)
        best_1, total_1, acc_1 = _stored(sums_at, part_at, place + 1, first, count, real, ROWS, D)
        best_2, total_2, acc_2 = _stored(sums_at, part_at, place + 2, first, count, real, ROWS, D)
        best_3, total_3, acc_3 = _stored(sums_at, part_at, place + 3, first, count, real, ROWS, D)
        best, total, acc = merge(best, total, acc, best_0, total_0, acc_0)
        best, total, acc = merge(best, total, acc, best_1, total_1, acc_1)
        best, total, acc = merge(best, total, acc, best_2, total_2, acc_2)
        best, total, acc = merge(best, total, acc, best_3, total_3, acc_3)
    return best, total, acc


@triton.jit
def _merge_stored(
    sums_at, part_at, first_split, last_split, real,
    ROWS: tl.constexpr, D: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Merge all results, of groups (WHOLE) or of splits, in their order; places count from the first's group on."""
    best, total, acc = nothing(ROWS, D)
    first_group, end_group = first_split // IN_GROUP, tl.cdiv(last_split, IN_GROUP)
    if WHOLE:
        for place in range(0, end_group - first_group, 4):
            best, total, acc = _merge_four(
                best, total, acc, sums_at, part_at, place, 0, end_group - first_group, real, ROWS, D
            )
    else:
        before = first_group * IN_GROUP
        for place in range(0, last_split - before, IN_GROUP):
            group_best, group_total, group_acc = nothing(ROWS, D)
            group_best, group_total, group_acc = _merge_four(
                group_best, group_total, group_acc, sums_at, part_at, place, first_split - before,
                last_split - before, real, ROWS, D,
            )  # fmt: skip
            best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
    return best, total, acc


@triton.jit
def _queries(q_at, WIDTH: tl.constexpr, D: tl.constexpr):
    if D == WIDTH:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=(tl.arange(0, D) < WIDTH)[None, :], other=0.0)
    return q


@triton.jit
def _attend_splits(
    q_at, k_at, v_at, at, pages_at, slot_stride, own, ancestors, from_split, to_split, first_split, last_split, end,
    scale, window, sums_at, part_at, real,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to the splits from_split..to_split, whose first keys are `at`; store the result of each, or of groups."""
    if WHOLE:
        q = _queries(q_at, WIDTH, D)
    best, _, acc = nothing(ROWS, D)
    group_best, group_total, group_acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for start in range(from_split * SPLIT, tl.minimum(to_split * SPLIT, end), BLOCK):
        if not WHOLE:  # read along with the keys: before so short a loop they would hold the keys up
            q = _queries(q_at, WIDTH, D)
        next_at = key_offsets(pages_at, slot_stride, start + BLOCK, end, BLOCK, PAGE)
        best, total, acc = attend_block(
            best, total, acc, q, k_at, v_at, at, own, ancestors, start, end, scale, window,
            WIDTH, D, BLOCK, HAS_WINDOW, True,
        )  # fmt: skip
        at = next_at
        if ((start + BLOCK) % SPLIT == 0) | (start + BLOCK >= end):
            split, sums = start // SPLIT, tl.max(total, 1)
            if WHOLE:
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best, sums, acc)
                if ((split + 1) % IN_GROUP == 0) | (split + 1 == last_split):
                    place = split // IN_GROUP - first_split // IN_GROUP
                    _store(group_best, group_total, group_acc, sums_at, part_at, place, real, ROWS, D)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            else:
                place = split - first_split // IN_GROUP * IN_GROUP
                _store(best, sums, acc, sums_at, part_at, place, real, ROWS, D)
            best, sums, acc = nothing(ROWS, D)
            total = tl.zeros([ROWS, 16], tl.float32)


@triton.jit
def _share(first_split, last_split, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """Return where programs' shares begin, and how many splits one has: 1, or groups, shared out evenly."""
    aligned, each = first_split, 1
    if WHOLE:  # as many groups as there really are
        aligned = first_split // IN_GROUP * IN_GROUP
        groups = tl.cdiv(last_split - aligned, IN_GROUP)
        each = tl.maximum(tl.cdiv(groups, tl.num_programs(2)), 1) * IN_GROUP
    return aligned, each


@triton.jit(
    do_not_specialize=["num_requests", "num_splits", "pages_stride", "window"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def splits_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, maxima_ptr, num_requests, num_splits, slot_stride, pages_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
    MAXIMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a tile's request, or with WHOLE to this program's share of its groups of splits.

    Args:
        ONE: every request's queries fit one tile, so a tile is a request.
        EARLY: look things up before the inputs are there.
        MAXIMA: leave the largest magnitude of each head's output.
    """
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
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
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(tl.min(own, 0) - window + 1, 0) // SPLIT
    last_split = tl.cdiv(end, SPLIT)
    aligned, each = _share(first_split, last_split, IN_GROUP, WHOLE)
    to_split = tl.minimum(aligned + (tl.program_id(2) + 1) * each, last_split)
    from_split = tl.maximum(aligned + tl.program_id(2) * each, first_split)
    busy = (q_first < q_to) & (from_split < to_split)
    pages_at = pages_ptr + request.to(tl.int64) * pages_stride
    k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
    at = key_offsets(pages_at, slot_stride, tl.minimum(from_split * SPLIT, tl.maximum(end - 1, 0)), end, BLOCK, PAGE)
    if EARLY:
        if PDL and busy and not WHOLE:
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
        _attend_splits(
            q_ptr + q_at, k_at, v_at, at, pages_at, slot_stride, own, ancestors, from_split, to_split, first_split,
            last_split, end, scale, window, sums_at, part_at, real,
            WIDTH, D, ROWS, SPLIT, BLOCK, PAGE, IN_GROUP, HAS_WINDOW, WHOLE,
        )  # fmt: skip
        if arrived_last(counter_ptr + cell, tl.cdiv(last_split - aligned, each)):
            _, sums, acc = _merge_stored(sums_at, part_at, first_split, last_split, real, ROWS, D, IN_GROUP, WHOLE)
            out = (acc / tl.where(sums == 0.0, 1.0, sums)[:, None]).to(out_ptr.dtype.element_ty)
            is_out = real[:, None] & (column < WIDTH)[None, :]
            tl.store(out_ptr + q_at, out, mask=is_out)
            if MAXIMA:
                largest = tl.max(tl.where(is_out, tl.abs(out.to(tl.float32)), 0.0), 1)
                head = group * REPEATS + row % REPEATS
                tl.store(maxima_ptr + token.to(tl.int64) * HEADS + head, largest, mask=real)
