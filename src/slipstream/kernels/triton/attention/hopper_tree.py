"""Attention of the nodes of draft trees on Hopper: keys before a tree by TMA and WGMMA, those of a path one by one.

Computes what `tree.tree_splits_kernel` computes, with its bits; `tree_merge_kernel` merges what it leaves. Sixteen
nodes of four heads are the 64 rows of a WGMMA: a tree of 16 nodes reads the keys before it once, one of 64 four times.

    share of the keys before   TMA of the first stages -> wait(PDL) -> queries -> for each split:
                               wait(full) -> S = q kT -> weights -> weights v -> barrier -> TMA of the next
    node                       slots of its path -> wait(PDL) -> cp.async keys, values, query -> one split or two

All keys before a tree were written by earlier passes, so they are loaded before the kernel before has ended.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton.attention.hopper_prefill import (
    BLOCK,
    BOX_COLUMNS,
    IN_GROUP,
    ROWS,
    SUM_COLUMNS,
    fill_ones,
    weigh_values,
)
from slipstream.kernels.triton.attention.hopper_split_kv import attend_block
from slipstream.kernels.triton.attention.persistent_ws_merge import nothing
from slipstream.kernels.triton.attention.tile import merge
from slipstream.kernels.triton.gluon_compat import async_load, reinterpret, thread_barrier, tma_load
from slipstream.kernels.triton.launch import let_next_start, wait_for_previous

OWN_ROWS = gl.constexpr(16)  # of a node's own tile: the heads that share a key, and nothing


@gluon.jit
def _load_split(descs, boxes, full, stage, pages_at, start, group, WIDTH: gl.constexpr, PAGE: gl.constexpr):
    """Load the keys and values of a split, page by page."""
    BOX: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    BOXES: gl.constexpr = BLOCK // BOX
    HALVES: gl.constexpr = WIDTH // BOX_COLUMNS
    slots = ()
    for i in gl.static_range(BOXES):
        key = start + i * BOX
        slots += (gl.load(pages_at + key // PAGE, cache_modifier=".cg") * PAGE + key % PAGE,)  # type: ignore[assignment]
    mbarrier.expect(full.index(stage), 2 * BLOCK * WIDTH * 2)
    for i in gl.static_range(BOXES):
        for half in gl.static_range(HALVES):
            box, column = (stage * HALVES + half) * BOXES + i, group * WIDTH + half * BOX_COLUMNS
            tma_load(descs[0], [slots[i], column], full.index(stage), boxes[0].index(box))
            tma_load(descs[1], [slots[i], column], full.index(stage), boxes[1].index(box))


@gluon.jit
def _store_rows(
    result, sums_ptr, partial_ptr, row_cell, row_head, real, num_places, place, STRIDE: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a result whose rows belong to several nodes: each row at a place of its node's cell."""
    best, total, acc = result
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    row_place = row_cell * num_places + place
    gl.store(sums_ptr + row_place * (2 * STRIDE) + row_head, best, mask=real)
    gl.store(sums_ptr + row_place * (2 * STRIDE) + STRIDE + row_head, total, mask=real)
    part_at = partial_ptr + ((row_place * STRIDE + row_head) * WIDTH)[:, None] + column[None, :]
    gl.store(part_at, acc, mask=real[:, None])


