"""Products of at most a tile of rows: weights on their way before the rows are there, norms and rotations folded in.

The sums are those of `linear`, bit for bit: the same stretches of columns, in the same order. What differs is when
things are asked for. A program's first weights are read into fast memory, and the lines behind them into the cache,
while the kernel before still runs; rows come through registers, one step ahead, where a norm can be applied to them.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import (
    arrived_last,
    keep_order,
    let_next_start,
    prefetch,
    wait_for_previous,
    wait_then_let_start,
)
from slipstream.kernels.triton.linear import add_parts, residual_tile, store_outputs, sum_of_splits, weight_rows
from slipstream.kernels.triton.narrow_codes import (
    apply_norm,
    encode_with,
    factor_and_scale,
    norm_factor,
    repeat_rows,
    repeat_scales,
    scale_of_maxima,
)
from slipstream.kernels.triton.norm_rope import SQUARES, SQUARES_LEVELS, pair_sums


@triton.jit
def _weights(w_at, k, K, EVEN_K: tl.constexpr, KIND: tl.constexpr):
    ZERO: tl.constexpr = 0 if KIND == "int8" else 0.0
    if EVEN_K:
        w = tl.load(w_at + k[None, :])
    else:
        w = tl.load(w_at + k[None, :], mask=k[None, :] < K, other=ZERO)
    return w


@triton.jit
def _rows(x_at, k, real_M, is_there, KIND: tl.constexpr):
    ZERO: tl.constexpr = 0 if KIND == "int8" else 0.0
    return tl.load(x_at + k[:, None], mask=real_M[None, :] & is_there[:, None], other=ZERO)


@triton.jit
def _multiply_step(w_at, k, x, acc, K, EVEN_K: tl.constexpr, KIND: tl.constexpr):
    """Add one tile's columns."""
    w = _weights(w_at, k, K, EVEN_K, KIND)
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
def _ask_ahead_and_wait(w_at, k_from, K, AHEAD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr):
    """Ask for AHEAD lines of each weight row, then wait for the inputs; with LATE the next kernel starts only then."""
    if PDL and AHEAD > 0:
        LINE: tl.constexpr = 128 // (w_at.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(w_at + tl.minimum(k_from + tl.arange(0, AHEAD) * LINE, K - 1)[None, :])
    if LATE:
        wait_then_let_start(PDL)
    else:
        wait_for_previous(PDL)


