"""GEMM of many rows on Hopper: persistent, one TMA producer warp, two WGMMA consumer warpgroups.

Computes what `split_k` computes, with its bits: a sum runs over K in order within a split, and splits are added in
order. So an output does not depend on how many rows share the pass, and a prompt's rows may share it with decoding.

    producer      wait(empty) -> TMA x[2 x 64, BLOCK_K], w[BLOCK_N, BLOCK_K] -> full
    consumer 0,1  wait(full)  -> WGMMA of 64 rows, one step left in flight -> release the stage before it
                  last step of a split -> add to the total;  last split -> epilogue

The consumers share weights and barriers, not their pace: one adds or stores while the other multiplies. The producer
runs ahead over the ends of tiles: while one is stored, the next one's stages are loaded.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.triton.gluon_compat import reinterpret, tma_load, tma_store

ROWS = gl.constexpr(64)
"""Rows of a WGMMA, and so of one consumer's half of a tile."""
GROUP_M = gl.constexpr(8)
"""Rows of tiles that run side by side."""


@gluon.jit
def _tile_at(tile, tiles):
    """Return a tile's row and column: some rows of tiles at a time, so that concurrent tiles share operands in L2."""
    tiles_m, tiles_n = tiles
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    height = gl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (tile % in_group) % height, (tile % in_group) // height


@gluon.jit
def _load_rows(x_desc, ring, stage, m, k, go):
    """Load a step's rows: a box for each consumer."""
    x_smem, _, full, _ = ring
    tma_load(x_desc, [m, k], full.index(stage), x_smem.index(2 * stage), pred=go)
    tma_load(x_desc, [m + ROWS, k], full.index(stage), x_smem.index(2 * stage + 1), pred=go)


@gluon.jit
def _load_weights(w_desc, ring, stage, n, to_second, k, go, PAIR: gl.constexpr):
    """Load a step's weights: one block of them, or two."""
    _, w_smem, full, _ = ring
    if PAIR:
        tma_load(w_desc, [n, k], full.index(stage), w_smem.index(2 * stage), pred=go)
        tma_load(w_desc, [to_second + n, k], full.index(stage), w_smem.index(2 * stage + 1), pred=go)
    else:
        tma_load(w_desc, [n, k], full.index(stage), w_smem.index(stage), pred=go)