@gluon.jit
def _attend_share(
    descs, boxes, blocks, q_smem, ones, full, q_ptr, pages_at, sums_ptr, partial_ptr, request, group, first, from_split,
    to_split, whole_splits, num_places, group_places, scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, NODES: gl.constexpr,
    PAGE: gl.constexpr, RUNNING: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with a tile of nodes to splits before their root's, and store results of groups, and of splits."""
    REPEATS: gl.constexpr = HEADS // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for ahead in gl.static_range(STAGES):
        if from_split + ahead < to_split:
            _load_split(descs, boxes, full, ahead, pages_at, (from_split + ahead) * BLOCK, group, WIDTH, PAGE)
    if EARLY:
        wait_for_previous(PDL)
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)), gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    token = (request * NODES + gl.minimum(first + row // REPEATS, NODES - 1)).to(gl.int64)
    q_at = (token * HEADS + group * REPEATS + row % REPEATS)[:, None] * WIDTH + column[None, :]
    q_smem.store(gl.load(q_ptr + q_at))
    fence_async_shared()
    thread_barrier()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    node = first + row // REPEATS
    real = (node < NODES) & (row < ROWS // REPEATS * REPEATS)
    row_cell = (request * NODES + gl.minimum(node, NODES - 1)).to(gl.int64) * GROUPS + group
    row_head = row % REPEATS
    so_far, of_group = nothing(ROWS, WIDTH, VALUES), nothing(ROWS, WIDTH, VALUES)
    for split in range(from_split, to_split):
        stage, turn = (split - from_split) % STAGES, (split - from_split) // STAGES
        mbarrier.wait(full.index(stage), turn & 1)
        scores = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
        scores = warpgroup_mma(q_smem, blocks[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale
        found = weigh_values(scores, blocks[1].index(stage), ones, WIDTH)
        if split + STAGES < to_split:
            thread_barrier()  # all warps have multiplied this split
            _load_split(descs, boxes, full, stage, pages_at, (split + STAGES) * BLOCK, group, WIDTH, PAGE)
        if split < whole_splits:
            of_group = merge(of_group[0], of_group[1], of_group[2], found[0], found[1], found[2])
            if (split + 1) % IN_GROUP == 0:
                if RUNNING:
                    so_far = merge(so_far[0], so_far[1], so_far[2], of_group[0], of_group[1], of_group[2])
                    if split + 1 == whole_splits:
                        _store_rows(so_far, sums_ptr, partial_ptr, row_cell, row_head, real, num_places, 0,
                                    STRIDE, WIDTH, VALUES)  # fmt: skip
                else:
                    _store_rows(of_group, sums_ptr, partial_ptr, row_cell, row_head, real, num_places,
                                split // IN_GROUP, STRIDE, WIDTH, VALUES)  # fmt: skip
                of_group = nothing(ROWS, WIDTH, VALUES)
        else:
            _store_rows(found, sums_ptr, partial_ptr, row_cell, row_head, real, num_places,
                        group_places + split - whole_splits, STRIDE, WIDTH, VALUES)  # fmt: skip


@gluon.jit
def _path_offsets(pages_at, path_at, slot_stride, start, end, root, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where the keys of a node's path from `start` on lie; past the end, where the last one does."""
    key = gl.minimum(start + gl.arange(0, BLOCK, LAYOUT), end - 1)
    page = gl.load(pages_at + key // PAGE, mask=key <= root, other=0, cache_modifier=".cg").to(gl.int64)
    slot = gl.load(path_at + key - root - 1, mask=key > root, other=0, cache_modifier=".cg").to(gl.int64)
    return gl.where(key > root, slot, page * PAGE + key % PAGE) * slot_stride


@gluon.jit
def _attend_path(
    buffers, q_ptr, k_at, v_at, pages_at, path_at, sums_ptr, partial_ptr, token, group, root, end, num_places,
    first_place, slot_stride, scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE: gl.constexpr, PAGE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with one node to the splits from its root's on, and store their results.

    Args:
        buffers: in shared memory, for a split's keys and values, the queries, and weights.
        end: how many keys the node's path has.
        first_place: where the result of split 0 would lie.
    """
    REPEATS: gl.constexpr = HEADS // GROUPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    PLACES: gl.constexpr = gl.SliceLayout(1, COPIED)
    keys, values, queries, weights = buffers
    start = root // BLOCK * BLOCK
    at = _path_offsets(pages_at, path_at, slot_stride, start, end, root, PAGE, PLACES)
    if EARLY:
        wait_for_previous(PDL)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    head = group * REPEATS + gl.minimum(gl.arange(0, OWN_ROWS, PLACES), REPEATS - 1)
    async_load(queries, q_ptr + ((token * HEADS + head) * WIDTH)[:, None] + column)
    cell = (token * GROUPS + group) * num_places
    real = gl.arange(0, OWN_ROWS, gl.SliceLayout(1, MMA)) < REPEATS
    index = gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))[None, :] + gl.zeros([OWN_ROWS, BLOCK], gl.int32, MMA)
    while start < end:
        async_load(keys, k_at + at[:, None] + column)
        async_load(values, v_at + at[:, None] + column)
        async_copy.commit_group()
        at = _path_offsets(pages_at, path_at, slot_stride, start + BLOCK, end, root, PAGE, PLACES)
        async_copy.wait_group(0)
        place = cell + first_place + start // BLOCK
        attend_block(
            queries.load(gl.DotOperandLayout(0, MMA, 2)), keys.permute((1, 0)).load(RIGHT), values.load(RIGHT),
            (start + index - end) >> 31, weights, scale, sums_ptr + place * (2 * STRIDE),
            partial_ptr + place * (STRIDE * WIDTH), real, OWN_ROWS, WIDTH, BLOCK, 4, MMA, STRIDE,
        )  # fmt: skip
        start += BLOCK


@gluon.jit(do_not_specialize=["shares", "num_places", "group_places", "pages_stride"])
def hopper_tree_kernel(
    keys, values, q_ptr, k_ptr, v_ptr, pages_ptr, root_ptr, index_ptr, paths_ptr, sums_ptr, partial_ptr, shares,
    num_places, group_places, slot_stride, pages_stride, scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr, NODES: gl.constexpr,
    DEPTH: gl.constexpr, PAGE: gl.constexpr, WHOLE: gl.constexpr, RUNNING: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend to a share of the splits before a tile's roots, or to those from the root's on of one of its nodes.

    Args:
        keys, values: the cache as boxes of a page's slots, 64 at most, by 64 columns of a head; k_ptr, v_ptr: as it is.
        STAGES: splits of the ring in shared memory.
        The others: see `tree_splits_kernel`.
    """
    gl.static_assert(num_warps == 4, "a tile is one warpgroup's")
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    EACH: gl.constexpr = ROWS // (HEADS // GROUPS)
    TILES: gl.constexpr = (NODES + EACH - 1) // EACH
    dtype: gl.constexpr = keys.dtype
    BOX: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    BOXES: gl.constexpr = STAGES * (WIDTH // BOX_COLUMNS) * (BLOCK // BOX)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    key_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, BOX_COLUMNS], keys.layout)
    value_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, BOX_COLUMNS], values.layout)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, WIDTH], WIDE)
    group, tile, part = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    request, first = tile // TILES, tile % TILES * EACH
    root = gl.load(root_ptr + request, cache_modifier=".cg")
    root_split = root // BLOCK
    whole_splits = root_split // IN_GROUP * IN_GROUP if WHOLE else 0
    pages_at = pages_ptr + request.to(gl.int64) * pages_stride
    if part >= EACH:
        each = (root_split + shares - 1) // shares
        if WHOLE:
            each = ((root_split + IN_GROUP - 1) // IN_GROUP + shares - 1) // shares * IN_GROUP
        from_split = (part - EACH) * each
        to_split = gl.minimum(from_split + each, root_split)
        if from_split < to_split:
            ones = gl.allocate_shared_memory(dtype, [SUM_COLUMNS, BLOCK], WIDE)
            fill_ones(ones)
            full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for stage in gl.static_range(STAGES):
                mbarrier.init(full.index(stage), count=1)
            fence_async_shared()
            # A tile's columns lie 64 by 64, all rows of the first before those of the next: boxes make up the tile.
            blocks = (
                reinterpret(key_boxes, dtype, [STAGES, BLOCK, WIDTH], WIDE),
                reinterpret(value_boxes, dtype, [STAGES, BLOCK, WIDTH], WIDE),
            )
            _attend_share(
                (keys, values), (key_boxes, value_boxes), blocks, q_smem, ones, full, q_ptr, pages_at, sums_ptr,
                partial_ptr, request, group, first, from_split, to_split, whole_splits, num_places, group_places, scale,
                HEADS, GROUPS, WIDTH, STRIDE, NODES, PAGE, RUNNING, STAGES, EARLY, PDL,
            )  # fmt: skip
    elif first + part < NODES:
        token = (request * NODES + first + part).to(gl.int64)
        end = gl.load(index_ptr + token, cache_modifier=".cg").to(gl.int32) + 1
        buffers = (
            reinterpret(key_boxes, dtype, [BLOCK, WIDTH], PLAIN),
            reinterpret(value_boxes, dtype, [BLOCK, WIDTH], PLAIN),
            reinterpret(q_smem, dtype, [OWN_ROWS, WIDTH], PLAIN),
            gl.allocate_shared_memory(dtype, [OWN_ROWS, BLOCK], PLAIN),
        )
        _attend_path(
            buffers, q_ptr, k_ptr + group * WIDTH, v_ptr + group * WIDTH, pages_at, paths_ptr + token * DEPTH, sums_ptr,
            partial_ptr, token, group, root, end, num_places, group_places - whole_splits, slot_stride, scale,
            HEADS, GROUPS, WIDTH, STRIDE, PAGE, EARLY, PDL,
        )  # fmt: skip
