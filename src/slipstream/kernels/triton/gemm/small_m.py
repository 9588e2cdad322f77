"""Products of at most a tile of rows: weights on their way before the rows are there, norms and rotations folded in.

The sums are those of `split_k`, bit for bit: the same splits of K, in the same order. What differs is when
things are loaded. A program's first weights are read into shared memory, and the lines behind them into the cache,
while the kernel before still runs; rows come through registers, one step ahead, where a norm can be applied to them.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.prologue import (
    add_slices,
    apply_norm,
    encode_with,
    factor_and_scale,
    norm_factor,
    repeat_numbers,
    repeat_rows,
    scale_of_maxima,
)
from slipstream.kernels.triton.gemm.rope_epilogue import angles, places, rope_rows, rotate_and_store
from slipstream.kernels.triton.gemm.split_k import reduce_splits, store_outputs, weight_rows
from slipstream.kernels.triton.launch import (
    keep_order,
    let_next_start,
    prefetch,
    wait_for_previous,
    wait_then_let_start,
)
from slipstream.kernels.triton.norm import pair_sums


@triton.jit
def _weights(w_at, is_own, k, K, EVEN_K: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr):
    ZERO: tl.constexpr = 0 if KIND == "int8" else 0.0
    if EVEN_K and WHOLE:
        w = tl.load(w_at + k[None, :])
    elif EVEN_K:
        w = tl.load(w_at + k[None, :], mask=is_own[:, None], other=ZERO)
    else:
        w = tl.load(w_at + k[None, :], mask=is_own[:, None] & (k[None, :] < K), other=ZERO)
    return w


@triton.jit
def _rows(x_at, k, real_M, is_there, KIND: tl.constexpr):
    ZERO: tl.constexpr = 0 if KIND == "int8" else 0.0
    return tl.load(x_at + k[:, None], mask=real_M[None, :] & is_there[:, None], other=ZERO)


@triton.jit
def _multiply_step(w_at, is_own, k, x, acc, K, EVEN_K: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Add one tile's columns."""
    w = _weights(w_at, is_own, k, K, EVEN_K, KIND, WHOLE)
    if KIND == "int8":
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    elif KIND == "fp8":
        # Hopper keeps few bits inside an FP8 sum: whole float32 sums are made after each tile of 128 columns.
        acc += tl.dot(w, x)
    elif KIND == "fp8_upcast":
        acc = tl.dot(w.to(tl.bfloat16), x.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _prefetch_and_wait(w_at, k_from, K, LINES: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr):
    """Prefetch LINES lines of each weight row, then wait for the inputs; with LATE the next kernel starts only then."""
    if PDL and LINES > 0:
        LINE: tl.constexpr = 128 // (w_at.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(w_at + tl.minimum(k_from + tl.arange(0, LINES) * LINE, K - 1)[None, :])
    if LATE:
        wait_then_let_start(PDL)
    else:
        wait_for_previous(PDL)


@triton.jit
def _known_of_rows(
    none, x_ptr, norm_ptr, left_ptr, M, K, x_stride, num_parts, eps,
    NORM: tl.constexpr, CODES: tl.constexpr, KNOWN: tl.constexpr, LOADED: tl.constexpr, SQUARED: tl.constexpr,
    PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return each row's factor of its norm, its scale and that scale's inverse; what is not needed is `none`.

    Found for KNOWN rows, and repeated until there are LOADED.
    """
    factor, scale, inverse = none, none, none
    row = tl.minimum(tl.arange(0, KNOWN), M - 1)
    if CODES == "maxima":
        scale = scale_of_maxima(left_ptr, row, num_parts, PARTS)
    elif CODES == "norm":
        factor, scale = factor_and_scale(
            x_ptr, norm_ptr, left_ptr, row, K, x_stride, eps, KNOWN, SQUARED, PARTS, LEVELS
        )
    elif NORM:
        factor = norm_factor(left_ptr, row, K, eps, KNOWN, SQUARED, PARTS, LEVELS)
    if NORM:
        factor = repeat_numbers(factor, KNOWN, LOADED)
    if CODES != "none":
        scale = repeat_numbers(scale, KNOWN, LOADED)
        inverse = tl.div_rn(1.0, scale)
    return factor, scale, inverse


@triton.jit
def _ready(
    rows, norm, factor, scale, inverse,
    NORM: tl.constexpr, CODES: tl.constexpr, LOADED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return rows as they are multiplied: after their norm, and as codes."""
    if NORM:
        rows = apply_norm(rows, norm, factor[None, :])
    if CODES != "none":
        rows = encode_with(rows, scale[None, :], inverse[None, :])
    return repeat_rows(rows, LOADED, BLOCK_M)


@triton.jit
def _rows_at(x_ptr, norm_ptr, columns, M, x_stride, ROWS: tl.constexpr, LOADED: tl.constexpr):
    """Return where rows begin in each split of so many columns, where their norm's weights do, and which are there.

    Weights have one copy for each row: then they lie as the rows do.
    """
    row, split_at = tl.arange(0, LOADED), tl.zeros([LOADED], tl.int32)
    if LOADED > ROWS:
        row, split_at = row % ROWS, row // ROWS * columns
    x_at = x_ptr + (tl.minimum(row, M - 1).to(tl.int64) * x_stride + split_at)[None, :]
    return x_at, norm_ptr + split_at[None, :], row < M


@triton.jit
def _multiply_split(
    w_at, is_own, x_ptr, norm_ptr, left_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, n_tile, split, steps, M, K,
    x_stride, num_parts, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TWICE: tl.constexpr, EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    KNOWN: tl.constexpr, SLICES: tl.constexpr, SQUARED: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
    LINES: tl.constexpr, STAGED: tl.constexpr, PROGRAM_N: tl.constexpr, HALF: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one split of K, `steps` tiles long, or with TWICE that many pairs of tiles; or SLICES splits.

    The wait for the rows is inside the loop, and rows are carried from step to step: so the compiler's loads of the
    first weights, which it starts before the loop, do not wait. Returns the sums, the rows' scales if CODES are made
    here, and tokens' slots and angles where heads are rotated (LATE): those are on their way during the first steps.
    """
    STEP: tl.constexpr = 2 * BLOCK_K if TWICE else BLOCK_K
    if KIND == "int8":
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    LOADED: tl.constexpr = SLICES * ROWS
    x_at, norm_at, real = _rows_at(x_ptr, norm_ptr, steps * STEP, M, x_stride, ROWS, LOADED)
    x = tl.zeros([BLOCK_K, LOADED], x_ptr.dtype.element_ty)
    norm = tl.zeros([BLOCK_K, LOADED], norm_ptr.dtype.element_ty)
    second_x, second_norm = x, norm
    factor = tl.zeros([LOADED], tl.float32)
    scale, inverse = factor, factor
    TOKENS: tl.constexpr = BLOCK_M // SLICES
    OUTPUTS: tl.constexpr = BLOCK_N // SLICES
    slot, position = tl.zeros([TOKENS], tl.int64), tl.zeros([TOKENS], tl.int64)
    cos = tl.zeros([TOKENS, OUTPUTS // 2], cos_ptr.dtype.element_ty)
    sin = cos
    for step in range(steps):
        k = (split * steps + step) * STEP + tl.arange(0, BLOCK_K)
        if step == 0:
            _prefetch_and_wait(w_at, split * steps * STEP + STAGED, K, LINES, LATE, PDL)
            x = _rows(x_at, k, real, k < K, KIND)
            if TWICE:
                second_x = _rows(x_at, k + BLOCK_K, real, k + BLOCK_K < K, KIND)
            if NORM:
                norm = _rows(norm_at, k, real, k < K, "dense")
                if TWICE:
                    second_norm = _rows(norm_at, k + BLOCK_K, real, k + BLOCK_K < K, "dense")
            if NORM or CODES != "none":
                keep_order(
                    PDL
                )  # or the assembler issues the loads of these rows only after what is known of them has arrived
            factor, scale, inverse = _known_of_rows(
                factor, x_ptr, norm_ptr, left_ptr, M, K, x_stride, num_parts, eps,
                NORM, CODES, KNOWN, LOADED, SQUARED, PARTS, LEVELS,
            )  # fmt: skip
            if LATE:
                slot, position = places(slots_ptr, positions_ptr, M, TOKENS)
        if LATE:  # noqa: SIM102 - the one is known when the kernel is compiled
            if step == tl.minimum(1, steps - 1):
                cos, sin = angles(position, n_tile, cos_ptr, sin_ptr, OUTPUTS, HALF, PROGRAM_N)
        ahead = k + STEP
        more = step + 1 < steps
        rows, second_rows = x, second_x
        x = _rows(x_at, ahead, real, (ahead < K) & more, KIND)
        rows = _ready(rows, norm, factor, scale, inverse, NORM, CODES, LOADED, BLOCK_M)
        if NORM:
            norm = _rows(norm_at, ahead, real, (ahead < K) & more, "dense")
        if TWICE:
            ahead += BLOCK_K
            second_x = _rows(x_at, ahead, real, (ahead < K) & more, KIND)
            second_rows = _ready(second_rows, second_norm, factor, scale, inverse, NORM, CODES, LOADED, BLOCK_M)
            if NORM:
                second_norm = _rows(norm_at, ahead, real, (ahead < K) & more, "dense")
        acc = _multiply_step(w_at, is_own, k, rows, acc, K, EVEN_K, KIND, WHOLE)
        if TWICE:
            acc = _multiply_step(w_at, is_own, k + BLOCK_K, second_rows, acc, K, EVEN_K, KIND, WHOLE)
    if CODES != "none":
        scale = repeat_numbers(scale, LOADED, BLOCK_M)
    return acc, scale, slot, cos, sin


@triton.jit(do_not_specialize=["M", "steps"])
def small_m_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    norm_ptr, left_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    M, N, K, steps, num_parts, x_stride, residual_stride, y_stride, slot_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAM_N: tl.constexpr, BLOCK_K: tl.constexpr, TWICE: tl.constexpr,
    SPLITS: tl.constexpr, EVEN_K: tl.constexpr, KIND: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, KNOWN: tl.constexpr,
    SLICES: tl.constexpr, SQUARED: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr, LEAVES: tl.constexpr,
    LEFT_LEVELS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, LINES: tl.constexpr,
    STAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply.

    END is "plain", "silu" or "rope". `left_ptr` is what the kernel before left of each row, PARTS = 2^LEVELS at most:
    sums of SQUARED squares for a NORM, or `num_parts` largest magnitudes where CODES are made from "maxima"; with CODES
    of a "norm" whole rows are read. A step reads ROWS rows, BLOCK_M or a lesser power of two, and repeats them; KNOWN
    is a power of two that holds those there are. LEAVES is what this kernel leaves: "squares" (of 2^LEFT_LEVELS outputs
    each), "maxima" or "none". LINES are the lines of each weight row to prefetch behind the STAGED columns that the
    loop has in flight before it waits.

    With more than one of SLICES (sliced-K) the weight's tile is that many of fewer rows, each of another split of K,
    and so is the rows' tile. Their product holds every split's sums; the sums across splits are not used.
    """
    LATE: tl.constexpr = END == "rope"  # attention is next, and reads what was written before the kernel before
    if not LATE:
        let_next_start(PDL)
    OUTPUTS: tl.constexpr = BLOCK_N // SLICES
    TOKENS: tl.constexpr = BLOCK_M // SLICES
    STEP: tl.constexpr = 2 * BLOCK_K if TWICE else BLOCK_K
    n_tile, split = tl.program_id(0), tl.program_id(1)
    place, split_at = tl.arange(0, BLOCK_N), 0
    if SLICES > 1:
        place, split_at = place % OUTPUTS, place // OUTPUTS * (steps * STEP)
    rows_N = _tile_rows(place, n_tile, N, OUTPUTS, PROGRAM_N, END, HALF)
    if END == "plain":
        is_own = place < PROGRAM_N
    else:
        is_own = place % (OUTPUTS // 2) < PROGRAM_N // 2
    w_at = w_ptr + (rows_N.to(tl.int64) * K + split_at)[:, None]
    rows_O = _tile_rows(tl.arange(0, OUTPUTS), n_tile, N, OUTPUTS, PROGRAM_N, END, HALF)
    if KIND != "dense":
        w_scale = tl.load(w_scale_ptr + rows_O)  # the last step would wait for it
    total, x_scale, slot, cos, sin = _multiply_split(
        w_at, is_own, x_ptr, norm_ptr, left_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, n_tile, split, steps, M,
        K, x_stride, num_parts, eps, BLOCK_M, BLOCK_N, BLOCK_K, TWICE, EVEN_K, OUTPUTS == PROGRAM_N, KIND, NORM, CODES,
        ROWS, KNOWN, SLICES, SQUARED, PARTS, LEVELS, LINES, STAGED, PROGRAM_N, HALF, LATE, PDL,
    )  # fmt: skip
    finished = True
    if SPLITS > 1:
        total, finished = reduce_splits(
            total, partial_ptr, counter_ptr, n_tile, tl.num_programs(0), split, SPLITS, BLOCK_N, BLOCK_M
        )
    if finished:
        sums = total.to(tl.float32)
        if SLICES > 1:
            sums = add_slices(sums, SLICES, OUTPUTS, TOKENS)
        if KIND != "dense":
            if CODES == "none":
                scale = tl.load(x_scale_ptr + tl.minimum(tl.arange(0, TOKENS), M - 1))
            elif SLICES > 1:
                scale = tl.max(tl.reshape(x_scale, (SLICES, TOKENS)), 0)  # a row's is the same in all splits
            else:
                scale = x_scale
            sums = sums * (scale[None, :] * w_scale[:, None])
        _store_tile(
            sums, slot, cos, sin, n_tile, bias_ptr, residual_ptr, y_ptr, leave_ptr, keys_ptr, values_ptr, M, N,
            residual_stride, y_stride, slot_stride, TOKENS, OUTPUTS, PROGRAM_N, END, HAS_BIAS, HAS_RESIDUAL, LEAVES,
            LEFT_LEVELS, HEADS, GROUPS, HALF,
        )  # fmt: skip


@triton.jit
def _tile_rows(
    place, n_tile, N, BLOCK_N: tl.constexpr, PROGRAM_N: tl.constexpr, END: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Return the weight rows of places in a tile."""
    if END == "rope":
        rows = rope_rows(place, n_tile, N, BLOCK_N, HALF, PROGRAM_N)
    else:
        rows = weight_rows(place, n_tile, N, BLOCK_N, END == "silu", PROGRAM_N)
    return rows


@triton.jit
def _store_tile(
    sums, slot, cos, sin, n_tile, bias_ptr, residual_ptr, y_ptr, leave_ptr, keys_ptr, values_ptr, M, N,
    residual_stride, y_stride, slot_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAM_N: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, LEAVES: tl.constexpr, LEFT_LEVELS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Finish float32 sums and store them, with what is left for the next kernel."""
    if END == "rope":
        rotate_and_store(
            sums, slot, cos, sin, n_tile, bias_ptr, y_ptr, keys_ptr, values_ptr, M, N, y_stride, slot_stride,
            BLOCK_M, BLOCK_N, HAS_BIAS, HEADS, GROUPS, HALF, PROGRAM_N,
        )  # fmt: skip
    else:
        out = store_outputs(
            sums, 0, n_tile, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride, BLOCK_M, BLOCK_N,
            END == "silu", HAS_BIAS, HAS_RESIDUAL, PROGRAM_N,
        )  # fmt: skip
        if LEAVES == "squares":
            _store_squares(out.to(tl.float32), n_tile, leave_ptr, M, N, BLOCK_M, BLOCK_N, LEFT_LEVELS)
        elif LEAVES == "maxima":
            token = tl.arange(0, BLOCK_M)
            at = leave_ptr + token.to(tl.int64) * tl.num_programs(0) + n_tile
            tl.store(at, tl.max(tl.abs(out.to(tl.float32)), 1), mask=token < M)


@triton.jit
def _store_squares(
    out, n_tile, squares_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Store the sum of squares of every 2^LEVELS outputs of a row."""
    EACH: tl.constexpr = BLOCK_N >> LEVELS
    sums = pair_sums(out * out, LEVELS)
    part = n_tile * EACH + tl.arange(0, EACH)
    token = tl.arange(0, BLOCK_M)
    count = tl.cdiv(N, BLOCK_N // EACH)
    at = squares_ptr + token.to(tl.int64)[:, None] * count + part[None, :]
    tl.store(at, sums, mask=(token < M)[:, None] & (part < count)[None, :])