@gluon.jit
def _produce(
    descs, ring, tiles, weights, steps, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, STEP_BYTES: gl.constexpr,
    PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load every step of every tile of this program, as stages are released.

    The first stages' weights come while the kernel before drains; rows are its outputs.
    """
    x_desc, w_desc = descs
    _, _, full, empty = ring
    width, to_second = weights
    tile_m, tile_n = _tile_at(gl.program_id(0), tiles)
    for stage in gl.static_range(STAGES):
        go = stage < steps
        mbarrier.expect(full.index(stage), STEP_BYTES, pred=go)
        _load_weights(w_desc, ring, stage, tile_n * width, to_second, stage * BLOCK_K, go, PAIR)
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_rows(x_desc, ring, stage, tile_m * (2 * ROWS), stage * BLOCK_K, stage < steps)
    step_count = gl.minimum(STAGES, steps)
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles)
        first = 0
        if tile == gl.program_id(0):
            first = gl.minimum(STAGES, steps)
        for step in range(first, steps):
            free = step_count % STAGES
            mbarrier.wait(empty.index(free), ((step_count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(free), STEP_BYTES)
            _load_weights(w_desc, ring, free, tile_n * width, to_second, step * BLOCK_K, True, PAIR)
            _load_rows(x_desc, ring, free, tile_m * (2 * ROWS), step * BLOCK_K, True)
            step_count += 1


@gluon.jit
def _split_sums(one, two, ring, half, step_count, steps, STAGES: gl.constexpr, PAIR: gl.constexpr):
    """Add the products of `steps` steps to `one` (with PAIR to `one` and `two`), a step always in flight."""
    x_smem, w_smem, full, empty = ring
    for _ in range(steps):
        stage = step_count % STAGES
        mbarrier.wait(full.index(stage), (step_count // STAGES) & 1)
        x = x_smem.index(2 * stage + half)
        if PAIR:
            one = warpgroup_mma(x, w_smem.index(2 * stage).permute((1, 0)), one, is_async=True)
            two = warpgroup_mma(x, w_smem.index(2 * stage + 1).permute((1, 0)), two, is_async=True)
            one, two = warpgroup_mma_wait(2, deps=[one, two])
        else:
            one = warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), one, is_async=True)
            one = warpgroup_mma_wait(1, deps=[one])
        mbarrier.arrive(empty.index((step_count + STAGES - 1) % STAGES), pred=step_count > 0)
        step_count += 1
    if PAIR:
        one, two = warpgroup_mma_wait(0, deps=[one, two])
    else:
        one = warpgroup_mma_wait(0, deps=[one])
    return one, two, step_count


@gluon.jit
def _split_sums_fp8(one, two, ring, half, step_count, steps, STAGES: gl.constexpr, PAIR: gl.constexpr):
    """As `_split_sums` for FP8, whose sums inside the matrix unit keep few bits: each step's product is added apart."""
    x_smem, w_smem, full, empty = ring
    for _ in range(steps):
        stage = step_count % STAGES
        mbarrier.wait(full.index(stage), (step_count // STAGES) & 1)
        x = x_smem.index(2 * stage + half)
        if PAIR:
            part = warpgroup_mma(x, w_smem.index(2 * stage).permute((1, 0)), one, use_acc=False, is_async=True)
            one += warpgroup_mma_wait(0, deps=[part])
            part = warpgroup_mma(x, w_smem.index(2 * stage + 1).permute((1, 0)), two, use_acc=False, is_async=True)
            two += warpgroup_mma_wait(0, deps=[part])
        else:
            part = warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), one, use_acc=False, is_async=True)
            one += warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
        step_count += 1
    return one, two, step_count


@gluon.jit
def _finished(total, m, n, scales, bias_ptr, sizes, FP8: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Turn sums into numbers: codes by their scales, then the bias."""
    M, N = sizes
    n = gl.minimum(n, N - 1)
    if FP8:
        x_scale_ptr, w_scale_ptr = scales
        total = total * (gl.load(x_scale_ptr + gl.minimum(m, M - 1))[:, None] * gl.load(w_scale_ptr + n)[None, :])
    if HAS_BIAS:
        total += gl.load(bias_ptr + n).to(gl.float32)[None, :]
    return total


@gluon.jit
def _store(out, m, n, at, y_desc, staged, residual, M, num_outputs, HAS_RESIDUAL: gl.constexpr):
    """Round numbers, add the residual and round again, as torch would; store them by TMA from shared memory.

    Args:
        at: the first row and column.
        staged: shared memory that no store is reading any more.
        residual: a pointer and a row stride.
    """
    out = out.to(y_desc.dtype)
    if HAS_RESIDUAL:
        residual_ptr, residual_stride = residual
        real = (m < M)[:, None] & (n < num_outputs)[None, :]
        added = gl.load(residual_ptr + m.to(gl.int64)[:, None] * residual_stride + n[None, :], mask=real, other=0.0)
        out = (out.to(gl.float32) + added.to(gl.float32)).to(y_desc.dtype)
    staged.store(out)
    fence_async_shared()
    tma_store(y_desc, at, staged)


@gluon.jit
def _consume(
    half, ring, tiles, weights, split, sizes, scales, bias_ptr, residual, y_desc, outs, WIDTH: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr, PAIR: gl.constexpr, SILU: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and store one half of the rows of every tile of this program."""
    if PDL:
        gdc_wait()
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32 if FP8 else 16])
    dtype: gl.constexpr = y_desc.dtype
    BUFFERS: gl.constexpr = 2 if SPLIT and PAIR else 1
    totals, staged = outs
    M, N = sizes
    num_outputs = N // 2 if SILU else N
    width, to_second = weights
    splits, steps = split
    step_count = 0
    inside_m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    inside_n = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        tile_m, tile_n = _tile_at(tile, tiles)
        nothing = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        one, two, total = nothing, nothing, nothing
        for at in range(splits if SPLIT else 1):
            if FP8:
                one, two, step_count = _split_sums_fp8(nothing, nothing, ring, half, step_count, steps, STAGES, PAIR)
            else:
                one, two, step_count = _split_sums(nothing, nothing, ring, half, step_count, steps, STAGES, PAIR)
            if SPLIT:
                total = total + one
                if PAIR:  # both totals do not fit registers beside the sums of a split
                    if at > 0:
                        two = totals.index(half).load(LAYOUT) + two
                    if at < splits - 1:
                        if at == 0:
                            tma.store_wait(0)  # the last tile's outputs were where the total goes
                        totals.index(half).store(two)
        if SPLIT:
            one = total
        first_m, first_n = (2 * tile_m + half) * ROWS, tile_n * width
        m, n = first_m + inside_m, first_n + inside_n
        one = _finished(one, m, n, scales, bias_ptr, sizes, FP8, HAS_BIAS)
        if PAIR:
            two = _finished(two, m, to_second + n, scales, bias_ptr, sizes, FP8, HAS_BIAS)
        if SILU:
            gate = one.to(dtype).to(gl.float32)
            silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
            one = silu * two.to(dtype).to(gl.float32)
        if BUFFERS == 1:
            tma.store_wait(0)
        buffer = staged.index(BUFFERS * half)
        _store(one, m, n, [first_m, first_n], y_desc, buffer, residual, M, num_outputs, HAS_RESIDUAL)
        if PAIR and not SILU:
            if BUFFERS == 1:
                tma.store_wait(0)
            buffer = staged.index(BUFFERS * half + BUFFERS - 1)
            at_second = [first_m, first_n + WIDTH]
            _store(two, m, n + WIDTH, at_second, y_desc, buffer, residual, M, num_outputs, HAS_RESIDUAL)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "tiles_m", "splits", "split_steps"])
