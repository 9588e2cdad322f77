"""Paged attention for a request or few: one short dependency chain from queries to outputs (sm_90).

What `split_kv` computes, with its bits, where a split is one block. A program has its keys and values in
registers before the queries are there, the queries are the only thing it then waits for, and the last program of a tile
reads all results at once, and works out from their maxima what each is merged with, a lane to a group.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from slipstream.kernels.triton.attention.tile import DESCRIPTION, merge
from slipstream.kernels.triton.gluon_compat import async_load, thread_barrier
from slipstream.kernels.triton.launch import arrived_last, let_next_start, wait_for_previous


@gluon.jit
def _seen(own_R, ancestors_R, start, end, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """Return numbers that are not 0 where a row sees a key of the block; see `hide`."""
    index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
    distance = own_R[:, None] - index[None, :]
    bit = (ancestors_R[:, None] >> gl.minimum(gl.maximum(distance, 0), 63).to(gl.int64)).to(gl.int32) & 1
    return (bit | ((63 - distance) >> 31)) & ((-1 - distance) >> 31) & ((index - end) >> 31)[None, :]


@gluon.jit
def _pages(pages_at, start, end, BLOCK: gl.constexpr, PAGE: gl.constexpr, COPIED: gl.constexpr):
    """Return the pages of a block's keys; past the end, that of the last one."""
    key = gl.minimum(start + gl.arange(0, BLOCK, gl.SliceLayout(1, COPIED)), end - 1)
    return gl.load(pages_at + key // PAGE, cache_modifier=".cg")


@gluon.jit
def _load_block(
    k_at, v_at, page, keys, values, slot_stride, start, end,
    BLOCK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Ask for a block's keys and values, which lie in these pages."""
    key = gl.minimum(start + gl.arange(0, BLOCK, gl.SliceLayout(1, COPIED)), end - 1)
    at = (page.to(gl.int64) * PAGE + key % PAGE) * slot_stride
    at = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    async_load(keys, k_at + at)
    async_load(values, v_at + at)
    async_copy.commit_group()


@gluon.jit
def _queries_at(
    q_ptr, q_first, last_token, group,
    HEADS: gl.constexpr, REPEATS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Return where the queries are; rows past the last repeat it."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPIED))
    token = gl.maximum(gl.minimum(q_first + row // REPEATS, last_token), 0).to(gl.int64)
    at = ((token * HEADS + group * REPEATS + row % REPEATS) * D)[:, None]
    return q_ptr + at + gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]


@gluon.jit
def _first_block(
    k_at, v_at, page, keys, values, q_at, queries, slot_stride, start, end, fresh, BLOCK: gl.constexpr,
    D: gl.constexpr, PAGE: gl.constexpr, COPIED: gl.constexpr, RIGHT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Return the keys and values of a block whose loads were issued, and load the queries.

    Of a block with keys that the kernel before writes (`fresh`), the first copy is of no use but that it comes into the
    cache all processors share.
    """
    if fresh:
        async_copy.wait_group(0)
    wait_for_previous(PDL)
    async_load(queries, q_at)
    async_copy.commit_group()
    if fresh:
        _load_block(k_at, v_at, page, keys, values, slot_stride, start, end, BLOCK, D, PAGE, COPIED)
        async_copy.wait_group(0)
    async_copy.wait_group(1)  # the queries may still be on their way
    k, v = keys.permute((1, 0)).load(RIGHT), values.load(RIGHT)
    async_copy.wait_group(0)
    return k, v


@gluon.jit
def _maximum(scores, ROWS: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Return each row's maximum; warps synchronise once, where the compiler's reduction would twice."""
    # A layout [ROWS, WARPS] in which a thread has the maxima of all warps, of the rows it has scores of.
    EACH: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]] + ([[0, 1]] if WARPS > 1 else []) + ([[0, 2]] if WARPS > 2 else [])
        + ([[0, 4]] if WARPS > 4 else []),
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        ([[0, 0]] if WARPS > 1 else []) + ([[0, 0]] if WARPS > 2 else [])
        + ([[0, 0]] if WARPS > 4 else []),
        [], [16, WARPS],
    )  # fmt: skip
    if WARPS == 1:
        best = gl.max(scores, 1)
    else:
        by_warp = gl.max(gl.max(scores.reshape([ROWS, BLOCK // (8 * WARPS), WARPS, 8]), 1), 2)
        best = gl.max(gl.convert_layout(by_warp, EACH), 1)
    return best


@gluon.jit
def attend_block(
    q, k, v, seen, weights, scale, sums_ptr, part_ptr, real,
    ROWS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """Attend to a block, and store its result as `store_result` does; sums are products with ones, see `add_block`.

    Args:
        STRIDE: rows of the workspace of results.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    scores = mma_v2(q, k, gl.zeros([ROWS, BLOCK], gl.float32, MMA)) * scale
    scores = gl.where(seen != 0, scores, float("-inf"))
    best = gl.convert_layout(_maximum(scores, ROWS, BLOCK, WARPS), gl.SliceLayout(1, MMA), assert_trivial=True)
    pivot = gl.where(best == float("-inf"), 0.0, best)
    weight = gl.exp2(scores - pivot[:, None]).to(v.dtype)
    if WARPS == 1:
        weight = gl.convert_layout(weight, LEFT, assert_trivial=True)
    else:
        weights.store(weight)
        weight = weights.load(LEFT)
    ones = gl.full([BLOCK, 8], 1.0, v.dtype, RIGHT)
    total = mma_v2(weight, ones, gl.zeros([ROWS, 8], gl.float32, MMA))
    acc = mma_v2(weight, v, gl.zeros([ROWS, D], gl.float32, MMA))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    eight, column = gl.arange(0, 8, gl.SliceLayout(0, MMA))[None, :], gl.arange(0, D, gl.SliceLayout(0, MMA))[None, :]
    gl.store(sums_ptr + row, best, mask=real)
    gl.store(sums_ptr + STRIDE + row[:, None] + eight, total, mask=real[:, None] & (eight == 0))
    gl.store(part_ptr + row[:, None] * D + column, acc, mask=real[:, None])


@gluon.jit
def _attend_later(
    k_at, v_at, pages_at, keys, values, queries, weights, own_R, ancestors_R, slot_stride, split, start, end,
    scale, sums_at, part_at, real, ROWS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr,
    WARPS: gl.constexpr, MMA: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Attend to a split after the first one, all of which comes once the queries are there, and store its result."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    page = _pages(pages_at, start, end, BLOCK, PAGE, COPIED)
    _load_block(k_at, v_at, page, keys, values, slot_stride, start, end, BLOCK, D, PAGE, COPIED)
    seen = _seen(own_R, ancestors_R, start, end, BLOCK, MMA)
    async_copy.wait_group(0)
    attend_block(
        queries.load(LEFT), keys.permute((1, 0)).load(RIGHT), values.load(RIGHT), seen, weights, scale,
        sums_at + split * (2 * ROWS), part_at + split * (ROWS * D), real, ROWS, D, BLOCK, WARPS, MMA, ROWS,
    )  # fmt: skip


@gluon.jit
def _factor(best, best_s):
    """Return the maximum of two results, and the factors with which they are merged; see `merge`."""
    new_best = gl.maximum(best, best_s)
    pivot = gl.where(new_best == float("-inf"), 0.0, new_best)
    return new_best, gl.exp2(best - pivot), gl.exp2(best_s - pivot)


@gluon.jit
def _load_sums(
    sums, sums_ptr, first, count, STRIDE: gl.constexpr, GROUPS: gl.constexpr, COPIED: gl.constexpr
):  # fmt: skip
    """Ask for the maxima and sums of GROUPS groups' results from place `first` on, [8 * GROUPS, STRIDE]."""
    kind = first * 2 + gl.arange(0, 8 * GROUPS, gl.SliceLayout(1, COPIED))[:, None]
    row = gl.arange(0, STRIDE, gl.SliceLayout(0, COPIED))[None, :]
    async_load(sums, sums_ptr + kind * STRIDE + row, mask=kind + row * 0 < count * 2)
    async_copy.commit_group()


@gluon.jit
def _factors(sums, first, count, ROWS: gl.constexpr, GROUPS: gl.constexpr, TAKEN: gl.constexpr):
    """Return [GROUPS * ROWS, 8]: what the results of groups of four are merged with.

    A row's maximum in a group and its sum; two factors, with which the group's second result is merged with the first;
    and so on for the third and the fourth.
    """
    found = sums.slice(0, ROWS, 1).load(TAKEN).reshape([GROUPS, 2, 2, 2, ROWS]).permute((0, 4, 1, 2, 3))
    bests, totals = gl.split(found)
    bests_02, bests_13 = gl.split(bests)
    totals_02, totals_13 = gl.split(totals)
    best_0, best_2 = gl.split(bests_02)
    best_1, best_3 = gl.split(bests_13)
    total_0, total_2 = gl.split(totals_02)
    total_1, total_3 = gl.split(totals_13)
    LAYOUT: gl.constexpr = best_0.type.layout
    to = count - first - 4 * gl.arange(0, GROUPS, gl.SliceLayout(1, LAYOUT))[:, None]
    best = gl.where(to > 0, best_0, float("-inf"))
    best, a_1, b_1 = _factor(best, gl.where(to > 1, best_1, float("-inf")))
    best, a_2, b_2 = _factor(best, gl.where(to > 2, best_2, float("-inf")))
    best, a_3, b_3 = _factor(best, gl.where(to > 3, best_3, float("-inf")))
    total = (total_0 * a_1 + total_1 * b_1) * a_2 + total_2 * b_2
    total = total * a_3 + total_3 * b_3
    pairs = gl.join(gl.join(best, total), gl.join(a_1, b_1)), gl.join(gl.join(a_2, b_2), gl.join(a_3, b_3))
    return gl.join(pairs[0], pairs[1]).reshape([GROUPS * ROWS, 8])


@gluon.jit
def _add(acc, part, factors, ROW: gl.constexpr):
    """Add a later result's values, with two factors a row."""
    a, b = gl.split(factors)
    a, b = gl.convert_layout(a, ROW, assert_trivial=True), gl.convert_layout(b, ROW, assert_trivial=True)
    return acc * a[:, None] + part * b[:, None]


@gluon.jit
def _merge_results(
    sums_ptr, part_at, count, real,
    MERGED: gl.constexpr, EIGHT: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr, D: gl.constexpr,
    AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Return sums [ROWS] and values [ROWS, D] of `count` stored results, those of AT_ONCE groups read at a time.

    Merging a group's first result with that of no keys leaves it as it is, but for the sign of a zero.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, MERGED)
    GROUPS: gl.constexpr = AT_ONCE if AT_ONCE <= 2 else 4 if AT_ONCE <= 4 else 8
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    COPIED: gl.constexpr = gl.BlockedLayout([1, 4], [128 // STRIDE, STRIDE // 4], [WARPS, 1], [1, 0])
    TAKEN: gl.constexpr = gl.BlockedLayout([8, 1], [32 // ROWS, ROWS], [WARPS, 1], [1, 0])
    stored = gl.allocate_shared_memory(gl.float32, [8 * GROUPS, STRIDE], PLAIN)
    table = gl.allocate_shared_memory(gl.float32, [GROUPS * ROWS, 8], PLAIN)
    best, total = gl.full([ROWS], float("-inf"), gl.float32, ROW), gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, MERGED)
    for first in range(0, count, 4 * AT_ONCE):
        _load_sums(stored, sums_ptr, first, count, STRIDE, GROUPS, COPIED)
        at, to = part_at + first * (STRIDE * D), gl.where(real, count - first, 0)[:, None]
        parts = ()
        for i in gl.static_range(4 * AT_ONCE):
            parts += (gl.load(at + i * (STRIDE * D), mask=to > i, other=0.0, cache_modifier=".cg"),)
        thread_barrier()  # or the assembler issues some of these loads only after the sums have arrived
        async_copy.wait_group(0)
        table.store(_factors(stored, first, count, ROWS, GROUPS, TAKEN))
        for g in gl.static_range(AT_ONCE):
            left, right = gl.split(table.slice(g * ROWS, ROWS).load(EIGHT).reshape([ROWS, 2, 2, 2]))
            sums, one = gl.split(left)
            two, three = gl.split(right)
            group_best, group_total = gl.split(sums)
            group_acc = _add(parts[4 * g] + 0.0, parts[4 * g + 1], one, ROW)
            group_acc = _add(group_acc, parts[4 * g + 2], two, ROW)
            group_acc = _add(group_acc, parts[4 * g + 3], three, ROW)
            group_best = gl.convert_layout(group_best, ROW, assert_trivial=True)
            group_total = gl.convert_layout(group_total, ROW, assert_trivial=True)
            best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
    return total, acc


@gluon.jit
def _finish_tile(
    out_ptr, maxima_ptr, sums_ptr, part_ptr, group, q_first, last_token, count,
    HEADS: gl.constexpr, REPEATS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr,
    AT_ONCE: gl.constexpr, WARPS: gl.constexpr, MAXIMA: gl.constexpr,
):  # fmt: skip
    """Merge the results of a tile, of which ROWS rows are real at the most, and store its outputs."""
    DOWN: gl.constexpr = WARPS if WARPS < ROWS else ROWS
    COLUMNS: gl.constexpr = 4 if 128 * (WARPS // DOWN) <= D else D * DOWN // (32 * WARPS)
    MERGED: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [1, 32], [DOWN, WARPS // DOWN], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MERGED))
    column = gl.arange(0, D, gl.SliceLayout(0, MERGED))[None, :]
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [DOWN, WARPS // DOWN], [1, 0])
    real = q_first + row // REPEATS <= last_token
    total, acc = _merge_results(
        sums_ptr, part_ptr + row[:, None] * D + column, count, real,
        MERGED, EIGHT, ROWS, STRIDE, D, AT_ONCE, WARPS,
    )  # fmt: skip
    out = (acc / gl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    place = (q_first + row // REPEATS).to(gl.int64) * HEADS + group * REPEATS + row % REPEATS
    gl.store(out_ptr + place[:, None] * D + column, out, mask=real[:, None])
    if MAXIMA:
        gl.store(maxima_ptr + place, gl.max(gl.abs(out.to(gl.float32)), 1), mask=real)


@gluon.jit(do_not_specialize=["num_splits", "pages_stride"], do_not_specialize_on_alignment=DESCRIPTION)
def hopper_split_kv_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, maxima_ptr, num_splits, slot_stride, pages_stride, scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK: gl.constexpr, PAGE: gl.constexpr, EARLY: gl.constexpr, MERGED_ROWS: gl.constexpr,
    AT_ONCE: gl.constexpr, MAXIMA: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend to this program's splits of a tile's request, all of whose queries fit the tile.

    Args:
        MERGED_ROWS: rows that may be real: those of the heads of one query, where tiles have but one.
        AT_ONCE: groups of results that the last program reads at a time.
        EARLY, MAXIMA: see `splits_kernel`. Before the inputs are there, keys and values may be read as well, but for
            those that the kernel before writes: the queries' own.
    """
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: gl.constexpr = HEADS // GROUPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    STORED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    group, tile, part = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    q_first = gl.load(starts_ptr + tile, cache_modifier=".cg")
    q_to = gl.load(starts_ptr + tile + 1, cache_modifier=".cg")
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    last_token = gl.minimum(q_first + TOKENS, q_to) - 1
    token = gl.maximum(gl.minimum(q_first + row // REPEATS, last_token), 0)
    own = gl.load(index_ptr + token, cache_modifier=".cg").to(gl.int32)
    ancestors = gl.load(ancestors_ptr + token, cache_modifier=".cg")
    end = gl.minimum(gl.load(lens_ptr + tile, cache_modifier=".cg"), gl.max(own, 0) + 1)
    num_there = (end + BLOCK - 1) // BLOCK
    each = gl.maximum((num_there + gl.num_programs(2) - 1) // gl.num_programs(2), 1)
    to_split = gl.minimum((part + 1) * each, num_there)
    holders = (num_there + each - 1) // each
    start = part * each * BLOCK
    busy = (q_first < q_to) & (start < end)
    if busy:
        keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK, D], STORED)
        values = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK, D], STORED)
        queries = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [ROWS, D], STORED)
        weights = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [ROWS, BLOCK], STORED)
        k_at, v_at = k_ptr + group * D, v_ptr + group * D
        pages_at = pages_ptr + tile.to(gl.int64) * pages_stride
        cell = tile.to(gl.int64) * GROUPS + group
        sums_at, part_at = sums_ptr + cell * num_splits * (2 * ROWS), partial_ptr + cell * num_splits * (ROWS * D)
        real = q_first + row // REPEATS <= last_token
        q_at = _queries_at(q_ptr, q_first, last_token, group, HEADS, REPEATS, ROWS, D, COPIED)
        page = _pages(pages_at, start, end, BLOCK, PAGE, COPIED)
        _load_block(k_at, v_at, page, keys, values, slot_stride, start, end, BLOCK, D, PAGE, COPIED)
        seen = _seen(own, ancestors, start, end, BLOCK, MMA)
        fresh = (start + BLOCK > gl.min(own, 0)) & EARLY
        k, v = _first_block(
            k_at, v_at, page, keys, values, q_at, queries, slot_stride, start, end, fresh, BLOCK, D, PAGE, COPIED,
            RIGHT, PDL,
        )  # fmt: skip
        attend_block(
            queries.load(LEFT), k, v, seen, weights, scale, sums_at + part * each * (2 * ROWS),
            part_at + part * each * (ROWS * D), real, ROWS, D, BLOCK, num_warps, MMA, ROWS,
        )  # fmt: skip
        for split in range(part * each + 1, to_split):
            start = split * BLOCK
            _attend_later(
                k_at, v_at, pages_at, keys, values, queries, weights, own, ancestors, slot_stride, split, start, end,
                scale, sums_at, part_at, real, ROWS, D, BLOCK, PAGE, num_warps, MMA, COPIED,
            )  # fmt: skip
        if arrived_last(counter_ptr + cell, holders):
            _finish_tile(
                out_ptr, maxima_ptr, sums_at, part_at, group, q_first, last_token, num_there,
                HEADS, REPEATS, D, MERGED_ROWS, ROWS, AT_ONCE, num_warps, MAXIMA,
            )  # fmt: skip
    elif part == 0:
        wait_for_previous(PDL)  # whoever waits for this kernel has then waited for those before
