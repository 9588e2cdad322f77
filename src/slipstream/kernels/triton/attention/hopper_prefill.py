"""Attention of a prompt's queries on Hopper: one TMA producer warp, two WGMMA consumer warpgroups, keys in pages.

Computes what `prefill` computes, with its bits. A row's keys are cut in splits of 64, counted from the request's
first key; each split's result (maximum, sum, weighted values) is made on its own, four of them are merged to a group's,
and groups' are merged in order. So a token's output does not depend on how its prompt was cut in chunks.

    producer      wait(empty) -> TMA keys and values of 64 positions, page by page -> full
    consumer 0,1  wait(full)  -> S = q kT -> weights = exp2(S - max) -> weights v, weights 1 -> release -> merge

A consumer has 64 rows: query tokens times the heads that share a key. The two share keys and barriers, not their pace:
one exponentiates or merges while the other multiplies.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.triton.attention.tile import merge
from slipstream.kernels.triton.gluon_compat import reinterpret, tma_load

ROWS = gl.constexpr(64)  # of a consumer: those of a WGMMA
BLOCK = gl.constexpr(64)  # keys of a split
IN_GROUP = gl.constexpr(4)  # splits of a group
SUM_COLUMNS = gl.constexpr(8)  # of a product with ones, the least there are
BOX_COLUMNS = gl.constexpr(64)  # 128 bytes, the widest that TMA swizzles


@gluon.jit
def _produce(
    descs, boxes, full, empty, pages_at, end, group, WIDTH: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr
):
    """Load the keys and values of every split, as stages are released. Past the end the last page is loaded again."""
    BOX: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    BOXES: gl.constexpr = BLOCK // BOX
    HALVES: gl.constexpr = WIDTH // BOX_COLUMNS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LAYOUT)
    last_page = (end - 1) // PAGE
    first = 0  # the page whose number lane 0 holds
    numbers = gl.load(pages_at + gl.minimum(lane, last_page))
    num_blocks = (end + BLOCK - 1) // BLOCK
    for block in range(num_blocks):
        start = block * BLOCK
        if (start + BLOCK - 1) // PAGE - first >= 32:
            first = start // PAGE
            numbers = gl.load(pages_at + gl.minimum(first + lane, last_page))
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), ((block // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * BLOCK * WIDTH * 2)
        for i in gl.static_range(BOXES):
            key = start + i * BOX
            at = key // PAGE - first
            slot = gl.sum(gl.where(lane == at, numbers, 0), 0) * PAGE + key % PAGE
            for half in gl.static_range(HALVES):
                box = (stage * HALVES + half) * BOXES + i
                column = group * WIDTH + half * BOX_COLUMNS
                tma_load(descs[0], [slot, column], full.index(stage), boxes[0].index(box))
                tma_load(descs[1], [slot, column], full.index(stage), boxes[1].index(box))


@gluon.jit
def _hide(scores, queries, start, end, REPEATS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return scores with -inf where a row does not see a key, as `tile.hide` does.

    Args:
        queries: where tokens' places are, and which keys before them they see; the first token of the rows and the last
            of the request. Few splits need it, so it is read again for each.
    """
    index_ptr, ancestors_ptr, first, last_token = queries
    token = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // REPEATS, last_token)
    own, ancestors = gl.load(index_ptr + token).to(gl.int32), gl.load(ancestors_ptr + token)
    index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    distance = own[:, None] - index[None, :]
    bit = (ancestors[:, None] >> gl.minimum(gl.maximum(distance, 0), 63).to(gl.int64)).to(gl.int32) & 1
    seen = (bit | ((63 - distance) >> 31)) & ((-1 - distance) >> 31) & ((index - end) >> 31)[None, :]
    return gl.where(seen != 0, scores, float("-inf"))


@gluon.jit
def _clear_tail(values, start, end, WIDTH: gl.constexpr):
    """Write zeros over values past the end: those slots may hold anything, and nothing times NaN is NaN.

    Both consumers do, and write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    key = start + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    v = values.load(LAYOUT)
    values.store(gl.where((key < end)[:, None], v, gl.zeros([BLOCK, WIDTH], v.dtype, LAYOUT)))
    fence_async_shared()


@gluon.jit
def fill_ones(ones):
    """Write what weights are summed by."""
    ones.store(gl.full([SUM_COLUMNS, BLOCK], 1.0, ones.dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))


@gluon.jit
def weigh_values(scores, values, ones, WIDTH: gl.constexpr):
    """Return the result of a split's scores, which are powers of two: maximum, sum, weighted values [ROWS, WIDTH].

    Args:
        ones: [SUM_COLUMNS, BLOCK], by which weights are summed: the order is then the instruction's.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM_COLUMNS, 16])
    best = gl.max(scores, 1)
    pivot = gl.where(best == float("-inf"), 0.0, best)
    weights = gl.exp2(scores - pivot[:, None]).to(values.dtype)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
    total = gl.zeros([ROWS, SUM_COLUMNS], gl.float32, SUMS)
    by_sums = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
    total = warpgroup_mma(by_sums, ones.permute((1, 0)), total, use_acc=False, is_async=True)
    by_values = gl.convert_layout(weights, gl.DotOperandLayout(0, VALUES, 2))
    acc = warpgroup_mma(by_values, values, acc, use_acc=False, is_async=True)
    total, acc = warpgroup_mma_wait(0, deps=[total, acc])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    return gl.convert_layout(best, ROW), gl.convert_layout(gl.max(total, 1), ROW), acc


