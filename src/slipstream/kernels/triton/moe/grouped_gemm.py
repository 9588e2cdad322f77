"""Products of listed rows with their experts' weights: one kernel for packed nibbles, one for whole numbers.

Weights are the left side of each product and rows the right (acc is [outputs, rows]): a matrix instruction covers at
least 16 outputs, of which there are thousands, and as few as 8 rows, of which there may be one.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.quantize import mxfp4_value
from slipstream.kernels.triton.launch import show_copies, wait_for_inputs
from slipstream.kernels.triton.moe.rows import FP8_GROUP


@triton.jit
def tile_of(tiles_ptr, pairs_ptr, tile, ROWS_PER_INPUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
            SPLITS: tl.constexpr):  # fmt: skip
    """Return this program's expert, pairs, which of them are real, their input rows, its outputs and its split."""
    expert = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
    first = tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    lane = tl.arange(0, BLOCK_T)
    real = lane < count
    pairs = tl.load(pairs_ptr + first + lane, mask=real, other=0).to(tl.int64)
    block = tl.program_id(0)
    outputs = (block // SPLITS) * BLOCK_N + tl.arange(0, BLOCK_N)
    return expert, pairs, real, pairs // ROWS_PER_INPUT, outputs, block % SPLITS


@triton.jit
def _nibbles(codes, ASSEMBLY: tl.constexpr):
    """Return the low and the high nibble of each byte as int8, both 16 times their value: no sign to extend.

    The compiler would take the bytes apart one by one; as words, eight nibbles cost three instructions. Triton gives
    AMD's assembler no such words, so there the compiler has its way.
    """
    if ASSEMBLY == "cuda":
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0; }",
            "=&r,=&r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = codes << 4, codes & -16
    return low, high


@triton.jit
def _expanded(codes, scale_ptr, FORMAT: tl.constexpr, GROUP_BYTES: tl.constexpr, dtype: tl.constexpr,
              scale_mask, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):  # fmt: skip
    """Return a block of packed bytes as two blocks of numbers, low and high nibbles, scaled if groups are."""
    if FORMAT == "mxfp4":
        bits = codes.to(tl.int32)
        low, high = mxfp4_value(bits & 15, dtype), mxfp4_value((bits >> 4) & 15, dtype)
    else:
        low = ((codes << 4) >> 4).to(tl.float32).to(dtype)
        high = (codes >> 4).to(tl.float32).to(dtype)
    if GROUP_BYTES > 0:
        groups: tl.constexpr = BLOCK_B // GROUP_BYTES
        scale = tl.load(scale_ptr, mask=scale_mask, other=0)
        scale = tl.exp2(scale.to(tl.float32) - 127.0) if FORMAT == "mxfp4" else scale.to(tl.float32)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [BLOCK_N, groups, GROUP_BYTES]), [BLOCK_N, BLOCK_B])
        low, high = (low.to(tl.float32) * scale).to(dtype), (high.to(tl.float32) * scale).to(dtype)
    return low, high


