"""Paged attention for many requests: as many programs as run at a time, each with an even part of all requests' keys.

The groups of splits of all requests are one list, cut as evenly as groups allow; a program takes its part for one head
of keys, from request to request, and prefetches the next block. What programs store and merge are the results of
groups, as in `split_kv`, so the bits are the same.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.attention.split_kv import finish_tile, load_queries, store_result
from slipstream.kernels.triton.attention.tile import (
    DESCRIPTION,
    add_block,
    hide,
    load_scales,
    merge,
    nothing,
    widen,
)
from slipstream.kernels.triton.launch import arrived_last_at, let_next_start, wait_for_previous

_STREAMED = tl.constexpr(5)  # stages in which the last of a request's programs reads its results


@triton.jit
def _ends(
    starts_ptr, lens_ptr, index_ptr, num_requests, TOKENS: tl.constexpr, REQUESTS: tl.constexpr, QUERIES: tl.constexpr
):
    """Return the end of the keys that each request's queries see: [REQUESTS]; 0 without queries."""
    r, j = tl.arange(0, REQUESTS), tl.arange(0, QUERIES)
    there = r < num_requests
    first = tl.load(starts_ptr + r, mask=there, other=0, cache_modifier=".cg")
    to = tl.load(starts_ptr + r + 1, mask=there, other=0, cache_modifier=".cg")
    lens = tl.load(lens_ptr + r, mask=there, other=0, cache_modifier=".cg")
    last = tl.minimum(first + TOKENS, to) - 1
    token = tl.maximum(tl.minimum(first[:, None] + j[None, :], last[:, None]), 0)
    own = tl.load(index_ptr + token, mask=there[:, None], other=-1, cache_modifier=".cg").to(tl.int32)
    return tl.where(first < to, tl.minimum(lens, tl.max(own, 1) + 1), 0)


@triton.jit
def _at(values_R, request, REQUESTS: tl.constexpr):
    """Return one request's number."""
    return tl.sum(tl.where(tl.arange(0, REQUESTS) == request, values_R, 0), 0)