@gluon.jit
def _attend_split(
    q, blocks, ones, full, empty, block, queries, lowest, end, scale, REPEATS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Return the result of one split: maximum [rows], sum [rows], weighted values [rows, WIDTH]."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    stage = block % STAGES
    start = block * BLOCK
    mbarrier.wait(full.index(stage), (block // STAGES) & 1)
    scores = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    scores = warpgroup_mma(q, blocks[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    if start + BLOCK > end:
        _clear_tail(blocks[1].index(stage), start, end, WIDTH)
    scores = warpgroup_mma_wait(0, deps=[scores]) * scale
    if start + BLOCK > lowest - 63:
        scores = _hide(scores, queries, start, end, REPEATS, SCORES)
    best, total, acc = weigh_values(scores, blocks[1].index(stage), ones, WIDTH)
    mbarrier.arrive(empty.index(stage))
    return best, total, acc


@gluon.jit
def _consume(
    half, q_smem, blocks, ones, full, empty, q_ptr, out_ptr, index_ptr, ancestors_ptr, q_first, last_token, end, scale,
    group, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with one half of the tile's queries. Rows past the last query repeat it, and are not stored."""
    REPEATS: gl.constexpr = HEADS // GROUPS
    TOKENS: gl.constexpr = ROWS // REPEATS
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    first = q_first + half * TOKENS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    token = gl.minimum(first + row // REPEATS, last_token)
    head = group * REPEATS + row % REPEATS
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    q = q_smem.index(half)
    q.store(gl.load(q_ptr + (token.to(gl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]))
    fence_async_shared()
    queries = (index_ptr, ancestors_ptr, first, last_token)
    lowest = gl.load(index_ptr + gl.minimum(first, last_token)).to(gl.int32)
    num_blocks = (end + BLOCK - 1) // BLOCK
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, VALUES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, VALUES))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
    for group_first in range(0, num_blocks, IN_GROUP):
        group_best, group_total, group_acc = _attend_split(
            q, blocks, ones, full, empty, group_first, queries, lowest, end, scale, REPEATS, WIDTH, STAGES
        )
        for block in range(group_first + 1, gl.minimum(group_first + IN_GROUP, num_blocks)):
            best_s, total_s, acc_s = _attend_split(
                q, blocks, ones, full, empty, block, queries, lowest, end, scale, REPEATS, WIDTH, STAGES
            )
            group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best_s, total_s, acc_s)
        best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
    out = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    token = first + row // REPEATS
    head = group * REPEATS + row % REPEATS
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
    at = out_ptr + (token.to(gl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
    is_row = (token <= last_token) & (row < TOKENS * REPEATS)
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column >= 0)[None, :])


@gluon.jit(
    do_not_specialize=["num_requests", "pages_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "lens_ptr", "pages_ptr", "index_ptr", "ancestors_ptr"],
)
def hopper_prefill_kernel(
    keys, values, q_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, num_requests, pages_stride,
    scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, REQUESTS: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend with a tile of one request's queries, over all keys up to the last of them, for one head of keys.

    Args:
        keys, values: boxes of a page's slots, 64 at most, by 64 columns of a head.
    """
    gl.static_assert(num_warps == 4, "a consumer is one warpgroup")
    TOKENS: gl.constexpr = 2 * (ROWS // (HEADS // GROUPS))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Tiles with the most keys first. Request r's tiles start at starts[r] // TOKENS + r.
    group, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    r = gl.arange(0, REQUESTS, gl.BlockedLayout([1], [32], [4], [0]))
    starts = gl.load(starts_ptr + r, mask=r < num_requests, other=2147480000)
    request = gl.sum(((starts // TOKENS + r <= tile) & (r < num_requests)).to(gl.int32), 0) - 1
    q_from = gl.load(starts_ptr + request)
    q_to = gl.load(starts_ptr + request + 1)
    q_first = q_from + (tile - (q_from // TOKENS + request)) * TOKENS
    dtype: gl.constexpr = keys.dtype
    BOX: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    BOXES: gl.constexpr = STAGES * (WIDTH // BOX_COLUMNS) * (BLOCK // BOX)
    key_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, BOX_COLUMNS], keys.layout)
    value_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, BOX_COLUMNS], values.layout)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], WIDE)
    ones = gl.allocate_shared_memory(dtype, [SUM_COLUMNS, BLOCK], WIDE)
    fill_ones(ones)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    # A tile's columns lie 64 by 64, all rows of the first before those of the next, so pages' boxes make up the tile.
    key_blocks = reinterpret(key_boxes, dtype, [STAGES, BLOCK, WIDTH], WIDE)
    value_blocks = reinterpret(value_boxes, dtype, [STAGES, BLOCK, WIDTH], WIDE)
    last_token = gl.minimum(q_first + TOKENS, q_to) - 1
    end = 0
    if q_first < q_to:
        end = gl.minimum(gl.load(lens_ptr + request), gl.load(index_ptr + last_token).to(gl.int32) + 1)
    pages_at = pages_ptr + request.to(gl.int64) * pages_stride
    if end > 0:
        gl.warp_specialize(
            [
                (_consume, (0, q_smem, (key_blocks, value_blocks), ones, full, empty, q_ptr, out_ptr, index_ptr,
                            ancestors_ptr, q_first, last_token, end, scale, group, HEADS, GROUPS, WIDTH, STAGES)),
                (_consume, (1, q_smem, (key_blocks, value_blocks), ones, full, empty, q_ptr, out_ptr, index_ptr,
                            ancestors_ptr, q_first, last_token, end, scale, group, HEADS, GROUPS, WIDTH, STAGES)),
                (_produce, ((keys, values), (key_boxes, value_boxes), full, empty, pages_at, end, group, WIDTH, PAGE,
                            STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
