"""Paged attention for many requests, persistent and warp-specialised: a producer warp loads keys and values by TMA.

What `slipstream.kernels.triton.attention.even` computes, in its order and by the same instruction, so the bits are the
same. The producer runs ahead of the consumers through a ring of blocks of keys, filled page by page. Keys that earlier
passes wrote it loads before the PDL wait. Which keys are whose, and who finishes a request: `work_list`.

There is one consumer warp to a scheduler, so nothing hides its latency, and a block's dependency chain is kept short.
Queries are in shared memory, those of the next request from this one's first block on; the producer loads what another
program has left. Consumers synchronise for maxima, at the barrier that releases the stage before, and for weights.

Keys and values may be FP8, with a scale for each head of a token: half the bytes, so that two programs fit an SM, and
one multiplies while the other waits (`fp8_keys`).

A stage is released after the MMA that read it, not after ld.shared was issued: TMA writes through another proxy and
does not wait for reads in flight. A read that other programs' stores delay long enough would find a later block.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.triton.attention.fp8_keys import (
    SCALE_BYTES,
    load_queries,
)
from slipstream.kernels.triton.attention.persistent_ws_block import attend_block
from slipstream.kernels.triton.attention.persistent_ws_merge import (
    finish_requests,
    hand_over,
    load_left,
    nothing,
    store_outputs,
    store_result,
    take_over,
)
from slipstream.kernels.triton.attention.tile import merge
from slipstream.kernels.triton.attention.work_list import (
    all_described,
    described_at,
    laid_out,
    laid_out_pages,
    next_of,
    number_at,
    of_requests,
    pages_of,
    stop_of,
)
from slipstream.kernels.triton.gluon_compat import async_load, reinterpret, thread_barrier, tma_load


@gluon.jit
def _copy_block(tiles, stores, bar, slot, pages, group, WIDTH: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """Load the keys and values of a block that lies in these pages, and the scales of FP8."""
    PAGES: gl.constexpr = BLOCK // PAGE
    COLUMNS: gl.constexpr = stores[0].shape[2]
    PARTS: gl.constexpr = WIDTH // COLUMNS
    for i in gl.static_range(PAGES):
        for part in gl.static_range(PARTS):
            at = [pages[i] * PAGE, group * WIDTH + part * COLUMNS]
            box = (slot * PARTS + part) * PAGES + i
            tma_load(tiles[0], at, bar, stores[0].index(box))
            tma_load(tiles[1], at, bar, stores[1].index(box))
        if len(tiles) == 4:
            tma_load(tiles[2], [group, pages[i] * PAGE], bar, stores[2].index(slot * PAGES + i))
            tma_load(tiles[3], [group, pages[i] * PAGE], bar, stores[3].index(slot * PAGES + i))


@gluon.jit
def _produce(
    tiles, stores, ready, empty, left, work_ptr, pages_ptr, sums_ptr, partial_ptr, counter_ptr, num_requests,
    num_results, pages_stride, group, part, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
    REQUESTS: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Load every block of the part, as stages are released.

    A block with no key from `sure` on was written by passes before this one. Those have ended where EARLY says so, and
    it is loaded before the kernel before has ended. Either way what kernels wrote is there for TMA once they
    have ended: no fence is needed between kernels.
    """
    if PDL and not EARLY:
        gdc_wait()
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
    lane = gl.arange(0, 32, LAYOUT)
    request, start, num_blocks, walk, _, first = laid_out(work_ptr, part, REQUESTS)
    pages = laid_out_pages(work_ptr, part, lane, REQUESTS)
    ends_R, sure_R = of_requests(work_ptr, 2, REQUESTS, LAYOUT), of_requests(work_ptr, 3, REQUESTS, LAYOUT)
    end, sure = first[2], first[3]
    first_page = start // PAGE
    FP8: gl.constexpr = len(tiles) == 4
    BYTES: gl.constexpr = 2 * (BLOCK * WIDTH + BLOCK // PAGE * SCALE_BYTES if FP8 else BLOCK * WIDTH * 2)
    for step in range(num_blocks):
        slot = step % STAGES
        at = start // PAGE - first_page
        here = (number_at(pages, at, 32), number_at(pages, at + 1, 32), number_at(pages, at + 2, 32),
                number_at(pages, at + 3, 32))  # fmt: skip
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        if PDL and EARLY:  # noqa: SIM102 - the one is known when the kernel is compiled
            if start + BLOCK > sure:
                gdc_wait()
        mbarrier.expect(ready.index(slot), BYTES)
        _copy_block(tiles, stores, ready.index(slot), slot, here, group, WIDTH, BLOCK, PAGE)
        start += BLOCK
        moves = start >= stop_of(walk, request, end)
        if moves:
            request, start, is_late = next_of(walk, request, num_requests)
            if is_late & (step + 1 < num_blocks):
                if PDL and EARLY:
                    gdc_wait()
                load_left(left, counter_ptr, sums_ptr, partial_ptr, request, group, num_results, GROUPS, WIDTH, ROWS)
            end, sure = number_at(ends_R, request, REQUESTS), number_at(sure_R, request, REQUESTS)
        if moves | (start // PAGE - first_page >= 32):
            first_page = start // PAGE
            pages = pages_of(pages_ptr, request, pages_stride, first_page, end, lane, PAGE)


@gluon.jit
def _load_queries(
    q_ptr, queries, q_first, last_token, group, HEADS: gl.constexpr, REPEATS: gl.constexpr, WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Ask for a request's queries. Rows past the last one repeat it."""
    LANES: gl.constexpr = WIDTH // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token = gl.maximum(gl.minimum(q_first + row // REPEATS, last_token), 0).to(gl.int64)
    head = group * REPEATS + row % REPEATS
    q_at = q_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :]
    async_load(queries, q_at)
    async_copy.commit_group()


@gluon.jit
def _places(
    index_ptr, ancestors_ptr, q_first, last_token, REPEATS: gl.constexpr, ROWS: gl.constexpr, MATRIX: gl.constexpr
):
    """Return where a request's queries are, and which keys before them they see."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MATRIX))
    token = gl.maximum(gl.minimum(q_first + row // REPEATS, last_token), 0)
    return gl.load(index_ptr + token).to(gl.int32), gl.load(ancestors_ptr + token)


@gluon.jit
def _add_result(
    so_far, group_so_far, found, left, walk, here, start, end, moves, is_late, step, num_blocks,
    out_ptr, sums_ptr, partial_ptr, counter_ptr, num_results, group,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    IN_GROUP: gl.constexpr, FP8: gl.constexpr, MATRIX: gl.constexpr,
):  # fmt: skip
    """Add a block's result to its group, that of a whole group to its request, and store what is then done.

    Args:
        so_far, group_so_far: of the request's groups, where it is not cut at groups, and of the group's blocks.
        left: what another program has left of the request that comes last.
        here: this block's request, its first and its last query.

    Returns:
        What the next block finds of its request's groups and of its group.
    """
    REPEATS: gl.constexpr = HEADS // GROUPS
    best, total, acc = so_far
    request, q_first, last_token = here
    group_best, group_total, group_acc = merge(
        group_so_far[0], group_so_far[1], group_so_far[2], found[0], found[1], found[2]
    )
    cell = request.to(gl.int64) * GROUPS + group
    if ((start + BLOCK) % (BLOCK * IN_GROUP) == 0) | (start + BLOCK >= end):
        if walk[0]:
            best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
        else:
            result = cell * num_results + start // (BLOCK * IN_GROUP)
            store_result(group_best, group_total, group_acc, sums_ptr, partial_ptr, result, q_first, last_token,
                         REPEATS, ROWS, WIDTH, MATRIX)  # fmt: skip
        group_best, group_total, group_acc = nothing(ROWS, WIDTH, MATRIX)
    if walk[0] & moves:
        if request == walk[1]:
            hand_over((best, total, acc), (group_best, group_total, group_acc), sums_ptr, partial_ptr,
                      counter_ptr + cell, cell * num_results, q_first, last_token, REPEATS, ROWS, WIDTH,
                      MATRIX)  # fmt: skip
        else:
            store_outputs(out_ptr, total, acc, group, q_first, last_token, HEADS, REPEATS, ROWS, WIDTH, FP8, MATRIX)
        best, total, acc = nothing(ROWS, WIDTH, MATRIX)
        group_best, group_total, group_acc = nothing(ROWS, WIDTH, MATRIX)
        if is_late & (step + 1 < num_blocks):
            best, total, acc, group_best, group_total, group_acc = take_over(left, MATRIX)
    return best, total, acc, group_best, group_total, group_acc


@gluon.jit
def _attend(
    stores, buffers, left, ready, empty, q_ptr, out_ptr, work_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, num_requests, num_results, scale, group, part,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, REQUESTS: gl.constexpr,
    BLOCK: gl.constexpr, PAGE: gl.constexpr, IN_GROUP: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attend to blocks as they come, store the results of groups, and merge those of requests that are then whole.

    Args:
        buffers: for the queries of this request and the next, for warps' maxima, and for weights.
        left: what another program has left of the request that comes last.
    """
    if PDL and not EARLY:
        gdc_wait()
    queries, maxima, weights = buffers
    REPEATS: gl.constexpr = HEADS // GROUPS
    FP8: gl.constexpr = len(stores) == 4
    NUM_WARPS: gl.constexpr = 4
    MATRIX: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, NUM_WARPS], [16, 8])
    # Every warp has all requests' numbers, so that looking one up takes no barrier.
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0]))
    request, start, num_blocks, walk, counted, first = laid_out(work_ptr, part, REQUESTS)
    described_R = all_described(work_ptr, REQUESTS, LAYOUT)
    q_first, last_token, end, sure = first[0], first[1], first[2], first[3]
    if PDL and EARLY:
        gdc_wait()
    _load_queries(q_ptr, queries.index(0), q_first, last_token, group, HEADS, REPEATS, WIDTH, ROWS)
    own, ancestors = _places(index_ptr, ancestors_ptr, q_first, last_token, REPEATS, ROWS, MATRIX)
    async_copy.wait_group(0)
    thread_barrier()
    which, fresh = 0, True  # where the request's queries are, and whether the next one's are to be loaded
    after, after_start, is_late = request, start, False
    after_first, after_last, after_end, after_sure = q_first, last_token, end, sure
    best, total, acc = nothing(ROWS, WIDTH, MATRIX)  # of the request's groups so far, where it is not cut at groups
    group_best, group_total, group_acc = nothing(ROWS, WIDTH, MATRIX)
    for step in range(num_blocks):
        if FP8:
            q = load_queries(queries.index(which), ROWS, WIDTH, MATRIX)
        else:
            q = queries.index(which).load(gl.DotOperandLayout(0, MATRIX, 2))
        if fresh:
            after, after_start, is_late = next_of(walk, request, num_requests)
            after_first, after_last, after_end, after_sure = described_at(described_R, after, REQUESTS)
            _load_queries(q_ptr, queries.index(1 - which), after_first, after_last, group, HEADS, REPEATS, WIDTH, ROWS)
        found = attend_block(
            stores, ready, empty, maxima, weights, step, step % STAGES, q, own, ancestors, start, end, sure, scale,
            ROWS, BLOCK, WIDTH, PAGE, STAGES, MATRIX,
        )  # fmt: skip
        moves = start + BLOCK >= stop_of(walk, request, end)
        best, total, acc, group_best, group_total, group_acc = _add_result(
            (best, total, acc), (group_best, group_total, group_acc), found, left, walk, (request, q_first, last_token),
            start, end, moves, is_late, step, num_blocks, out_ptr, sums_ptr, partial_ptr, counter_ptr, num_results,
            group, HEADS, GROUPS, WIDTH, ROWS, BLOCK, IN_GROUP, FP8, MATRIX,
        )  # fmt: skip
        start, fresh = start + BLOCK, moves
        if moves:
            request, start, q_first, last_token = after, after_start, after_first, after_last
            end, sure, which = after_end, after_sure, 1 - which
            own, ancestors = _places(index_ptr, ancestors_ptr, q_first, last_token, REPEATS, ROWS, MATRIX)
            async_copy.wait_group(0)
            thread_barrier()
    if (num_blocks > 0) & (walk[0] == 0):
        finish_requests(
            out_ptr, sums_ptr, partial_ptr, counter_ptr, work_ptr, counted, num_results, group, HEADS, GROUPS, WIDTH,
            ROWS, REQUESTS, BLOCK * IN_GROUP, FP8, LAYOUT,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_requests", "num_results", "pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "index_ptr", "ancestors_ptr"],
)
def persistent_kernel(
    k_tiles, v_tiles, k_scale_tiles, v_scale_tiles, q_ptr, out_ptr, work_ptr, pages_ptr, index_ptr, ancestors_ptr,
    sums_ptr, partial_ptr, counter_ptr, num_requests, num_results, pages_stride, scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, REQUESTS: gl.constexpr,
    BLOCK: gl.constexpr, PAGE: gl.constexpr, IN_GROUP: gl.constexpr, STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend to this program's part of the groups of all requests, for its head of keys; see `even_kernel`.

    Args:
        k_tiles, v_tiles: boxes of a page's slots by 128 bytes of a head, or all of it. BLOCK keys are a split.
        k_scale_tiles, v_scale_tiles: the scales of FP8 keys and values, by head, in boxes of SCALE_BYTES; or None.
        work_ptr: what `work_list_kernel` has written for as many parts as there are programs to a head.
        STAGES: blocks of the ring, two or more.
        PRODUCER_REGISTERS: registers of the producer warp.
    """
    group, part = gl.program_id(0), gl.program_id(1)
    FP8: gl.constexpr = k_scale_tiles is not None
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = k_tiles.block_shape[1]
    PAGES: gl.constexpr = STAGES * (BLOCK // PAGE)
    BOXES: gl.constexpr = PAGES * (WIDTH // COLUMNS)
    boxes = (
        gl.allocate_shared_memory(k_tiles.dtype, [BOXES, PAGE, COLUMNS], k_tiles.layout),
        gl.allocate_shared_memory(v_tiles.dtype, [BOXES, PAGE, COLUMNS], v_tiles.layout),
    )
    queries = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    maxima = gl.allocate_shared_memory(gl.float32, [ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(dtype, [2 if FP8 else 1, ROWS, BLOCK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    left = (  # of two results maxima and sums, and values; and the barrier at which every lane arrives that asked
        gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [2, ROWS, WIDTH], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(left[2], count=32)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    # A tile's columns lie 64 by 64, all rows of the first before those of the next, so pages' boxes make up the tile.
    tiles = (k_tiles, v_tiles)
    if FP8:
        PAIRS: gl.constexpr = gl.NVMMASharedLayout(COLUMNS, 16, 2)
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        boxes += (  # type: ignore[assignment]  # Gluon's tuples may have any length
            gl.allocate_shared_memory(gl.uint8, [PAGES, 1, SCALE_BYTES], k_scale_tiles.layout),
            gl.allocate_shared_memory(gl.uint8, [PAGES, 1, SCALE_BYTES], v_scale_tiles.layout),
        )
        tiles += (k_scale_tiles, v_scale_tiles)  # type: ignore[assignment]
        blocks = (
            reinterpret(boxes[0], gl.int16, [STAGES, BLOCK, WIDTH // 2], PAIRS),
            reinterpret(boxes[1], gl.int16, [STAGES, BLOCK, WIDTH // 2], PAIRS),
            reinterpret(boxes[2], gl.uint8, [STAGES, BLOCK // PAGE, SCALE_BYTES], PLAIN),
            reinterpret(boxes[3], gl.uint8, [STAGES, BLOCK // PAGE, SCALE_BYTES], PLAIN),
        )
    else:
        blocks = (  # type: ignore[assignment]
            reinterpret(boxes[0], dtype, [STAGES, BLOCK, WIDTH], k_tiles.layout),
            reinterpret(boxes[1], dtype, [STAGES, BLOCK, WIDTH], v_tiles.layout),
        )
    gl.warp_specialize(
        [
            (_attend, (blocks, (queries, maxima, weights), left, ready, empty, q_ptr, out_ptr, work_ptr, index_ptr,
                       ancestors_ptr, sums_ptr, partial_ptr, counter_ptr, num_requests, num_results, scale, group, part,
                       HEADS, GROUPS, WIDTH, ROWS, REQUESTS, BLOCK, PAGE, IN_GROUP, STAGES, EARLY, PDL)),
            (_produce, (tiles, boxes, ready, empty, left, work_ptr, pages_ptr, sums_ptr, partial_ptr, counter_ptr,
                        num_requests, num_results, pages_stride, group, part, GROUPS, WIDTH, ROWS, REQUESTS, BLOCK,
                        PAGE, STAGES, EARLY, PDL)),
        ],
        [1], [PRODUCER_REGISTERS],
    )  # fmt: skip
