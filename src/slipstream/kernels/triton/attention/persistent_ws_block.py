"""One block of keys in `persistent_ws`: scores, weights and weighted values, of BF16 or of FP8."""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from slipstream.kernels.triton.attention.fp8_keys import load_keys, load_scales, load_values
from slipstream.kernels.triton.gluon_compat import thread_barrier


@gluon.jit
def _hide(scores, own, ancestors, start, end, BLOCK: gl.constexpr, MATRIX: gl.constexpr):
    """Return scores with -inf where a row does not see a key, as `tile.hide` does."""
    index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, MATRIX))
    distance = own[:, None] - index[None, :]
    bit = (ancestors[:, None] >> gl.minimum(gl.maximum(distance, 0), 63).to(gl.int64)).to(gl.int32) & 1
    seen = (bit | ((63 - distance) >> 31)) & ((-1 - distance) >> 31) & ((index - end) >> 31)[None, :]
    return gl.where(seen != 0, scores, float("-inf"))


@gluon.jit
def _maximum_of_warp(scores, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Return each row's largest score among a warp's keys: a column for each warp, which has eight keys in 32."""
    apart = gl.reshape(scores, [ROWS, BLOCK // 32, 4, 8])
    return gl.max(gl.max(apart, 1), 2)


@gluon.jit
def _maximum_of_block(maxima, ROWS: gl.constexpr, MATRIX: gl.constexpr):
    """Return each row's largest score of all, to the threads that have the row: lane // 4, and eight more."""
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0], [0, 0]], block_bases=[], shape=[ROWS, 4],
    )  # fmt: skip
    return gl.convert_layout(gl.max(maxima.load(ALL), 1), gl.SliceLayout(1, MATRIX), assert_trivial=True)


@gluon.jit
def attend_block(
    stores, ready, empty, maxima, weights, step, slot, q, own, ancestors, start, end, sure, scale,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    MATRIX: gl.constexpr,
):  # fmt: skip
    """Return the result of a step's block, once it is loaded, and release the stage of the one before.

    A block is a split, so that is what `tile.add_block` makes of it and of nothing.
    """
    FP8: gl.constexpr = len(stores) == 4
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MATRIX, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MATRIX, 2)
    mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
    if FP8:
        k = load_keys(stores[0].index(slot), WIDTH, BLOCK, MATRIX)
        scores = mma_v2(q, k, gl.zeros([ROWS, BLOCK], gl.float32, MATRIX)) * scale
        scores = scores * load_scales(stores[2].index(slot), BLOCK, PAGE, MATRIX)[None, :]
        v = load_values(stores[1].index(slot), WIDTH, BLOCK, MATRIX)
        v_scale = load_scales(stores[3].index(slot), BLOCK, PAGE, MATRIX)
    else:
        k = stores[0].index(slot).permute((1, 0)).load(RIGHT)
        scores = mma_v2(q, k, gl.zeros([ROWS, BLOCK], gl.float32, MATRIX)) * scale
        v = stores[1].index(slot).load(RIGHT)
        v_scale = gl.full([BLOCK], 1.0, gl.float32, gl.SliceLayout(0, MATRIX))
    if start + BLOCK > sure:
        scores = _hide(scores, own, ancestors, start, end, BLOCK, MATRIX)
        if FP8:
            index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, MATRIX))
            v_scale = gl.where(index < end, v_scale, 0.0)
        # Slots past the end may hold anything, and nothing times NaN is NaN.
        key = gl.arange(0, BLOCK, gl.SliceLayout(1, RIGHT))
        v = gl.where((start + key < end)[:, None], v, gl.zeros([BLOCK, WIDTH], v.dtype, RIGHT))
    maxima.store(_maximum_of_warp(scores, ROWS, BLOCK))
    thread_barrier()  # for the maxima, and one thread tells for all that they have multiplied the block before
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    best = _maximum_of_block(maxima, ROWS, MATRIX)
    pivot = gl.where(best == float("-inf"), 0.0, best)
    weight = gl.exp2(scores - pivot[:, None]).to(v.dtype)
    weights.index(0).store(weight)
    if FP8:
        weights.index(1).store((weight.to(gl.float32) * v_scale[None, :]).to(v.dtype))
    weight = weights.index(0).load(LEFT)
    scaled = weights.index(1).load(LEFT) if FP8 else weight
    acc = mma_v2(scaled, v, gl.zeros([ROWS, WIDTH], gl.float32, MATRIX))
    ones = gl.full([BLOCK, 8], 1.0, v.dtype, RIGHT)  # all columns of the sum are alike, and every warp has them
    return best, gl.max(mma_v2(weight, ones, gl.zeros([ROWS, 8], gl.float32, MATRIX)), 1), acc
