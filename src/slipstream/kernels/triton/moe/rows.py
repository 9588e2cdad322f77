"""What the experts' products read and what becomes of their sums: rows by expert, in the format's own numbers.

Rows are (token, k) pairs, numbered token * K + k. Packed nibbles hold an even and an odd column in each byte, so for
them a row is stored as its even columns followed by its odd ones: both halves of a byte then multiply contiguous
columns of the row, and the weights need no layout of their own.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.quantize import GROUP, mxfp4_rounded
from slipstream.kernels.triton.launch import wait_for_inputs

PAIRS_PER_STEP = 256
_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no fraction bits, rounded to even
FP8_GROUP = tl.constexpr(128)
SHARED_COLUMNS = tl.constexpr(256)
SHARED_TOKENS, SHARED_OUTPUTS = 16, 32
"""The tile of a shared expert's product: the same in every kernel that makes it, and so are its bits."""


@triton.jit
def round_even(x):
    """Return float32 numbers below 2^22 rounded to integers, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def write_row(x, row, width, codes_ptr, scale_ptr, INPUT: tl.constexpr, BLOCK: tl.constexpr):
    """Write one row (float32 [BLOCK], zero past `width`) as a product with `INPUT` arithmetic reads it.

    INPUT: "plain" and "halves" keep the numbers; "int8" (halves), "fp8" and "fp8_halves" have one scale for the row,
    "fp8_block" one for each 128 columns; "mxfp4" (halves) is rounded, its scales multiplied in. Divisions are
    exact, as the reference divides, so codes are the reference's; they may be stored in a wider type.
    """
    column = tl.arange(0, BLOCK)
    at = column
    if INPUT == "halves" or INPUT == "int8" or INPUT == "fp8_halves" or INPUT == "mxfp4":
        at = (column % 2) * (width // 2) + column // 2
    if INPUT == "int8":
        scale = tl.div_rn(tl.max(tl.abs(x), 0), _INT8_MAX)
        tl.store(scale_ptr + row, scale)
        x = round_even(tl.div_rn(x, tl.zeros_like(x) + tl.where(scale == 0, 1.0, scale)))
    if INPUT == "fp8" or INPUT == "fp8_halves":
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-12), _E4M3_MAX)
        tl.store(scale_ptr + row, scale)
        x = tl.div_rn(x, tl.zeros_like(x) + scale)
    if INPUT == "fp8_block":
        groups: tl.constexpr = BLOCK // FP8_GROUP
        x = tl.reshape(x, [groups, FP8_GROUP])
        scales = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), 1e-12), tl.full([groups], _E4M3_MAX, tl.float32))
        num_groups = tl.cdiv(width, FP8_GROUP)
        group = tl.arange(0, groups)
        tl.store(scale_ptr + row * num_groups + group, scales, mask=group < num_groups)
        x = tl.reshape(tl.div_rn(x, tl.zeros_like(x) + scales[:, None]), [BLOCK])
    if INPUT == "fp8" or INPUT == "fp8_halves" or INPUT == "fp8_block":
        x = tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX)
    if INPUT == "fp8_halves":
        x = x.to(tl.float8e4nv).to(tl.float32)
    if INPUT == "mxfp4":
        x = tl.reshape(mxfp4_rounded(tl.reshape(x, [BLOCK // GROUP, GROUP])), [BLOCK])
    tl.store(codes_ptr + row * width + at, x.to(codes_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _list_tiles(ids_ptr, pairs_ptr, tiles_ptr, expert, num_pairs, num_experts, max_tiles,
                BINS: tl.constexpr, BLOCK_T: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Write one expert's pairs, in order, and its tiles of BLOCK_T pairs.

    A tile is (expert, first place among the listed pairs, number of pairs). Every program counts for itself how many
    pairs and tiles come before its expert's, so none waits for another.
    """
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    step = tl.arange(0, STEP)
    for start in range(0, num_pairs, STEP):
        ids = tl.load(ids_ptr + start + step, mask=start + step < num_pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(ids < 0, num_experts, ids), BINS)
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(before, (counts + BLOCK_T - 1) // BLOCK_T, 0), 0)
    num_tiles = (count + BLOCK_T - 1) // BLOCK_T
    for tile in range(num_tiles):
        at = tiles_ptr + 3 * (first_tile + tile)
        tl.store(at, expert)
        tl.store(at + 1, first + tile * BLOCK_T)
        tl.store(at + 2, tl.minimum(count - tile * BLOCK_T, BLOCK_T))
    if expert == num_experts - 1:
        tl.store(tiles_ptr + 3 * max_tiles, first_tile + num_tiles)
    if count > 0:
        place = first
        for start in range(0, num_pairs, STEP):
            ids = tl.load(ids_ptr + start + step, mask=start + step < num_pairs, other=-1).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(mine, 0) - mine, start + step, mask=mine == 1)
            place += tl.sum(mine, 0)