def hopper_ws_kernel(
    x_desc, w_desc, y_desc, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, M, N, tiles_m, tiles_n, splits,
    split_steps, residual_stride, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr, PAIR: gl.constexpr,
    SILU: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply rows x [M, K] by weights w [N, K]: y = epilogue(x wT), tile after tile.

    A tile has BLOCK_N weight rows: one block of them, or with PAIR two, whose second holds with SILU the rows `up` of
    the first one's gates.
    """
    gl.static_assert(num_warps == 4, "a consumer is one warpgroup")
    dtype: gl.constexpr = w_desc.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    STEP_BYTES: gl.constexpr = (2 * ROWS + BLOCK_N) * BLOCK_K * (dtype.primitive_bitwidth // 8)
    x_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * (2 if PAIR else 1), WIDTH, BLOCK_K], w_desc.layout)
    KEPT: gl.constexpr = ROWS if SPLIT and PAIR else 1
    totals = gl.allocate_shared_memory(gl.float32, [2, KEPT, WIDTH], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    if SPLIT and PAIR:  # outputs wait to be stored where totals were, two blocks of half the bytes
        staged = reinterpret(totals, y_desc.dtype, [4, ROWS, WIDTH], y_desc.layout)
    else:
        staged = gl.allocate_shared_memory(y_desc.dtype, [2, ROWS, WIDTH], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    ring = (x_smem, w_smem, full, empty)
    tiles = (tiles_m, tiles_n)
    if SILU:
        weights = (WIDTH, N // 2)
    else:
        weights = (BLOCK_N, WIDTH)
    gl.warp_specialize(
        [
            (_consume, (0, ring, tiles, weights, (splits, split_steps), (M, N), (x_scale_ptr, w_scale_ptr), bias_ptr,
                        (residual_ptr, residual_stride), y_desc, (totals, staged), WIDTH, SPLIT, STAGES, FP8,
                        PAIR, SILU, HAS_BIAS, HAS_RESIDUAL, PDL)),
            (_consume, (1, ring, tiles, weights, (splits, split_steps), (M, N), (x_scale_ptr, w_scale_ptr), bias_ptr,
                        (residual_ptr, residual_stride), y_desc, (totals, staged), WIDTH, SPLIT, STAGES, FP8,
                        PAIR, SILU, HAS_BIAS, HAS_RESIDUAL, PDL)),
            (_produce, ((x_desc, w_desc), ring, tiles, weights, split_steps * splits, BLOCK_K, STAGES, STEP_BYTES, PAIR,
                        PDL)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
