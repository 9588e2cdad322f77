"""GEMM of 17 to 256 rows, warp-specialised (sm_90): a producer warp loads tiles by TMA, consumer warps multiply.

What `wide_tiles` computes, in its order, for products that leave their splits for later or
have one. The producer loads the first stages' weights before the PDL wait, while the kernel before drains.
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

from slipstream.kernels.triton.gluon_compat import tma_load


@gluon.jit
def _load_rows(tiles, stores, bar, stage, m_first, k, go, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Load both pieces of the rows of a step."""
    tma_load(tiles[0], [m_first, k], bar, stores[0].index(stage), pred=go)
    if SECOND > 0:
        tma_load(tiles[1], [m_first + FIRST, k], bar, stores[1].index(stage), pred=go)


@gluon.jit
def _load_weights(tiles, stores, bar, stage, firsts, k, go, PAIR: gl.constexpr):
    """Load the weights of a step."""
    tma_load(tiles[2], [firsts[1], k], bar, stores[2].index(stage), pred=go)
    if PAIR:
        tma_load(tiles[2], [firsts[2], k], bar, stores[3].index(stage), pred=go)


@gluon.jit
def _produce(
    tiles, stores, ready, empty, firsts, k_first, steps, FIRST: gl.constexpr, SECOND: gl.constexpr, PAIR: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, STEP_BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load every step's tiles as stages are released: weights at once, rows after the PDL wait."""
    for stage in gl.static_range(STAGES):
        go = stage < steps
        mbarrier.expect(ready.index(stage), STEP_BYTES, pred=go)
        _load_weights(tiles, stores, ready.index(stage), stage, firsts, k_first + stage * BLOCK_K, go, PAIR)
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        go = stage < steps
        _load_rows(tiles, stores, ready.index(stage), stage, firsts[0], k_first + stage * BLOCK_K, go, FIRST, SECOND)
    for step in range(STAGES, steps):
        slot = step % STAGES
        k = k_first + step * BLOCK_K
        mbarrier.wait(empty.index(slot), (step // STAGES - 1) & 1)
        mbarrier.expect(ready.index(slot), STEP_BYTES)
        _load_weights(tiles, stores, ready.index(slot), slot, firsts, k, True, PAIR)
        _load_rows(tiles, stores, ready.index(slot), slot, firsts[0], k, True, FIRST, SECOND)


@gluon.jit
def _after(one, one_rest, two, two_rest, PENDING: gl.constexpr, SECOND: gl.constexpr, PAIR: gl.constexpr):
    """Wait until the products of at most so many steps are under way."""
    if PAIR and SECOND > 0:
        one, one_rest, two, two_rest = warpgroup_mma_wait(4 * PENDING, deps=[one, one_rest, two, two_rest])
    elif PAIR:
        one, two = warpgroup_mma_wait(2 * PENDING, deps=[one, two])
    elif SECOND > 0:
        one, one_rest = warpgroup_mma_wait(2 * PENDING, deps=[one, one_rest])
    else:
        one = warpgroup_mma_wait(PENDING, deps=[one])
    return one, one_rest, two, two_rest


@gluon.jit
def _multiply(
    stores, ready, empty, steps, FIRST: gl.constexpr, SECOND: gl.constexpr, BLOCK_N: gl.constexpr, PAIR: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Multiply steps as they come.

    A stage is released once its WGMMA has retired. With AT_ONCE that is waited for before the next step's full barrier:
    where loads are slow, more of them are in flight. Else a step is still in flight when the next is waited for.
    """
    REST: gl.constexpr = SECOND if SECOND > 0 else 16
    one, one_rest = gl.zeros([BLOCK_N, FIRST], gl.float32, WIDE), gl.zeros([BLOCK_N, REST], gl.float32, NARROW)
    two, two_rest = one, one_rest
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        x, rest = stores[0].index(stage).permute((1, 0)), stores[1].index(stage).permute((1, 0))
        one = warpgroup_mma(stores[2].index(stage), x, one, is_async=True)
        if SECOND > 0:
            one_rest = warpgroup_mma(stores[2].index(stage), rest, one_rest, is_async=True)
        if PAIR:
            two = warpgroup_mma(stores[3].index(stage), x, two, is_async=True)
            if SECOND > 0:
                two_rest = warpgroup_mma(stores[3].index(stage), rest, two_rest, is_async=True)
        one, one_rest, two, two_rest = _after(one, one_rest, two, two_rest, 0 if AT_ONCE else 1, SECOND, PAIR)
        if AT_ONCE:
            mbarrier.arrive(empty.index(stage))
        else:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    return _after(one, one_rest, two, two_rest, 0, SECOND, PAIR)


@gluon.jit
def _multiply_fp8(
    stores, ready, empty, steps, FIRST: gl.constexpr, SECOND: gl.constexpr, BLOCK_N: gl.constexpr, PAIR: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Multiply steps as they come; the products of a piece are added while those of the next are under way."""
    REST: gl.constexpr = SECOND if SECOND > 0 else 16
    nothing, nothing_rest = gl.zeros([BLOCK_N, FIRST], gl.float32, WIDE), gl.zeros([BLOCK_N, REST], gl.float32, NARROW)
    one, one_rest, two, two_rest = nothing, nothing_rest, nothing, nothing_rest
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        x, rest = stores[0].index(stage).permute((1, 0)), stores[1].index(stage).permute((1, 0))
        part = warpgroup_mma(stores[2].index(stage), x, nothing, use_acc=False, is_async=True)
        if SECOND > 0:
            part_rest = warpgroup_mma(stores[2].index(stage), rest, nothing_rest, use_acc=False, is_async=True)
        if PAIR:
            one += warpgroup_mma_wait(1 if SECOND > 0 else 0, deps=[part])
            part = warpgroup_mma(stores[3].index(stage), x, nothing, use_acc=False, is_async=True)
            if SECOND > 0:
                one_rest += warpgroup_mma_wait(1, deps=[part_rest])
                part_rest = warpgroup_mma(stores[3].index(stage), rest, nothing_rest, use_acc=False, is_async=True)
            two += warpgroup_mma_wait(1 if SECOND > 0 else 0, deps=[part])
            if SECOND > 0:
                two_rest += warpgroup_mma_wait(0, deps=[part_rest])
        else:
            one += warpgroup_mma_wait(1 if SECOND > 0 else 0, deps=[part])
            if SECOND > 0:
                one_rest += warpgroup_mma_wait(0, deps=[part_rest])
        mbarrier.arrive(empty.index(stage))
    return one, one_rest, two, two_rest


@gluon.jit
def _consume(
    stores, ready, empty, steps, FIRST: gl.constexpr, SECOND: gl.constexpr, BLOCK_N: gl.constexpr, PAIR: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, FP8: gl.constexpr, AT_ONCE: gl.constexpr,
    WAITS_FIRST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply what the producer loads; return the sums of both tiles with both pieces of the rows."""
    if PDL:
        gdc_wait()
        if WAITS_FIRST:
            gdc_launch_dependents()
    if FP8:
        sums = _multiply_fp8(stores, ready, empty, steps, FIRST, SECOND, BLOCK_N, PAIR, STAGES, WIDE, NARROW)
    else:
        sums = _multiply(stores, ready, empty, steps, FIRST, SECOND, BLOCK_N, PAIR, STAGES, WIDE, NARROW, AT_ONCE)
    return sums


@gluon.jit
def _numbers(
    total, x_scale_ptr, w_scale_ptr, m_first, n_first, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Turn sums of codes into numbers."""
    if FP8:
        m = gl.minimum(m_first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT)), M - 1)
        n = gl.minimum(n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), N - 1)
        total = total * (gl.load(x_scale_ptr + m)[None, :] * gl.load(w_scale_ptr + n)[:, None])
    return total


@gluon.jit
def _store(
    out, y_ptr, m_first, n_first, M, num_outputs, y_stride, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """Store numbers [BLOCK_N, BLOCK_M] as rows."""
    out = gl.convert_layout(gl.permute(out.to(y_ptr.dtype.element_ty), (1, 0)), STORED)
    m = (m_first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, STORED))).to(gl.int64)[:, None]
    n = (n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORED)))[None, :]
    gl.store(y_ptr + m * y_stride + n, out, mask=(m < M) & (n < num_outputs))