@triton.jit
def nibble_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, w_scale_2_ptr, tiles_ptr, pairs_ptr, out_ptr, max_tiles,
                  num_pairs, N, HALF, ROWS_PER_INPUT: tl.constexpr, FORMAT: tl.constexpr, GROUP_BYTES: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, SPLITS: tl.constexpr,
                  FINAL: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply weights of two codes a byte: "w4a8" in integers, the others widened to the rows' own type.

    The others are "int4" and "mxfp4", whose rows have no scale left to apply, and "int4_fp8", whose rows are FP8 codes
    in a wider type, with a scale each, and whose weights have two. HALF is the bytes of a weight's row. Unless FINAL,
    raw sums go to out[split, pair, N] and scales come later. There are fewer programs than there may be tiles: each
    takes every so-manieth of those there are.
    """
    wait_for_inputs(PDL)
    for tile in range(tl.program_id(1), tl.load(tiles_ptr + 3 * max_tiles), tl.num_programs(1)):
        expert, pairs, real, rows, outputs, split = tile_of(
            tiles_ptr, pairs_ptr, tile, ROWS_PER_INPUT, BLOCK_T, BLOCK_N, SPLITS
        )
        byte = tl.arange(0, BLOCK_B)
        is_output = outputs < N
        w_at = w_ptr + (expert * N + outputs.to(tl.int64))[:, None] * HALF + byte[None, :]
        x_at = x_ptr + rows[None, :] * (2 * HALF) + byte[:, None]
        group = tl.arange(0, BLOCK_B // GROUP_BYTES if GROUP_BYTES > 0 else 1)
        scale_at = w_scale_ptr
        if GROUP_BYTES > 0:
            scale_at += (expert * N + outputs.to(tl.int64))[:, None] * (HALF // GROUP_BYTES) + group[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.int32 if FORMAT == "w4a8" else tl.float32)
        columns = tl.cdiv(tl.cdiv(HALF, BLOCK_B), SPLITS) * BLOCK_B
        first = split * columns
        for start in range(first, tl.minimum(first + columns, HALF), BLOCK_B):
            x_mask = real[None, :] if EVEN else real[None, :] & (start + byte < HALF)[:, None]
            x_low = tl.load(x_at + start, mask=x_mask, other=0)
            x_high = tl.load(x_at + HALF + start, mask=x_mask, other=0)
            if EVEN:
                codes = tl.load(w_at + start)
            else:
                codes = tl.load(w_at + start, mask=is_output[:, None] & (start + byte < HALF)[None, :], other=0)
            show_copies(PDL)
            if FORMAT == "w4a8":
                low, high = _nibbles(codes, ASSEMBLY)
                acc = tl.dot(low, x_low, acc, out_dtype=tl.int32)
                acc = tl.dot(high, x_high, acc, out_dtype=tl.int32)
            else:
                scale_mask = is_output[:, None]
                if GROUP_BYTES > 0:
                    scale_mask = scale_mask & (start // GROUP_BYTES + group < HALF // GROUP_BYTES)[None, :]
                low, high = _expanded(codes, scale_at + start // (GROUP_BYTES if GROUP_BYTES > 0 else 1), FORMAT,
                                      GROUP_BYTES, x_low.dtype, scale_mask, BLOCK_N, BLOCK_B)  # fmt: skip
                acc = tl.dot(low, x_low, acc, input_precision="ieee")
                acc = tl.dot(high, x_high, acc, input_precision="ieee")
        if FORMAT == "w4a8":
            acc = acc >> 4
        if FINAL and GROUP_BYTES == 0:
            input_scales: tl.constexpr = FORMAT == "w4a8" or FORMAT == "int4_fp8"
            acc = _scaled(acc, x_scale_ptr, w_scale_ptr, w_scale_2_ptr, rows, real, expert * N + outputs, is_output,
                          input_scales)  # fmt: skip
        at = (split.to(tl.int64) * num_pairs + pairs)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + at, acc, mask=is_output[:, None] & real[None, :])


@triton.jit
def _scaled(acc, x_scale_ptr, w_scale_ptr, w_scale_2_ptr, rows, real, weight_rows, is_output,
            INPUT_SCALES: tl.constexpr):  # fmt: skip
    """Return sums as numbers: times the scale, or both, of each output, and of each row where inputs are quantized."""
    scale = tl.load(w_scale_ptr + weight_rows, mask=is_output, other=0).to(tl.float32)[:, None]
    if w_scale_2_ptr is not None:
        scale *= tl.load(w_scale_2_ptr + weight_rows, mask=is_output, other=0)[:, None]
    if INPUT_SCALES:
        scale = tl.load(x_scale_ptr + rows, mask=real, other=0.0)[None, :] * scale
    return acc.to(tl.float32) * scale


@triton.jit
def number_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, tiles_ptr, pairs_ptr, out_ptr, max_tiles, num_pairs,
                  N, K, ROWS_PER_INPUT: tl.constexpr, FORMAT: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
                  FINAL: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply weights of one number a column: "dense", "fp8" (scales come last) or "fp8_block" (each 128 columns)."""
    wait_for_inputs(PDL)
    for tile in range(tl.program_id(1), tl.load(tiles_ptr + 3 * max_tiles), tl.num_programs(1)):
        expert, pairs, real, rows, outputs, split = tile_of(
            tiles_ptr, pairs_ptr, tile, ROWS_PER_INPUT, BLOCK_T, BLOCK_N, SPLITS
        )
        column = tl.arange(0, BLOCK_K)
        is_output = outputs < N
        weight_rows = expert * N + outputs.to(tl.int64)
        w_at = w_ptr + weight_rows[:, None] * K + column[None, :]
        x_at = x_ptr + rows[None, :] * K + column[:, None]
        groups = tl.cdiv(K, FP8_GROUP)
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        columns = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        first = split * columns
        for start in range(first, tl.minimum(first + columns, K), BLOCK_K):
            if EVEN:
                x = tl.load(x_at + start, mask=real[None, :], other=0.0)
                w = tl.load(w_at + start)
            else:
                inside = start + column < K
                x = tl.load(x_at + start, mask=real[None, :] & inside[:, None], other=0.0)
                w = tl.load(w_at + start, mask=is_output[:, None] & inside[None, :], other=0.0)
            show_copies(PDL)
            if FORMAT == "fp8_block":
                group = start // FP8_GROUP
                w_scale = tl.load(w_scale_ptr + weight_rows * groups + group, mask=is_output, other=0.0)
                x_scale = tl.load(x_scale_ptr + rows * groups + group, mask=real, other=0.0)
                acc += tl.dot(w, x) * (x_scale[None, :] * w_scale[:, None])
            else:
                acc = tl.dot(w, x, acc, input_precision="ieee")
        if FINAL and FORMAT == "fp8":
            acc = _scaled(acc, x_scale_ptr, w_scale_ptr, None, rows, real, weight_rows, is_output, True)
        at = (split.to(tl.int64) * num_pairs + pairs)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + at, acc, mask=is_output[:, None] & real[None, :])
