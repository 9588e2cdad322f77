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
    first_key_of,
    key_offsets,
    merge,
    nothing,
    piece_ends,
    piece_of,
)
from slipstream.kernels.triton.attention_merge import merge_compact, merge_stored
from slipstream.kernels.triton.launch import (
    arrived_last,
    let_next_start,
    prefetch,
    prefetch_bytes,
    wait_for_previous,
)


@triton.jit
def _prefetch_block(k_ptr, v_ptr, at, WIDTH: tl.constexpr, BULK: tl.constexpr):
    """Ask for the keys and values at these offsets; BULK: of the copy engine, a request each."""
    ITEM: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    if BULK:
        first = tl.where(tl.arange(0, 2) == 0, k_ptr.to(tl.int64), v_ptr.to(tl.int64))
        prefetch_bytes(first[None, :] + at[:, None] * ITEM, WIDTH * ITEM)
    else:
        for column in tl.static_range(0, WIDTH, 128 // ITEM):
            prefetch(k_ptr + at + column)
            prefetch(v_ptr + at + column)


@triton.jit
def _store(best, total, acc, sums_at, part_at, place, real, ROWS: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr):
    """Store a result; HALVES: first the even columns of the values, then the odd ones, in half the fast memory."""
    tl.store(sums_at + place * (2 * ROWS), best, mask=real)
    tl.store(sums_at + place * (2 * ROWS) + ROWS, total, mask=real)
    if HALVES:
        even, odd = acc.reshape(ROWS, D // 2, 2).split()
        tl.store(part_at + place * (ROWS * D), even, mask=real[:, None])
        tl.store(part_at + place * (ROWS * D) + D // 2, odd, mask=real[:, None])
    else:
        tl.store(part_at + place * (ROWS * D), acc, mask=real[:, None])


@triton.jit
def _queries(q_at, WIDTH: tl.constexpr, D: tl.constexpr):
    if D == WIDTH:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=(tl.arange(0, D) < WIDTH)[None, :], other=0.0)
    return q


@triton.jit
def _attend_splits(
    q_at, k_at, v_at, at, pages_at, slot_stride, own, ancestors, from_part, to_part, first_place, end, scale, window,
    sums_at, part_at, real,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, FAR: tl.constexpr,
    FAR_FROM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr, FAR_WHOLE: tl.constexpr, CACHED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Attend to the splits from_part..to_part, whose first keys are `at`; store the result of each, or of groups.

    With FAR, from_part..to_part are keys.
    """
    UNIT: tl.constexpr = 1 if FAR else SPLIT
    if WHOLE:
        q = _queries(q_at, WIDTH, D)
    best, _, acc = nothing(ROWS, D)
    group_best, group_total, group_acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for start in range(from_part * UNIT, tl.minimum(to_part * UNIT, end), BLOCK):
        if not WHOLE:  # read along with the keys: before so short a loop they would hold the keys up
            q = _queries(q_at, WIDTH, D)
        here = at
        at = key_offsets(pages_at, slot_stride, start + BLOCK, end, BLOCK, PAGE, CACHED)
        best, total, acc = attend_block(
            best, total, acc, q, k_at, v_at, here, own, ancestors, start, end, scale, window,
            WIDTH, D, BLOCK, HAS_WINDOW, True,
        )  # fmt: skip
        if piece_ends(start + BLOCK, SPLIT, FAR, FAR_FROM) | (start + BLOCK >= end):
            split, sums = piece_of(start, SPLIT, FAR, FAR_FROM), tl.max(total, 1)
            if WHOLE:
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best, sums, acc)
                if FAR:
                    far_group: tl.constexpr = FAR * IN_GROUP if FAR_WHOLE else FAR
                    is_last = piece_ends(start + BLOCK, SPLIT * IN_GROUP, far_group, FAR_FROM) | (start + BLOCK >= end)
                    place = piece_of(start, SPLIT * IN_GROUP, far_group, FAR_FROM) - first_place
                else:
                    is_last = ((split + 1) % IN_GROUP == 0) | (split + 1 == tl.cdiv(end, SPLIT))
                    place = split // IN_GROUP - first_place
                if is_last:
                    _store(group_best, group_total, group_acc, sums_at, part_at, place, real, ROWS, D, HALVES)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            else:
                place = split - first_place
                _store(best, sums, acc, sums_at, part_at, place, real, ROWS, D, HALVES)
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


@triton.jit
def _next_result(key, NEAR: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr):
    """Return the first key from this one on that begins a stored result."""
    return tl.where(key <= FAR_FROM, tl.cdiv(key, NEAR) * NEAR, tl.cdiv(key, FAR) * FAR)


@triton.jit
def _share_keys(first_seen, end, NEAR: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr):
    """Return where programs' shares begin, and how many keys one has, where results are of NEAR and of FAR keys.

    A share ends where a result does, and has at least the longest one's keys, so none between two others is empty.
    """
    aligned = first_key_of(piece_of(first_seen, NEAR, FAR, FAR_FROM), NEAR, FAR, FAR_FROM)
    each = tl.cdiv(tl.cdiv(end - aligned, tl.num_programs(2)), NEAR) * NEAR
    return aligned, tl.maximum(each, tl.where(end > FAR_FROM, tl.maximum(NEAR, FAR), NEAR))


@triton.jit
def _own_part(
    first_seen, end, SPLIT: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr, IN_GROUP: tl.constexpr,
    WHOLE: tl.constexpr, FAR_WHOLE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Return what of the splits is this program's, where all shares begin and end, and how long one is.

    With FAR, all are in keys, and the end is that of the first key of the last result.
    """
    first_split = piece_of(first_seen, SPLIT, FAR, FAR_FROM)
    if FAR:
        near: tl.constexpr = SPLIT * IN_GROUP if WHOLE else SPLIT
        far: tl.constexpr = FAR * IN_GROUP if FAR_WHOLE else FAR
        aligned, each = _share_keys(first_seen, end, near, far, FAR_FROM)
        last = first_key_of(piece_of(tl.maximum(end - 1, 0), near, far, FAR_FROM), near, far, FAR_FROM) + 1
        from_part = _next_result(aligned + tl.program_id(2) * each, near, far, FAR_FROM)
        from_part = tl.maximum(from_part, first_key_of(first_split, SPLIT, FAR, FAR_FROM))
        to_part = tl.minimum(_next_result(aligned + (tl.program_id(2) + 1) * each, near, far, FAR_FROM), end)
    else:
        last = tl.cdiv(end, SPLIT)
        aligned, each = _share(first_split, last, IN_GROUP, WHOLE, SHARED)
        to_part = tl.minimum(aligned + (tl.program_id(2) + 1) * each, last)
        from_part = tl.maximum(aligned + tl.program_id(2) * each, first_split)
    return from_part, to_part, aligned, last, each


@triton.jit
def _result_of(
    key, SPLIT: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
    FAR_WHOLE: tl.constexpr,
):  # fmt: skip
    """Return which result a key is part of, of all that are ever stored of its request."""
    if FAR:
        near: tl.constexpr = SPLIT * IN_GROUP if WHOLE else SPLIT
        far: tl.constexpr = FAR * IN_GROUP if FAR_WHOLE else FAR
        result = piece_of(key, near, far, FAR_FROM)
    else:
        result = key // SPLIT
        if WHOLE:
            result = result // IN_GROUP
    return result


@triton.jit
def _num_results(
    end, SPLIT: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
    FAR_WHOLE: tl.constexpr,
):  # fmt: skip
    """Return how many results there are of the keys before `end`."""
    if FAR:
        count = _result_of(tl.maximum(end - 1, 0), SPLIT, FAR, FAR_FROM, IN_GROUP, WHOLE, FAR_WHOLE) + 1
    else:
        count = tl.cdiv(end, SPLIT)
        if WHOLE:
            count = tl.cdiv(count, IN_GROUP)
    return count


@triton.jit(
    do_not_specialize=["num_requests", "num_splits", "pages_stride", "window"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def splits_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, maxima_ptr, num_requests, num_splits, slot_stride, pages_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, WHOLE: tl.constexpr,
    FAR_WHOLE: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr, SHARED: tl.constexpr, BULK: tl.constexpr,
    CACHED: tl.constexpr, HALVES: tl.constexpr, COMPACT: tl.constexpr, MAXIMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a tile's request, or with WHOLE to this program's share of its groups of splits.

    Args:
        FAR: keys of a split from key FAR_FROM on; 0: SPLIT. If not 0, programs share the keys evenly.
        FAR_WHOLE: with WHOLE, results of far keys are those of groups, too; else those of splits.
        ONE: every request's queries fit one tile, so a tile is a request.
        EARLY: look things up before the inputs are there.
        SHARED: there may be more splits than programs, which then take several, and store the result of each.
        BULK: the copy engine is asked for the first keys and values.
        CACHED: pages but for the first are read through the nearest cache.
        HALVES: even and odd columns of results are stored one after another.
        COMPACT: a tile has one query, and results are merged in tiles of so many rows; 0: in tiles of ROWS.
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
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(tl.min(own, 0) - window + 1, 0)
    from_part, to_part, aligned, last, each = _own_part(
        first_seen, end, SPLIT, FAR, FAR_FROM, IN_GROUP, WHOLE, FAR_WHOLE, SHARED
    )
    busy = (q_first < q_to) & (from_part < to_part)
    pages_at = pages_ptr + request.to(tl.int64) * pages_stride
    k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
    first_key = tl.minimum(from_part * (1 if FAR else SPLIT), tl.maximum(end - 1, 0))
    at = key_offsets(pages_at, slot_stride, first_key, end, BLOCK, PAGE)
    if EARLY:
        if PDL and busy and not WHOLE:
            _prefetch_block(k_at, v_at, at, WIDTH, BULK)
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
        stored = tl.arange(0, D // 2) if HALVES else column
        part_at = partial_ptr + cell * num_splits * (ROWS * D) + (row[:, None] * D + stored[None, :])
        first = _result_of(first_seen, SPLIT, FAR, FAR_FROM, IN_GROUP, WHOLE, FAR_WHOLE)
        first_place = first if FAR_WHOLE else first // IN_GROUP * IN_GROUP  # splits' results are merged by their groups
        _attend_splits(
            q_ptr + q_at, k_at, v_at, at, pages_at, slot_stride, own, ancestors, from_part, to_part, first_place, end,
            scale, window, sums_at, part_at, real, WIDTH, D, ROWS, SPLIT, FAR, FAR_FROM, BLOCK, PAGE, IN_GROUP,
            HAS_WINDOW, WHOLE, FAR_WHOLE, CACHED, HALVES,
        )  # fmt: skip
        if arrived_last(counter_ptr + cell, tl.cdiv(last - aligned, each)):
            count = _num_results(end, SPLIT, FAR, FAR_FROM, IN_GROUP, WHOLE, FAR_WHOLE) - first_place
            _finish_tile(
                out_ptr, maxima_ptr, sums_ptr, partial_ptr, cell, num_splits, group, q_first, last_token,
                first - first_place, count, FAR_FROM // (SPLIT * IN_GROUP) - first_place, HEADS, REPEATS, WIDTH, D,
                ROWS, IN_GROUP, WHOLE, WHOLE and not FAR_WHOLE, HALVES, COMPACT, MAXIMA, PDL,
            )  # fmt: skip


@triton.jit
def _finish_tile(
    out_ptr, maxima_ptr, sums_ptr, partial_ptr, cell, num_splits, group, q_first, last_token, first, count, serial,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    IN_GROUP: tl.constexpr, WHOLE: tl.constexpr, MIXED: tl.constexpr, HALVES: tl.constexpr, COMPACT: tl.constexpr,
    MAXIMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the results of a tile at the places first..count, and store its outputs."""
    row, column = tl.arange(0, COMPACT if COMPACT else ROWS), tl.arange(0, D)
    real = q_first + row // REPEATS <= last_token
    token = tl.minimum(q_first + row // REPEATS, last_token).to(tl.int64)
    head = group * REPEATS + row % REPEATS
    sums_at = sums_ptr + cell * num_splits * (2 * ROWS) + row
    part_at = partial_ptr + cell * num_splits * (ROWS * D) + (row[:, None] * D + column[None, :])
    if COMPACT:
        sums, acc = merge_compact(sums_at, part_at, first, count, serial, real, COMPACT, ROWS, D, WHOLE, MIXED, PDL)
    else:
        sums, acc = merge_stored(sums_at, part_at, first, count, serial, real, ROWS, D, IN_GROUP, WHOLE, MIXED)
    out = (acc / tl.where(sums == 0.0, 1.0, sums)[:, None]).to(out_ptr.dtype.element_ty)
    if HALVES:
        column = column % (D // 2) * 2 + column // (D // 2)
    is_out = real[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :], out, mask=is_out)
    if MAXIMA:
        largest = tl.max(tl.where(is_out, tl.abs(out.to(tl.float32)), 0.0), 1)
        tl.store(maxima_ptr + token * HEADS + head, largest, mask=real)
