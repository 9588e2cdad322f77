"""Products with 4-bit weights: INT4 times rows as they are, in INT8 (W4A8) or in FP8, and MXFP4.

FP8 rows come in a wider type, and MXFP4 ones as the numbers they stand for; either is exact, as widened weights are.

Weights are repacked once (`pack_halves`): a byte holds a column of the first and one of the second half of a block, so
that the nibbles of adjacent bytes multiply adjacent columns of the rows, and nothing is interleaved.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913, SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.gemm.quantize import mxfp4_value
from slipstream.kernels.triton.gemm.split_k import (
    Epilogue,
    Launch,
    partial_sums,
    prefetch_rows,
    reduce_splits,
    store_outputs,
    weight_rows,
)
from slipstream.kernels.triton.launch import launch_options, show_copies, wait_for_inputs
from slipstream.quant.formats.nibbles import unpack_signed

_LARGEST_HALF = 128


@triton.jit
def _multiply_split(
    w_at, x_at, g_at, split, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, WHOLE: tl.constexpr, MX: tl.constexpr, STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one split of K, two halves a step; grouped scales are applied to each half's sum."""
    num_blocks = K // (2 * HALF)
    steps = tl.cdiv(num_blocks, SPLITS)
    if WHOLE:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    j = tl.arange(0, HALF)
    for step in range(steps):
        block = split * steps + step
        if EVEN:
            packed = tl.load(w_at + (block * HALF + j)[None, :], eviction_policy=POLICY)
        else:
            # Past the end nothing is read, and zeros are multiplied by any columns there are.
            packed = tl.load(w_at + (block * HALF + j)[None, :], mask=block < num_blocks, other=0)
            block = tl.minimum(block, num_blocks - 1)
        x_low = tl.load(x_at + (block * 2 * HALF + j)[:, None])
        x_high = tl.load(x_at + (block * 2 * HALF + HALF + j)[:, None])
        low = (packed << 4) >> 4
        high = packed >> 4
        show_copies(PDL)
        if WHOLE:
            acc = tl.dot(low, x_low, acc, out_dtype=tl.int32)
            acc = tl.dot(high, x_high, acc, out_dtype=tl.int32)
        else:
            if MX:
                bits = packed.to(tl.int32)
                w_low = mxfp4_value(bits & 15, x_low.dtype)
                w_high = mxfp4_value((bits >> 4) & 15, x_low.dtype)
            else:
                w_low = low.to(tl.float32).to(x_low.dtype)
                w_high = high.to(tl.float32).to(x_low.dtype)
            if GROUPED:
                g_low = tl.load(g_at + 2 * block).to(tl.float32)
                g_high = tl.load(g_at + 2 * block + 1).to(tl.float32)
                if MX:
                    g_low, g_high = tl.exp2(g_low - 127.0), tl.exp2(g_high - 127.0)
                acc += tl.dot(w_low, x_low, input_precision="ieee") * g_low
                acc += tl.dot(w_high, x_high, input_precision="ieee") * g_high
            else:
                acc = tl.dot(w_low, x_low, acc, input_precision="ieee")
                acc = tl.dot(w_high, x_high, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def _nibble_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr,
    M, N, K, x_stride, residual_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, SERIAL: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr, MX: tl.constexpr, ROW_SCALES: tl.constexpr,
    STREAM: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_N = weight_rows(tl.arange(0, BLOCK_N), n_tile, N, BLOCK_N, SILU, BLOCK_N)
    rows_M = tl.minimum(m_tile * BLOCK_M + tl.arange(0, BLOCK_M), M - 1)
    w_at = w_ptr + rows_N.to(tl.int64)[:, None] * (K // 2)
    x_at = x_ptr + rows_M.to(tl.int64)[None, :] * x_stride
    g_at = w_scale_ptr + rows_N.to(tl.int64)[:, None] * (K // HALF)
    if PDL:
        prefetch_rows(w_at, split * tl.cdiv(K // (2 * HALF), SPLITS) * HALF, K // 2, 128)
    wait_for_inputs(PDL)
    total = _multiply_split(
        w_at, x_at, g_at, split, K, BLOCK_M, BLOCK_N, HALF, SPLITS, EVEN, GROUPED, WHOLE, MX, STREAM, PDL
    )
    finished = True
    if SPLITS > 1:
        if SERIAL:
            for other in range(1, SPLITS):
                total += _multiply_split(
                    w_at, x_at, g_at, other, K, BLOCK_M, BLOCK_N, HALF, SPLITS, EVEN, GROUPED, WHOLE, MX, STREAM, PDL
                )
        else:
            tile = m_tile * tl.num_programs(1) + n_tile
            num_tiles = tl.num_programs(0) * tl.num_programs(1)
            total, finished = reduce_splits(
                total, partial_ptr, counter_ptr, tile, num_tiles, split, SPLITS, BLOCK_N, BLOCK_M
            )
    if finished:
        sums = total.to(tl.float32)
        if ROW_SCALES:
            sums = sums * (tl.load(x_scale_ptr + rows_M)[None, :] * tl.load(w_scale_ptr + rows_N)[:, None])
        elif not GROUPED:
            sums = sums * tl.load(w_scale_ptr + rows_N).to(tl.float32)[:, None]
        store_outputs(
            sums, m_tile, n_tile, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride, BLOCK_M, BLOCK_N,
            SILU, HAS_BIAS, HAS_RESIDUAL, BLOCK_N,
        )  # fmt: skip


def half_block(num_inputs: int, group_size: int | None) -> int | None:
    """Return how many columns share the low nibbles of a block: a group, or as many as divide the row; None: no fit."""
    if group_size is not None:
        fits = group_size in (32, 64, 128) and num_inputs % (2 * group_size) == 0
        return group_size if fits else None
    return next((half for half in (_LARGEST_HALF, 64, 32) if num_inputs % (2 * half) == 0), None)


def pack_halves(packed: Tensor, half: int) -> Tensor:
    """Repack nibbles [N, K / 2] as int8: byte j of a block of 2 * half columns holds columns j and half + j."""
    codes = unpack_signed(packed)
    blocks = codes.view(codes.shape[0], -1, 2, half)
    return ((blocks[:, :, 0] & 0xF) | (blocks[:, :, 1] << 4)).reshape(codes.shape[0], -1).contiguous()


def multiply_nibbles(
    x_TK: Tensor, weight: tuple[Tensor, Tensor], half: int, x_scale_T: Tensor | None, epilogue: Epilogue,
    launch: Launch, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return rows times a repacked weight.

    Args:
        weight: codes, and scales [N] or [N, groups]; in bytes they are exponents, and the codes MXFP4.
        x_scale_T: the scales of rows that are codes, which INT8 rows always are.
    """
    codes, w_scale = weight
    num_rows, num_outputs, num_inputs = x_TK.shape[0], codes.shape[0], codes.shape[1] * 2
    config = launch.config
    grid = launch.grid(num_rows, num_outputs, epilogue.silu)
    y = torch.empty(num_rows, num_outputs // 2 if epilogue.silu else num_outputs, dtype=out_dtype, device=x_TK.device)
    whole = x_TK.dtype == torch.int8
    _nibble_kernel[grid](
        x_TK, codes, y if x_scale_T is None else x_scale_T, w_scale, *epilogue.added(y), y,
        partial_sums(launch, grid, y, whole), launch.counters, num_rows, num_outputs, num_inputs, x_TK.stride(0),
        epilogue.residual_stride, y.stride(0),
        BLOCK_M=launch.block_m, BLOCK_N=config.block_n, HALF=half, SPLITS=config.split_k, SERIAL=launch.serial,
        EVEN=num_inputs % (2 * half * config.split_k) == 0, GROUPED=w_scale.dim() == 2, WHOLE=whole,
        MX=w_scale.dtype == torch.uint8, ROW_SCALES=x_scale_T is not None, STREAM=grid[0] == 1, SILU=epilogue.silu,
        **epilogue.flags, PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y
