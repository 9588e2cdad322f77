"""How the GEMM of many rows (`hopper_ws`) is launched: tiles by arithmetic, for any rows, outputs and columns.

The kernel is written in Gluon. Where there is no such GPU it is not even read.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import LinearConfig

LEAST_ROWS = 257
"""With fewer rows one program takes all of a pass, and weights are read once."""
_TILE_ROWS = 128
_ROW_BYTES = 128  # of a stage's rows: the widest that TMA swizzles
_SHARED_BYTES = 229_376  # for all but barriers, which fit beside them
_STAGED_BYTES = 32_768  # outputs on their way
_TOTAL_BYTES = 65_536  # or, where a pair of blocks has splits, the second block's totals
_NARROW_COST = 0.52
"""What a tile of 128 outputs costs of one of 256 (H200): its operands take more of shared memory's bandwidth."""


@dataclass(frozen=True)
class SplitOrder:
    """How a weight's columns are summed, whatever kernel does it: `count` splits of `columns` each, added in order."""

    count: int
    columns: int


@dataclass(frozen=True)
class Tile:
    """Weight rows of a tile, whether they are two blocks with accumulators of their own, and stages."""

    block_n: int
    pair: bool
    stages: int


def fits(x_TK: Tensor, weight_NK: Tensor, kind: str, config: LinearConfig) -> bool:
    """Tell whether the kernel multiplies these: types, strides that TMA can read, and steps that divide the splits.

    Args:
        config: the weight's own, which fixes its order of columns.
    """
    dtypes = {"dense": (torch.bfloat16, torch.float16), "fp8": (torch.float8_e4m3fn,)}.get(kind, ())
    if weight_NK.dtype not in dtypes or x_TK.dtype != weight_NK.dtype or x_TK.device.type == "cpu":
        return False
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x_TK, weight_NK))
    aligned = aligned and weight_NK.shape[0] % 16 == 0  # rows of outputs, gated or not, are stored by TMA
    # FP8 sums are made whole once a step, so a step must be as long as everywhere else.
    steps_fit = config.block_k % (_ROW_BYTES // weight_NK.element_size()) == 0
    return aligned and steps_fit


def tile_of(num_rows: int, num_outputs: int, *, kind: str, silu: bool, split: bool, programs: int) -> Tile:
    """Return the tile with which the device's programs need the least time, counted in whole rounds of tiles.

    Args:
        num_outputs: rows of the weight, with `silu` gates and the rows `up`.
        programs: multiprocessors.
    """
    wide = [] if kind == "fp8" and split else [256]  # FP8 keeps a third set of accumulators, one for each step

    def cost(block_n: int) -> float:
        tiles = -(-num_rows // _TILE_ROWS) * -(-num_outputs // block_n)
        return -(-tiles // programs) * (1.0 if block_n == 256 else _NARROW_COST)

    block_n = min([*wide, 128], key=cost)
    pair = silu or block_n == 256
    stage_bytes = (_TILE_ROWS + block_n) * _ROW_BYTES
    return Tile(block_n, pair, (_SHARED_BYTES - (_TOTAL_BYTES if pair and split else _STAGED_BYTES)) // stage_bytes)


def multiply_ws(
    x_TK: Tensor, weight_NK: Tensor, scales: tuple[Tensor, Tensor] | None, epilogue: Epilogue, order: SplitOrder,
    out_dtype: torch.dtype, dependent: bool,
) -> Tensor:  # fmt: skip
    """Return rows times the weight: what `slipstream.kernels.triton.gemm.split_k.multiply` gives, to the bit."""
    from slipstream.kernels.triton.gemm.hopper_ws import hopper_ws_kernel

    num_rows, num_weights, silu = x_TK.shape[0], weight_NK.shape[0], epilogue.silu
    kind = "fp8" if scales is not None else "dense"
    programs = _multiprocessors(x_TK.device)
    tile = tile_of(num_rows, num_weights, kind=kind, silu=silu, split=order.count > 1, programs=programs)
    outputs = num_weights // 2 if silu else num_weights
    width = tile.block_n // 2 if tile.pair else tile.block_n
    block_k = _ROW_BYTES // weight_NK.element_size()
    tiles = -(-num_rows // _TILE_ROWS), -(-outputs // (width if silu else tile.block_n))
    y = torch.empty(num_rows, outputs, dtype=out_dtype, device=x_TK.device)
    x_scale, w_scale = scales or (x_TK, x_TK)
    hopper_ws_kernel[(min(programs, tiles[0] * tiles[1]),)](
        tma_boxes(x_TK, _TILE_ROWS // 2, block_k), tma_boxes(weight_NK, width, block_k),
        tma_boxes(y, _TILE_ROWS // 2, width),
        x_scale, w_scale, *epilogue.added(y), num_rows, num_weights, *tiles, order.count,
        -(-order.columns // block_k), epilogue.residual_stride, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        SPLIT=order.count > 1, STAGES=tile.stages, FP8=kind == "fp8", PAIR=tile.pair, SILU=silu, **epilogue.flags,
        PDL=dependent, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return y


def tma_boxes(rows: Tensor, count: int, columns: int) -> Any:  # triton has no types of its own
    """Describe a matrix to TMA: boxes of so many rows and columns."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(count, columns, rows.dtype)
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [count, columns], layout)


@lru_cache
def _layout(count: int, columns: int, dtype: torch.dtype) -> Any:  # triton has no types of its own
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float8e4nv, float16

    types = {torch.bfloat16: bfloat16, torch.float16: float16, torch.float8_e4m3fn: float8e4nv}
    return NVMMASharedLayout.get_default_for([count, columns], types[dtype])


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