@triton.jit
def _known_of_rows(
    none, x_ptr, norm_ptr, left_ptr, row, K, x_stride, num_parts, eps,
    NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return each row's factor of its norm, its scale and that scale's inverse; what is not needed is `none`."""
    factor, scale, inverse = none, none, none
    if CODES == "maxima":
        scale = scale_of_maxima(left_ptr, row, num_parts, PARTS)
    elif CODES == "norm":
        factor, scale = factor_and_scale(x_ptr, norm_ptr, left_ptr, row, K, x_stride, eps, ROWS, PARTS, LEVELS)
    elif NORM:
        factor = norm_factor(left_ptr, row, K, eps, ROWS, PARTS, LEVELS)
    if CODES != "none":
        inverse = tl.div_rn(1.0, scale)
    return factor, scale, inverse


@triton.jit
def _ready(
    rows, norm, factor, scale, inverse,
    NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return rows as they are multiplied: after their norm, and as codes."""
    if NORM:
        rows = apply_norm(rows, norm, factor[None, :])
    if CODES != "none":
        rows = encode_with(rows, scale[None, :], inverse[None, :])
    return repeat_rows(rows, ROWS, BLOCK_M)


@triton.jit
def _stretch(
    w_at, x_ptr, norm_ptr, left_ptr, split, steps, M, K, x_stride, num_parts, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TWICE: tl.constexpr, EVEN_K: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr, AHEAD: tl.constexpr, STAGED: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one stretch of columns, `steps` tiles long, or with TWICE that many pairs of tiles.

    The wait for the rows is inside the loop, and rows are carried from step to step: so the compiler's loads of the
    first weights, which it starts before the loop, do not wait. Returns the sums, and the rows' scales if CODES are
    made here.
    """
    STEP: tl.constexpr = 2 * BLOCK_K if TWICE else BLOCK_K
    if KIND == "int8":
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    row = tl.arange(0, ROWS)
    real = row < M
    row = tl.minimum(row, M - 1)
    x_at = x_ptr + row.to(tl.int64)[None, :] * x_stride
    x = tl.zeros([BLOCK_K, ROWS], x_ptr.dtype.element_ty)
    norm = tl.zeros([BLOCK_K, ROWS], norm_ptr.dtype.element_ty)
    second_x, second_norm = x, norm
    norm_at = norm_ptr + tl.zeros([1, ROWS], tl.int32)  # one copy for each row: then it lies as the rows do
    factor = tl.zeros([ROWS], tl.float32)
    scale, inverse = factor, factor
    for step in range(steps):
        k = (split * steps + step) * STEP + tl.arange(0, BLOCK_K)
        if step == 0:
            _ask_ahead_and_wait(w_at, split * steps * STEP + STAGED, K, AHEAD, LATE, PDL)
            x = _rows(x_at, k, real, k < K, KIND)
            if TWICE:
                second_x = _rows(x_at, k + BLOCK_K, real, k + BLOCK_K < K, KIND)
            if NORM:
                norm = _rows(norm_at, k, real, k < K, "dense")
                if TWICE:
                    second_norm = _rows(norm_at, k + BLOCK_K, real, k + BLOCK_K < K, "dense")
            if NORM or CODES != "none":
                keep_order(PDL)  # or the assembler asks for these rows only when what is known of them is there
            factor, scale, inverse = _known_of_rows(
                factor, x_ptr, norm_ptr, left_ptr, row, K, x_stride, num_parts, eps,
                NORM, CODES, ROWS, PARTS, LEVELS,
            )  # fmt: skip
        ahead = k + STEP
        more = step + 1 < steps
        rows, second_rows = x, second_x
        x = _rows(x_at, ahead, real, (ahead < K) & more, KIND)
        rows = _ready(rows, norm, factor, scale, inverse, NORM, CODES, ROWS, BLOCK_M)
        if NORM:
            norm = _rows(norm_at, ahead, real, (ahead < K) & more, "dense")
        if TWICE:
            ahead += BLOCK_K
            second_x = _rows(x_at, ahead, real, (ahead < K) & more, KIND)
            second_rows = _ready(second_rows, second_norm, factor, scale, inverse, NORM, CODES, ROWS, BLOCK_M)
            if NORM:
                second_norm = _rows(norm_at, ahead, real, (ahead < K) & more, "dense")
        acc = _multiply_step(w_at, k, rows, acc, K, EVEN_K, KIND)
        if TWICE:
            acc = _multiply_step(w_at, k + BLOCK_K, second_rows, acc, K, EVEN_K, KIND)
    if CODES != "none":
        scale = repeat_scales(scale, ROWS, BLOCK_M)
    return acc, scale


@triton.jit
def _rope_rows(n_tile, N, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return the weight rows of a tile of one head: BLOCK_N / 2 values, then those they are rotated with."""
    n = tl.arange(0, BLOCK_N)
    pair = n_tile * (BLOCK_N // 2) + n % (BLOCK_N // 2)
    return tl.minimum(pair // HALF * (2 * HALF) + pair % HALF + n // (BLOCK_N // 2) * HALF, N - 1)


@triton.jit
def _places(
    n_tile, slots_ptr, positions_ptr, cos_ptr, sin_ptr, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return each token's slot, and the angles of a tile's columns at its position [BLOCK_M, BLOCK_N / 2]."""
    token = tl.arange(0, BLOCK_M)
    slot = tl.load(slots_ptr + token, mask=token < M, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=token < M, other=0).to(tl.int64)
    column = n_tile * (BLOCK_N // 2) % HALF + tl.arange(0, BLOCK_N // 2)
    angle = position[:, None] * HALF + column[None, :]
    return slot, tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)


@triton.jit
def _rotate_and_store(
    total, slot, cos, sin, n_tile, bias_ptr, q_ptr, keys_ptr, values_ptr, M, N, q_stride, slot_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Finish float32 sums [BLOCK_N, BLOCK_M] of a head: rotate and store queries, rotate and write keys, write values.

    The arithmetic is that of `norm_rope.rope_and_write`.
    """
    dtype = q_ptr.dtype.element_ty
    PAIRS: tl.constexpr = BLOCK_N // 2
    if HAS_BIAS:
        total += tl.load(bias_ptr + _rope_rows(n_tile, N, BLOCK_N, HALF)).to(tl.float32)[:, None]
    first, second = tl.split(tl.permute(tl.reshape(total, (2, PAIRS, BLOCK_M)), (2, 1, 0)))
    first, second = first.to(dtype), second.to(dtype)
    head, column = n_tile * PAIRS // HALF, n_tile * PAIRS % HALF + tl.arange(0, PAIRS)
    if head < HEADS + GROUPS:
        x, partner = first.to(tl.float32), second.to(tl.float32)
        first = (x * cos + -1.0 * partner * sin).to(dtype)
        second = (partner * cos + 1.0 * x * sin).to(dtype)
    token = tl.arange(0, BLOCK_M)
    target = q_ptr + token.to(tl.int64) * q_stride + head * (2 * HALF)
    if head >= HEADS + GROUPS:
        target = values_ptr + slot * slot_stride + (head - HEADS - GROUPS) * (2 * HALF)
    elif head >= HEADS:
        target = keys_ptr + slot * slot_stride + (head - HEADS) * (2 * HALF)
    at = target[:, None] + column[None, :]
    real = (token < M)[:, None] & (head < HEADS + 2 * GROUPS)
    tl.store(at, first, mask=real)
    tl.store(at + HALF, second, mask=real)


@triton.jit(do_not_specialize=["M", "steps"])
def narrow_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    norm_ptr, left_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    M, N, K, steps, num_parts, x_stride, residual_stride, y_stride, slot_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TWICE: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, KIND: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
    LEAVES: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, AHEAD: tl.constexpr,
    STAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply.

    END is "plain", "silu" or "rope". `left_ptr` is what the kernel before left of each row, PARTS = 2^LEVELS at most:
    sums of squares for a NORM, or `num_parts` largest magnitudes where CODES are made from "maxima"; with CODES of a
    "norm" whole rows are read. A step reads ROWS rows, BLOCK_M or a lesser power of two, and repeats them. LEAVES
    is what this kernel leaves: "squares", "maxima" or "none". AHEAD are the lines of each weight row to ask for behind
    the STAGED columns that the loop has under way before it waits.
    """
    LATE: tl.constexpr = END == "rope"  # attention is next, and reads what was written before the kernel before
    if not LATE:
        let_next_start(PDL)
    n_tile, split = tl.program_id(0), tl.program_id(1)
    if END == "rope":
        rows_N = _rope_rows(n_tile, N, BLOCK_N, HALF)
    else:
        rows_N = weight_rows(n_tile, N, BLOCK_N, END == "silu")
    rows_M = tl.minimum(tl.arange(0, BLOCK_M), M - 1)
    w_at = w_ptr + rows_N.to(tl.int64)[:, None] * K
    total, x_scale = _stretch(
        w_at, x_ptr, norm_ptr, left_ptr, split, steps, M, K, x_stride, num_parts, eps, BLOCK_M, BLOCK_N, BLOCK_K,
        TWICE, EVEN_K, KIND, NORM, CODES, ROWS, PARTS, LEVELS, AHEAD, STAGED, LATE, PDL,
    )  # fmt: skip
    finished = True
    if SPLITS > 1:
        num_tiles = tl.num_programs(0)
        at, stride = sum_of_splits(total, partial_ptr, n_tile, num_tiles, split, SPLITS, BLOCK_N, BLOCK_M)
        finished = arrived_last(counter_ptr + n_tile, SPLITS)
        if finished:
            total = add_parts(at, stride, SPLITS)
    if finished:
        sums = total.to(tl.float32)
        if KIND != "dense":
            if CODES == "none":
                x_scale = tl.load(x_scale_ptr + rows_M)
            sums = sums * (x_scale[None, :] * tl.load(w_scale_ptr + rows_N)[:, None])
        _store_tile(
            sums, n_tile, bias_ptr, residual_ptr, y_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr,
            cos_ptr, sin_ptr, M, N, residual_stride, y_stride, slot_stride, BLOCK_M, BLOCK_N, END, HAS_BIAS,
            HAS_RESIDUAL, LEAVES, HEADS, GROUPS, HALF,
        )  # fmt: skip


@triton.jit
def _store_tile(
    sums, n_tile, bias_ptr, residual_ptr, y_ptr, leave_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr,
    sin_ptr, M, N, residual_stride, y_stride, slot_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, END: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, LEAVES: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Finish float32 sums and store them, with what is left for the next kernel."""
    if END == "rope":
        slot, cos, sin = _places(n_tile, slots_ptr, positions_ptr, cos_ptr, sin_ptr, M, BLOCK_M, BLOCK_N, HALF)
        _rotate_and_store(
            sums, slot, cos, sin, n_tile, bias_ptr, y_ptr, keys_ptr, values_ptr, M, N, y_stride, slot_stride,
            BLOCK_M, BLOCK_N, HAS_BIAS, HEADS, GROUPS, HALF,
        )  # fmt: skip
    else:
        residual = residual_tile(
            residual_ptr, 0, n_tile, M, N, residual_stride, BLOCK_M, BLOCK_N, END == "silu", HAS_RESIDUAL
        )
        out = store_outputs(
            sums, residual, 0, n_tile, bias_ptr, y_ptr, M, N, y_stride, BLOCK_M, BLOCK_N, END == "silu", HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip
        if LEAVES == "squares":
            _store_squares(out.to(tl.float32), n_tile, leave_ptr, M, N, BLOCK_M, BLOCK_N)
        elif LEAVES == "maxima":
            token = tl.arange(0, BLOCK_M)
            at = leave_ptr + token.to(tl.int64) * tl.num_programs(0) + n_tile
            tl.store(at, tl.max(tl.abs(out.to(tl.float32)), 1), mask=token < M)


@triton.jit
def _store_squares(out, n_tile, squares_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the sum of squares of every SQUARES outputs of a row."""
    WIDTH: tl.constexpr = BLOCK_N // SQUARES
    sums = pair_sums(out * out, SQUARES_LEVELS)
    part = n_tile * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK_M)
    count = tl.cdiv(N, SQUARES)
    at = squares_ptr + token.to(tl.int64)[:, None] * count + part[None, :]
    tl.store(at, sums, mask=(token < M)[:, None] & (part < count)[None, :])