@triton.jit
def rows_kernel(x_ptr, codes_ptr, scale_ptr, ids_ptr, pairs_ptr, tiles_ptr, num_pairs, max_tiles, num_experts, width,
                INPUT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_T: tl.constexpr,
                STEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """List each expert's tiles (the first programs, one for each expert) and write each token's row (the others)."""
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    if program < num_experts:
        _list_tiles(ids_ptr, pairs_ptr, tiles_ptr, program, num_pairs, num_experts, max_tiles, BINS, BLOCK_T, STEP)
    else:
        row = (program - num_experts).to(tl.int64)
        column = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        write_row(x, row, width, codes_ptr, scale_ptr, INPUT, BLOCK)


@triton.jit
def quantize_kernel(x_ptr, codes_ptr, scale_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write a token's row as INT8."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    write_row(x, row, width, codes_ptr, scale_ptr, "int8", BLOCK)


@triton.jit
def activated(gate, up, TYPE: tl.constexpr):
    """Return silu(gate) * up, rounded once."""
    return (tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up).to(TYPE)


@triton.jit
def clamped(gate, up, limit, alpha, TYPE: tl.constexpr):
    """Return gate * sigmoid(alpha * gate) * (up + 1) of clamped numbers, rounded once."""
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return (tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate)) * (up + 1.0)).to(TYPE)


@triton.jit
def gelu(gate, up, TYPE: tl.constexpr):
    """Return up times GELU of gate in its tanh form, rounded once; 0.5 * (1 + tanh(z)) is the logistic of 2 z."""
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return (tl.div_rn(gate, 1.0 + tl.exp(-twice)) * up).to(TYPE)


