"""GEMV of 1 to 4 rows, warp-specialised (sm_90): a producer warp loads weights by TMA, four warps multiply.

What `small_m` computes, with its bits. A program takes all splits of K of its weight rows, side by side, and
its ring of weights is so long that it has a processor to itself: where two fit, some processors are given two, and
others none. The producer fills the ring before the PDL wait, and goes on as stages are released.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,has-type,index"
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

from slipstream.kernels.triton.gemm.hopper_gemv_epilogue import (
    angles,
    biased,
    end_layout,
    end_plain,
    end_rope,
    finished_sums,
    places,
    weight_row,
)
from slipstream.kernels.triton.gemm.hopper_gemv_prologue import (
    chunk_layout,
    chunk_places,
    coded_rows,
    factor_of,
    for_rows,
    largest,
    left_of_rows,
    normed_rows,
    of_tokens,
    scale_of,
    store_chunk,
)
from slipstream.kernels.triton.gemm.quantize import row_scale
from slipstream.kernels.triton.gluon_compat import reinterpret, thread_barrier, tma_load


@gluon.jit
def _load_box(
    w_box, ring, bar, tile, part, k, slot, N, BLOCK_N: gl.constexpr, SEG: gl.constexpr, OWN: gl.constexpr,
    BK: gl.constexpr, SLICES: gl.constexpr, STEPS: gl.constexpr, END: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Load a box of every split's rows; larger boxes take the rows before it."""
    BOX: gl.constexpr = w_box.block_shape[0]
    FROM: gl.constexpr = OWN // (2 * BOX) * (2 * BOX)
    buffers = reinterpret(ring, ring.dtype, [ring.shape[0] * (BLOCK_N // BOX), BOX, BK], ring.layout)
    row = weight_row(tile * OWN + FROM, part, N, END, HALF)
    for piece in gl.static_range(SLICES):
        buffer = buffers.index(slot * (BLOCK_N // BOX) + (piece * SEG + FROM) // BOX)
        tma_load(w_box, [row, piece * (STEPS * BK) + k], bar, buffer)


@gluon.jit
def _load_stage(
    w_boxes, ring, ready, tile, q, slot, N, BLOCK_N: gl.constexpr, SEG: gl.constexpr, OWN: gl.constexpr,
    BK: gl.constexpr, SLICES: gl.constexpr, PARTS: gl.constexpr, STEPS: gl.constexpr, END: gl.constexpr,
    HALF: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Load the weights of one part of a step: for each split OWN rows of BK columns."""
    bar = ready.index(slot)
    mbarrier.expect(bar, BYTES)
    for i in gl.static_range(len(w_boxes)):
        _load_box(
            w_boxes[i], ring, bar, tile, q % PARTS, q // PARTS * BK, slot, N, BLOCK_N, SEG, OWN, BK, SLICES, STEPS, END,
            HALF,
        )  # fmt: skip


@gluon.jit
def _produce(
    w_boxes, ring, ready, empty, tile, N, trigger, BLOCK_N: gl.constexpr, SEG: gl.constexpr, OWN: gl.constexpr,
    BK: gl.constexpr, SLICES: gl.constexpr, PARTS: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    END: gl.constexpr, HALF: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load all weights, as stages are released, and let the next kernel start when `trigger` loads are left."""
    TOTAL: gl.constexpr = STEPS * PARTS
    FIRST: gl.constexpr = SLOTS if SLOTS < TOTAL else TOTAL
    if PDL and END != "rope":  # noqa: SIM102 - the one is known when the kernel is compiled
        if trigger < 0:
            gdc_launch_dependents()
    for q in range(FIRST):
        _load_stage(w_boxes, ring, ready, tile, q, q, N, BLOCK_N, SEG, OWN, BK, SLICES, PARTS, STEPS, END, HALF, BYTES)
    if PDL:
        # Attention, after a rotation, reads what was written before the kernel before: it may not start earlier.
        gdc_wait()
        if (END == "rope" and trigger < 0) or TOTAL - trigger <= FIRST:
            gdc_launch_dependents()
    slot, phase = 0, 0
    for q in range(FIRST, TOTAL):
        mbarrier.wait(empty.index(slot), phase)
        _load_stage(
            w_boxes, ring, ready, tile, q, slot, N, BLOCK_N, SEG, OWN, BK, SLICES, PARTS, STEPS, END, HALF, BYTES
        )
        if PDL:  # noqa: SIM102 - the one is known when the kernel is compiled
            if q + 1 == TOTAL - trigger:
                gdc_launch_dependents()
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """Return the stage and the phase of the next load."""
    slot += 1
    over = slot == SLOTS
    return gl.where(over, 0, slot), gl.where(over, phase ^ 1, phase)


@gluon.jit
def _group(
    ring, tiles, ready, empty, one, two, nothing, first, slot, phase, U: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Multiply U steps; the products of a part are under way when those of the one before are waited for."""
    before, last = nothing, slot
    for u in gl.static_range(U):
        x = tiles.index(first + u).permute((1, 0))
        for p in gl.static_range(PARTS):
            mbarrier.wait(ready.index(slot), phase)
            if FP8:
                # Hopper keeps few bits inside an FP8 sum: whole float32 sums are made after each 128 columns.
                fresh = warpgroup_mma(ring.index(slot), x, nothing, use_acc=False, is_async=True)
                if u + p > 0:
                    done = warpgroup_mma_wait(1, deps=[before])
                    if PARTS == 2 and p == 0:
                        two += done
                    else:
                        one += done
                before = fresh
            else:
                if p == 0:
                    one = warpgroup_mma(ring.index(slot), x, one, is_async=True)
                else:
                    two = warpgroup_mma(ring.index(slot), x, two, is_async=True)
                if u + p > 0:
                    if PARTS == 2:
                        one, two = warpgroup_mma_wait(1, deps=[one, two])
                    else:
                        one = warpgroup_mma_wait(1, deps=[one])
            if u + p > 0:
                mbarrier.arrive(empty.index(last))
            last = slot
            slot, phase = _next(slot, phase, SLOTS)
    if FP8:
        done = warpgroup_mma_wait(0, deps=[before])
        if PARTS == 2:
            two += done
        else:
            one += done
    elif PARTS == 2:
        one, two = warpgroup_mma_wait(0, deps=[one, two])
    else:
        one = warpgroup_mma_wait(0, deps=[one])
    mbarrier.arrive(empty.index(last))
    return one, two, slot, phase


@gluon.jit
def _for_outputs(scale, token, MP: gl.constexpr):
    """Return tokens' scales for sums [outputs, tokens]."""
    found = of_tokens(scale, token, MP)
    if MP > 1:
        found = found[None, :]
    return found


@gluon.jit
def _weight_scales(
    w_scale_ptr, j, N, FP8: gl.constexpr, PARTS: gl.constexpr, END: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Return the scales of both parts' weight rows, where weights are codes."""
    one, two = 0.0, 0.0
    if FP8:
        one = gl.load(w_scale_ptr + gl.minimum(weight_row(j, 0, N, END, HALF), N - 1))
        if PARTS == 2:
            two = gl.load(w_scale_ptr + gl.minimum(weight_row(j, 1, N, END, HALF), N - 1))
    return one, two


@gluon.jit
def _known_of_rows(
    raw, weight, left, x_scale_ptr, token, M, K, eps, C: gl.constexpr, MP: gl.constexpr, BK: gl.constexpr,
    NUM: gl.constexpr, ROWS: gl.constexpr, FP8: gl.constexpr, NORM: gl.constexpr, CODES: gl.constexpr,
    LEFT_LEVELS: gl.constexpr,
):  # fmt: skip
    """Return a first chunk's rows after their norm, and what is known of all: factors, scales, and those of codes."""
    scale, factor, coded, inverse = 0.0, 0.0, 0.0, 0.0
    if FP8 and CODES == "none":
        scale = gl.load(x_scale_ptr + gl.minimum(token, M - 1))[None, :]
    if NORM:
        factor = for_rows(factor_of(left, K, eps, LEFT_LEVELS), MP, ROWS)
    if CODES == "maxima":
        found = scale_of(left)
        scale = _for_outputs(found, token, MP)
        coded, inverse = for_rows(found, MP, ROWS), for_rows(gl.div_rn(1.0, found), MP, ROWS)
    rows = normed_rows(raw, weight, factor, NORM)
    if CODES == "norm":
        gl.static_assert(NUM == 1)
        found = row_scale(largest(rows, C, MP, BK), "fp8")
        scale = _for_outputs(found, token, MP)
        coded, inverse = for_rows(found, MP, ROWS), for_rows(gl.div_rn(1.0, found), MP, ROWS)
    return rows, factor, scale, coded, inverse


@gluon.jit
def _multiply(
    ring, tiles, chunks, ready, empty, x_ptr, norm_ptr, x_at, norm_at, rows, raw, weight, factor, coded, inverse,
    nothing, position, tile, cos_ptr, sin_ptr, SEG: gl.constexpr, OWN: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr,
    SLICES: gl.constexpr, PARTS: gl.constexpr, MP: gl.constexpr, NUM: gl.constexpr, C: gl.constexpr, U: gl.constexpr,
    SLOTS: gl.constexpr, FP8: gl.constexpr, END: gl.constexpr, NORM: gl.constexpr, CODES: gl.constexpr,
    HALF: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Multiply what the producer loads, chunk by chunk of prepared rows; return the sums, and pairs' angles."""
    one, two, slot, phase = nothing, nothing, 0, 0
    cos, sin = 0.0, 0.0
    if NUM == 1:
        store_chunk(coded_rows(rows, coded, inverse, CODES != "none"), chunks.index(0), C, SLICES, MP, BN, BK, CHUNK)
        fence_async_shared()
        thread_barrier()
        if END == "rope":
            cos, sin = angles(position, tile, cos_ptr, sin_ptr, SEG, OWN, HALF)
        for group in range(C // U):
            one, two, slot, phase = _group(
                ring, tiles, ready, empty, one, two, nothing, group * U, slot, phase, U, PARTS, SLOTS, FP8
            )
    else:
        if END == "rope":
            cos, sin = angles(position, tile, cos_ptr, sin_ptr, SEG, OWN, HALF)
        for chunk in range(NUM):
            rows = normed_rows(raw, weight, factor, NORM)
            store_chunk(
                coded_rows(rows, coded, inverse, CODES != "none"), chunks.index(chunk & 1), C, SLICES, MP, BN, BK, CHUNK
            )
            fence_async_shared()
            thread_barrier()
            ahead = gl.minimum(chunk + 1, NUM - 1) * (C * BK)
            raw = gl.load(x_ptr + x_at + ahead)
            if NORM:
                weight = gl.load(norm_ptr + norm_at + ahead)
            for group in range(C // U):
                one, two, slot, phase = _group(
                    ring, tiles, ready, empty, one, two, nothing, (chunk & 1) * C + group * U, slot, phase, U, PARTS,
                    SLOTS, FP8,
                )  # fmt: skip
    return one, two, cos, sin


@gluon.jit
def _work(
    ring, tiles, chunks, sums_store, ready, empty, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr,
    norm_ptr, left_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, tile,
    M, N, K, num_parts, x_stride, residual_stride, y_stride, slot_stride, eps,
    BLOCK_N: gl.constexpr, SEG: gl.constexpr, OWN: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr,
    SLICES: gl.constexpr, PARTS: gl.constexpr, MP: gl.constexpr, STEPS: gl.constexpr, C: gl.constexpr, U: gl.constexpr,
    SLOTS: gl.constexpr, FP8: gl.constexpr, END: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    NORM: gl.constexpr, CODES: gl.constexpr, LEFT: gl.constexpr, LEFT_LEVELS: gl.constexpr, LEAVES: gl.constexpr,
    LEAVE_LEVELS: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr, HALF: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Prepare rows, multiply what the producer loads, and finish the sums."""
    CHUNK: gl.constexpr = chunk_layout(C, BK)
    E: gl.constexpr = end_layout()
    NUM: gl.constexpr = STEPS // C
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32 if FP8 else 16])
    j = tile * OWN + gl.arange(0, SEG, gl.SliceLayout(1, E))
    token = gl.arange(0, MP, gl.SliceLayout(0, E))
    x_at, norm_at = chunk_places(M, x_stride, SLICES, MP, STEPS, C, BK, gl.SliceLayout(1, CHUNK))
    weight = 0.0
    if NORM:
        weight = gl.load(norm_ptr + norm_at)
    w_one, w_two = _weight_scales(w_scale_ptr, j, N, FP8, PARTS, END, HALF)
    nothing = gl.zeros([BLOCK_N, BN], gl.float32, MMA)
    if PDL:
        gdc_wait()
    raw = gl.load(x_ptr + x_at)
    left, residual, slot_of, position = 0.0, 0.0, 0, 0
    if NORM or CODES == "maxima":
        left = left_of_rows(left_ptr, M, num_parts, MP, LEFT)
    if HAS_RESIDUAL:
        there = (token < M)[None, :] & (j < N)[:, None]
        residual = gl.load(residual_ptr + token[None, :] * residual_stride + j[:, None], mask=there, other=0.0)
    if END == "rope":
        slot_of, position = places(slots_ptr, positions_ptr, M, MP)
    rows, factor, scale, coded, inverse = _known_of_rows(
        raw, weight, left, x_scale_ptr, token, M, K, eps, C, MP, BK, NUM, gl.SliceLayout(1, CHUNK), FP8, NORM, CODES,
        LEFT_LEVELS,
    )  # fmt: skip
    one, two, cos, sin = _multiply(
        ring, tiles, chunks, ready, empty, x_ptr, norm_ptr, x_at, norm_at, rows, raw, weight, factor, coded, inverse,
        nothing, position, tile, cos_ptr, sin_ptr, SEG, OWN, BK, BN, SLICES, PARTS, MP, NUM, C, U, SLOTS, FP8, END,
        NORM, CODES, HALF, CHUNK,
    )  # fmt: skip
    first, second = finished_sums(one, two, sums_store, BLOCK_N, SEG, SLICES, PARTS, MP)
    if FP8:
        first = first * (scale * w_one[:, None])
        if PARTS == 2:
            second = second * (scale * w_two[:, None])
    first = biased(first, bias_ptr, j, 0, N, END, HALF, HAS_BIAS)
    if PARTS == 2:
        second = biased(second, bias_ptr, j, 1, N, END, HALF, HAS_BIAS)
    if END == "rope":
        end_rope(
            first, second, slot_of, cos, sin, tile, y_ptr, keys_ptr, values_ptr, M, N, y_stride, slot_stride, SEG, OWN,
            MP, HEADS, GROUPS, HALF,
        )  # fmt: skip
    else:
        end_plain(
            first, second, residual, tile, y_ptr, leave_ptr, M, N, y_stride, SEG, OWN, MP, END, HAS_RESIDUAL, LEAVES,
            LEAVE_LEVELS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "trigger"])
def hopper_gemv_kernel(
    w_first, w_second, w_third, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, norm_ptr, left_ptr,
    leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    M, N, K, num_parts, x_stride, residual_stride, y_stride, slot_stride, eps, trigger,
    SEG: gl.constexpr, OWN: gl.constexpr, BOXES: gl.constexpr, BN: gl.constexpr, SLICES: gl.constexpr, MP: gl.constexpr,
    STEPS: gl.constexpr, C: gl.constexpr, U: gl.constexpr, SLOTS: gl.constexpr,
    END: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, NORM: gl.constexpr, CODES: gl.constexpr,
    LEFT: gl.constexpr, LEFT_LEVELS: gl.constexpr, LEAVES: gl.constexpr, LEAVE_LEVELS: gl.constexpr,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, HALF: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply.

    Args:
        w_first, w_second, w_third: the weight by boxes of rows that TMA loads, the largest first: powers
            of two that OWN is the sum of. There are BOXES of them.
        SEG, OWN: rows that a tile has for each split, and those of them that are a program's; of pairs (SiLU and
            rotations) the tile of gates or values, and that of those that go with them, each.
        BN, MP: columns of the matrix instruction, and tokens among them: M or the next power of two.
        STEPS, C, U: steps of 128 bytes of columns, those whose rows are prepared at a time, and those in one piece of
            code.
        SLOTS: steps' tiles that the ring holds.
        trigger: how many loads are left when the next kernel may start; -1: it may at once.
        END, CODES, LEAVES, HEADS, GROUPS, HALF: as in `small_m_kernel`; LEFT = 2^LEFT_LEVELS is its PARTS.
    """
    w_boxes = (w_first,)
    if BOXES == 2:
        w_boxes = (w_first, w_second)
    elif BOXES == 3:
        w_boxes = (w_first, w_second, w_third)
    dtype: gl.constexpr = w_first.dtype
    ITEM: gl.constexpr = dtype.primitive_bitwidth // 8
    BK: gl.constexpr = 128 // ITEM
    PARTS: gl.constexpr = 1 if END == "plain" else 2
    BLOCK_N: gl.constexpr = SLICES * SEG
    COUNT: gl.constexpr = STEPS if STEPS == C else 2 * C
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8 * ITEM, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gl.static_assert(COUNT * 32 >= PARTS * BLOCK_N)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, BK], LAYOUT)
    tiles = gl.allocate_shared_memory(dtype, [COUNT, BN, BK], LAYOUT)
    chunks = reinterpret(tiles, dtype, [COUNT // C, C * BN, BK], LAYOUT)
    sums_store = reinterpret(tiles, gl.float32, [COUNT * 32, BN], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    tile = gl.program_id(0)
    gl.warp_specialize(
        [
            (_work, (ring, tiles, chunks, sums_store, ready, empty, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr,
                     residual_ptr, y_ptr, norm_ptr, left_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr,
                     positions_ptr, cos_ptr, sin_ptr, tile, M, N, K, num_parts, x_stride, residual_stride, y_stride,
                     slot_stride, eps, BLOCK_N, SEG, OWN, BK, BN, SLICES, PARTS, MP, STEPS, C, U, SLOTS, ITEM == 1, END,
                     HAS_BIAS, HAS_RESIDUAL, NORM, CODES, LEFT, LEFT_LEVELS, LEAVES, LEAVE_LEVELS, HEADS, GROUPS, HALF,
                     PDL)),
            (_produce, (w_boxes, ring, ready, empty, tile, N, trigger, BLOCK_N, SEG, OWN, BK, SLICES, PARTS, STEPS,
                    SLOTS, END, HALF, SLICES * OWN * 128, PDL)),
        ],
        [1], [40],
    )  # fmt: skip