@gluon.jit
def _finish(
    one, two, x_scale_ptr, w_scale_ptr, y_ptr, m_first, n_first, n_second, M, N, y_stride, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, PAIR: gl.constexpr, LAYOUT: gl.constexpr, STORED: gl.constexpr, DEFERRED: gl.constexpr,
    SILU: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Finish the sums of one piece of the rows."""
    SCALED: gl.constexpr = FP8 and not DEFERRED
    num_outputs = N // 2 if SILU else N
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    one = _numbers(one, x_scale_ptr, w_scale_ptr, m_first, n_first, M, N, BLOCK_M, BLOCK_N, LAYOUT, SCALED)
    if PAIR:
        two = _numbers(two, x_scale_ptr, w_scale_ptr, m_first, n_second, M, N, BLOCK_M, BLOCK_N, LAYOUT, SCALED)
    if SILU:
        gate = one.to(dtype).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        one = silu * two.to(dtype).to(gl.float32)
    _store(one, y_ptr, m_first, n_first, M, num_outputs, y_stride, BLOCK_M, BLOCK_N, STORED)
    if PAIR and not SILU:
        _store(two, y_ptr, m_first, n_second, M, num_outputs, y_stride, BLOCK_M, BLOCK_N, STORED)


@gluon.jit(do_not_specialize=["M", "steps"])
def stream_kernel(
    x_first, x_second, w_tiles, x_scale_ptr, w_scale_ptr, y_ptr, M, N, steps, y_stride, part_stride,
    FIRST: gl.constexpr, SECOND: gl.constexpr, BLOCK_N: gl.constexpr, PAIR: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, DEFERRED: gl.constexpr, FP8: gl.constexpr, SILU: gl.constexpr, AT_ONCE: gl.constexpr,
    WAITS_FIRST: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply all rows by one weight tile or a pair, over one split of K; WAITS_FIRST as in `wide_kernel`."""
    REST: gl.constexpr = SECOND if SECOND > 0 else 16
    split = gl.program_id(2)
    num_outputs = N // 2 if SILU else N
    # Programs with the same weights start one after the other, so that one of them reads them from memory.
    place = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    n_tile, m_tile = place // gl.num_programs(1), place % gl.num_programs(1)
    n_first = n_tile * (BLOCK_N if SILU or not PAIR else 2 * BLOCK_N)
    n_second = n_first + (num_outputs if SILU else BLOCK_N)
    m_first = m_tile * (FIRST + SECOND)
    dtype: gl.constexpr = w_tiles.dtype
    ITEM: gl.constexpr = dtype.primitive_bitwidth // 8
    TILES: gl.constexpr = 2 if PAIR else 1
    stores = (
        gl.allocate_shared_memory(dtype, [STAGES, FIRST, BLOCK_K], x_first.layout),
        gl.allocate_shared_memory(dtype, [STAGES if SECOND > 0 else 1, REST, BLOCK_K], x_second.layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_tiles.layout),
        gl.allocate_shared_memory(dtype, [STAGES if PAIR else 1, BLOCK_N, BLOCK_K], w_tiles.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if PDL and not WAITS_FIRST:
        gdc_launch_dependents()
    # A group of four warps takes 64 weight rows; two groups share a tile of 64 by halves of the rows.
    DOWN: gl.constexpr = num_warps if 16 * num_warps <= BLOCK_N else 4
    ACROSS: gl.constexpr = num_warps // DOWN
    COLUMNS: gl.constexpr = 256 // (8 * ITEM)
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, ACROSS], [16, FIRST // ACROSS, COLUMNS])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, ACROSS], [16, REST // ACROSS, COLUMNS])
    one, one_rest, two, two_rest = gl.warp_specialize(
        [
            (_consume, (stores, ready, empty, steps, FIRST, SECOND, BLOCK_N, PAIR, STAGES, WIDE, NARROW, FP8, AT_ONCE,
                     WAITS_FIRST, PDL)),
            (_produce, ((x_first, x_second, w_tiles), stores, ready, empty, (m_first, n_first, n_second),
                    split * steps * BLOCK_K, steps, FIRST, SECOND, PAIR, BLOCK_K, STAGES,
                    (TILES * BLOCK_N + FIRST + SECOND) * BLOCK_K * ITEM, PDL)),
        ],
        [1], [24],
    )  # fmt: skip
    EACH: gl.constexpr = 4 if DEFERRED else 8
    LANES: gl.constexpr = BLOCK_N // EACH if BLOCK_N // EACH < 32 else 32
    STORED: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [num_warps, 1], [1, 0])
    y_ptr += split.to(gl.int64) * part_stride
    _finish(
        one, two, x_scale_ptr, w_scale_ptr, y_ptr, m_first, n_first, n_second, M, N, y_stride, FIRST, BLOCK_N, PAIR,
        WIDE, STORED, DEFERRED, SILU, FP8,
    )  # fmt: skip
    if SECOND > 0:
        _finish(
            one_rest, two_rest, x_scale_ptr, w_scale_ptr, y_ptr, m_first + FIRST, n_first, n_second, M, N, y_stride,
            REST, BLOCK_N, PAIR, NARROW, STORED, DEFERRED, SILU, FP8,
        )  # fmt: skip