@triton.jit
def activate_kernel(sums_ptr, x_scale_ptr, w_scale_ptr, w_scale_2_ptr, bias_ptr, ids_ptr, codes_ptr, scale_ptr,
                    num_pairs, width, limit, alpha, TOP_K: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr,
                    INPUT: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Add one pair's splits, apply scales, bias and activation, round to TYPE and write the row stage 2 reads."""
    wait_for_inputs(PDL)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate_at = sums_ptr + pair * (2 * width) + column
    gate = tl.load(gate_at, mask=inside, other=0)
    up = tl.load(gate_at + width, mask=inside, other=0)
    for split in range(1, SPLITS):
        at = sums_ptr + (split * num_pairs + pair) * (2 * width) + column
        gate += tl.load(at, mask=inside, other=0)
        up += tl.load(at + width, mask=inside, other=0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if SCALES != "none":
        w_at = w_scale_ptr + expert * (2 * width) + column
        gate_scale = tl.load(w_at, mask=inside, other=0).to(tl.float32)
        up_scale = tl.load(w_at + width, mask=inside, other=0).to(tl.float32)
        if w_scale_2_ptr is not None:
            w_at = w_scale_2_ptr + expert * (2 * width) + column
            gate_scale *= tl.load(w_at, mask=inside, other=0)
            up_scale *= tl.load(w_at + width, mask=inside, other=0)
        if SCALES == "both":
            x_scale = tl.load(x_scale_ptr + pair // TOP_K)
            gate_scale, up_scale = x_scale * gate_scale, x_scale * up_scale
        gate, up = gate * gate_scale, up * up_scale
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * (2 * width) + column
        gate += tl.load(bias_at, mask=inside, other=0).to(tl.float32)
        up += tl.load(bias_at + width, mask=inside, other=0).to(tl.float32)
    if ACTIVATION == "clamped":
        inner = clamped(gate, up, limit, alpha, TYPE).to(tl.float32)
    elif ACTIVATION == "gelu":
        inner = gelu(gate, up, TYPE).to(tl.float32)
    else:
        inner = activated(gate, up, TYPE).to(tl.float32)
    write_row(inner, pair, width, codes_ptr, scale_ptr, INPUT, BLOCK)


@triton.jit
def shared_rows(hidden_ptr, w_ptr, tokens, real, outputs, D, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """Return the shared expert's down product [BLOCK_N, BLOCK_T] in float32; one order of sums, in whichever kernel."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    w_at = w_ptr + tl.minimum(outputs, D - 1).to(tl.int64)[:, None] * WIDTH
    h_at = hidden_ptr + tokens.to(tl.int64)[None, :] * WIDTH
    for start in range(0, WIDTH, SHARED_COLUMNS):
        column = start + tl.arange(0, SHARED_COLUMNS)
        w = tl.load(w_at + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)
        h = tl.load(h_at + column[:, None], mask=real[None, :] & (column < WIDTH)[:, None], other=0.0)
        acc = tl.dot(w, h, acc, input_precision="ieee")
    return acc


@triton.jit
def finished(total, shared, add_ptr, at, mask, SHARED: tl.constexpr, ADD: tl.constexpr, TYPE: tl.constexpr):
    """Round the experts' sum, then add the residual and the shared expert, added and rounded before."""
    out = total.to(TYPE)
    if ADD:
        more = tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if SHARED:
            more = (shared.to(TYPE).to(tl.float32) + more).to(TYPE).to(tl.float32)
        out = (out.to(tl.float32) + more).to(TYPE)
    elif SHARED:
        out = (out.to(tl.float32) + shared.to(TYPE).to(tl.float32)).to(TYPE)
    return out


@triton.jit
def combine_kernel(rows_ptr, bias_ptr, ids_ptr, weights_ptr, add_ptr, hidden_ptr, shared_ptr, out_ptr, T, D,
                   TOP_K: tl.constexpr, ADD: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr,
                   BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add a token's experts in the order of k, in float32, round once, then add what else the layer gives it.

    SHARED is the width of a shared expert's inner rows, whose product is made here; 0 where there is none.
    """
    wait_for_inputs(PDL)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = tokens < T
    mask = real[:, None] & (outputs < D)[None, :]
    at = tokens.to(tl.int64)[:, None] * D + outputs[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = tokens.to(tl.int64) * TOP_K + k
        expert = tl.load(ids_ptr + pair, mask=real, other=-1)
        here = expert >= 0
        row = tl.load(rows_ptr + pair[:, None] * D + outputs[None, :], mask=mask & here[:, None], other=0.0)
        if bias_ptr is not None:
            bias_at = bias_ptr + expert.to(tl.int64)[:, None] * D + outputs[None, :]
            row += tl.load(bias_at, mask=mask & here[:, None], other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair, mask=real, other=0.0)[:, None] * row
    shared = total
    if SHARED:
        shared = tl.trans(shared_rows(hidden_ptr, shared_ptr, tokens, real, outputs, D, SHARED, BLOCK_T, BLOCK_N))
    out = finished(total, shared, add_ptr, at, mask, SHARED > 0, ADD, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=mask)