@triton.jit
def _tokens(q_first, last_token, ROWS: tl.constexpr, REPEATS: tl.constexpr):
    """Return the query of each row; rows past the last query repeat it."""
    return tl.maximum(tl.minimum(q_first + tl.arange(0, ROWS) // REPEATS, last_token), 0)


@triton.jit
def _tile_of(
    starts_ptr, lens_ptr, index_ptr, request, ROWS: tl.constexpr, TOKENS: tl.constexpr, REPEATS: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """Return a request's first and last query, the end of its keys, and the key from which on some row may not see one.

    Keys more than 63 before the lowest of the rows' own are seen by all rows.
    """
    way: tl.constexpr = "" if CACHED else ".cg"
    q_first = tl.load(starts_ptr + request, cache_modifier=way)
    q_to = tl.load(starts_ptr + request + 1, cache_modifier=way)
    last_token = tl.minimum(q_first + TOKENS, q_to) - 1
    own = tl.load(index_ptr + _tokens(q_first, last_token, ROWS, REPEATS), cache_modifier=way).to(tl.int32)
    end = tl.minimum(tl.load(lens_ptr + request, cache_modifier=way), tl.max(own, 0) + 1)
    end = tl.where(q_first < q_to, end, 0)
    return q_first, last_token, end, tl.minimum(tl.min(own, 0) - 63, end)


@triton.jit
def _queries_at(
    q_ptr, q_first, last_token, group, HEADS: tl.constexpr, REPEATS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = _tokens(q_first, last_token, ROWS, REPEATS).to(tl.int64)
    head = group * REPEATS + tl.arange(0, ROWS) % REPEATS
    return load_queries(q_ptr + (token * HEADS + head)[:, None] * WIDTH + tl.arange(0, D)[None, :], WIDTH, D)


@triton.jit
def _pages(pages_at, start, end, BLOCK: tl.constexpr, PAGE: tl.constexpr, CACHED: tl.constexpr):
    """Return the pages that a block's keys lie in, one after another; past the end, that of the last key."""
    PAGES: tl.constexpr = (BLOCK + PAGE - 1) // PAGE
    place = tl.minimum(start // PAGE + tl.arange(0, PAGES), (end - 1) // PAGE)
    return tl.load(pages_at + place, cache_modifier="" if CACHED else ".cg")


@triton.jit
def _offsets(page, slot_stride, start, end, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Return where in the cache the keys of a block in these pages lie; past the end, where the last one does."""
    PAGES: tl.constexpr = (BLOCK + PAGE - 1) // PAGE
    key = tl.minimum(start + tl.arange(0, BLOCK), end - 1)
    page = tl.broadcast_to((page.to(tl.int64) * PAGE)[:, None], [PAGES, BLOCK // PAGES]).reshape(BLOCK)
    return (page + key % PAGE) * slot_stride


@triton.jit
def _attend_part(
    q_ptr, k_at, v_at, scales, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr,
    partial_ptr, num_requests, num_results, slot_stride, pages_stride, scale, group, request, start, num_blocks, q,
    page,
    q_first, last_token, end, sure,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr,
):  # fmt: skip
    """Attend to so many blocks from key `start` of a request on, and on into those after it; store groups' results.

    A block's pages are looked up when the block before is loaded: carried as they are read, since the compiler issues
    loads of what is computed from them right before it is needed.
    """
    REPEATS: tl.constexpr = HEADS // GROUPS
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    seen = column
    if D != WIDTH:
        seen = tl.minimum(column, WIDTH - 1)  # queries are zero beyond the width
    best, _, acc = nothing(ROWS, D)
    group_best, group_total, group_acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for _ in range(num_blocks):
        at = _offsets(page, slot_stride, start, tl.maximum(end, 1), BLOCK, PAGE)
        k = tl.load(k_at + at[None, :] + seen[:, None])
        v = tl.load(v_at + at[:, None] + seen[None, :])
        scores = tl.dot(q, widen(k, q), input_precision="ieee") * scale
        if scales[0] is not None:
            scores = scores * load_scales(scales, at, 0, GROUPS * WIDTH)[None, :]
            v = widen(v, q)
        if start + BLOCK > sure:
            token = _tokens(q_first, last_token, ROWS, REPEATS)
            own = tl.load(index_ptr + token).to(tl.int32)
            ancestors = tl.load(ancestors_ptr + token)
            scores = hide(scores, start + tl.arange(0, BLOCK), own, ancestors, end, 0, False)
        best, total, acc = add_block(best, total, acc, scores, v, scales, at, GROUPS * WIDTH, BLOCK)
        next_request, next_start = request, start + BLOCK
        next_first, next_last, next_end, next_sure = q_first, last_token, end, sure
        moves = next_start >= end
        if moves:
            next_request, next_start = tl.minimum(request + 1, num_requests - 1), 0
            next_first, next_last, next_end, next_sure = _tile_of(
                starts_ptr, lens_ptr, index_ptr, next_request, ROWS, TOKENS, REPEATS, True
            )
        pages_at = pages_ptr + next_request.to(tl.int64) * pages_stride
        page = _pages(pages_at, next_start, tl.maximum(next_end, 1), BLOCK, PAGE, True)
        if ((start + BLOCK) % SPLIT == 0) | moves:
            sums = tl.max(total, 1)
            group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best, sums, acc)
            if ((start + BLOCK) % (SPLIT * IN_GROUP) == 0) | moves:
                real = q_first + row // REPEATS <= last_token
                result = (request.to(tl.int64) * GROUPS + group) * num_results + start // (SPLIT * IN_GROUP)
                part_at = partial_ptr + result * (ROWS * D) + (row[:, None] * D + column[None, :])
                store_result(
                    group_best, group_total, group_acc, sums_ptr + result * (2 * ROWS) + row, part_at, 0, real, ROWS, D
                )
                group_best, group_total, group_acc = nothing(ROWS, D)
            best, sums, acc = nothing(ROWS, D)
            total = tl.zeros([ROWS, 16], tl.float32)
        if moves:
            q = _queries_at(q_ptr, next_first, next_last, group, HEADS, REPEATS, WIDTH, D, ROWS)
        request, start, q_first, last_token = next_request, next_start, next_first, next_last
        end, sure = next_end, next_sure


@triton.jit(
    do_not_specialize=["num_requests", "num_results", "pages_stride", "scale_stride"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def even_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr,
    sums_ptr, partial_ptr, counter_ptr, maxima_ptr, num_requests, num_results, slot_stride, pages_stride, scale_step,
    scale_stride, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, IN_GROUP: tl.constexpr, EARLY: tl.constexpr, COMPACT: tl.constexpr, MAXIMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend to this program's part of the groups of all requests, for its head of keys.

    Every request's queries fit one tile. One without queries counts as a group of one block that nobody sees, so that
    the next request is always the next number.

    Args:
        QUERIES: queries of a request at the most, or a larger power of two.
        EARLY, COMPACT, MAXIMA: see `splits_kernel`.
    """
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, part = tl.program_id(0), tl.program_id(1)
    scales = (k_scales_ptr, v_scales_ptr, group * scale_stride, scale_step)
    r = tl.arange(0, REQUESTS)
    ends_R = _ends(starts_ptr, lens_ptr, index_ptr, num_requests, TOKENS, REQUESTS, QUERIES)
    blocks_R = tl.where(r < num_requests, tl.maximum(tl.cdiv(ends_R, BLOCK), 1), 0)
    groups_R = tl.cdiv(blocks_R, SPLIT * IN_GROUP // BLOCK)
    until_R = tl.cumsum(groups_R, 0)
    before_R = until_R - groups_R
    num_groups = tl.sum(groups_R, 0)
    num_parts = tl.minimum(tl.num_programs(1), num_groups)
    # Part p's groups begin at p * num_groups // num_parts, and none is empty.
    from_group, to_group = part * num_groups // num_parts, (part + 1) * num_groups // num_parts
    if part < num_parts:
        PER: tl.constexpr = SPLIT * IN_GROUP // BLOCK
        first_R = tl.maximum(from_group - before_R, 0)
        last_R = tl.minimum(tl.minimum(to_group - before_R, groups_R) * PER, blocks_R)
        num_blocks = tl.sum(tl.maximum(last_R - first_R * PER, 0), 0)
        request = tl.sum((until_R <= from_group).to(tl.int32), 0)
        to_request = tl.sum((before_R < to_group).to(tl.int32) * (r < num_requests), 0)
        start = (from_group - _at(before_R, request, REQUESTS)) * (SPLIT * IN_GROUP)
        q_first, last_token, end, sure = _tile_of(
            starts_ptr, lens_ptr, index_ptr, request, ROWS, TOKENS, REPEATS, False
        )
        pages_at = pages_ptr + request.to(tl.int64) * pages_stride
        page = _pages(pages_at, start, tl.maximum(end, 1), BLOCK, PAGE, False)
        if EARLY:
            wait_for_previous(PDL)
        q = _queries_at(q_ptr, q_first, last_token, group, HEADS, REPEATS, WIDTH, D, ROWS)
        _attend_part(
            q_ptr, k_ptr + group * WIDTH, v_ptr + group * WIDTH, scales, starts_ptr, lens_ptr,
            pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr, num_requests, num_results, slot_stride,
            pages_stride, scale, group, request, start, num_blocks, q, page, q_first, last_token, end, sure,
            HEADS, GROUPS, WIDTH, D, ROWS, TOKENS, SPLIT, BLOCK, PAGE, IN_GROUP,
        )  # fmt: skip
        # The last part that begins at group g or before it is ((g + 1) * num_parts - 1) // num_groups.
        holders_R = (until_R * num_parts - 1) // num_groups - ((before_R + 1) * num_parts - 1) // num_groups + 1
        mine_R = (r >= request) & (r < to_request)
        last_R = arrived_last_at(counter_ptr + r * GROUPS + group, holders_R, mine_R)
        for one in range(request, to_request):
            if _at(last_R, one, REQUESTS) != 0:
                cell = group.to(tl.int64) + one * GROUPS
                q_first = tl.load(starts_ptr + one)
                last_token = tl.minimum(q_first + TOKENS, tl.load(starts_ptr + one + 1)) - 1
                finish_tile(
                    out_ptr, maxima_ptr, sums_ptr, partial_ptr, cell, num_results, group, q_first, last_token, 0,
                    tl.cdiv(_at(ends_R, one, REQUESTS), SPLIT), HEADS, REPEATS, WIDTH, D, ROWS, IN_GROUP, True, COMPACT,
                    MAXIMA, PDL, _STREAMED,
                )  # fmt: skip
