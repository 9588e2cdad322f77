"""How products of a few rows are launched (`small_m`): what is folded into them, and what ships."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.triton.gemm.hopper_gemv_launch import REGISTERS, GemvPlan, gemv_plan, weight_boxes
from slipstream.kernels.triton.gemm.small_m import small_m_kernel
from slipstream.kernels.triton.gemm.split_k import Epilogue, Launch, Rows, partial_sums
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.norm import SQUARED
from slipstream.kernels.triton.rope import RopeWrite
from slipstream.kernels.triton.tuning import LinearConfig

MOST_ROWS = 16
"""The token tile these products have; from 17 rows on those for many rows are faster."""
MOST_WHOLE_ROWS = 8
"""A program reads so many whole rows beside its tile, to make codes after their norm; more do not fit in registers."""
_LINE_BYTES = 128
_FP8_COLUMNS = 128  # after so many an FP8 sum is made whole


def squares_of(out_TN: Tensor, squared: int = SQUARED) -> Tensor:
    """Return a workspace for the sums of squares that a product leaves of outputs of this shape, so many to a sum."""
    return torch.empty(len(out_TN), -(-out_TN.shape[1] // squared), dtype=torch.float32, device=out_TN.device)


def rope_fits(write: RopeWrite, dtype: torch.dtype) -> bool:
    """Tell whether whole heads are rotated, and caches hold what rows are made of."""
    half, keys_SGd = write.rope.cos_Pr.shape[1], write.layer.keys_SGd
    same = keys_SGd.dtype == dtype and keys_SGd.stride() == write.layer.values_SGd.stride()
    return same and keys_SGd.shape[2] == 2 * half and keys_SGd.stride(1) == 2 * half


def multiply_small_m(
    rows: Rows, weight_NK: Tensor, w_scale_N: Tensor | None, kind: str, epilogue: Epilogue, launch: Launch
) -> Tensor:
    """Return at most MOST_ROWS rows times the weight, or the rotated queries where the epilogue writes keys."""
    x_TK, config = rows.values_TK, launch.config
    num_rows, num_outputs, num_inputs = x_TK.shape[0], *weight_NK.shape
    assert num_rows <= launch.block_m <= MOST_ROWS, "all rows are in one tile"
    twice = kind == "fp8" and config.block_k > _FP8_COLUMNS
    assert not twice or config.block_k == 2 * _FP8_COLUMNS, "FP8 sums are made whole after 128 columns, or twice 128"
    _, num_tiles, splits = grid = launch.grid(num_rows, num_outputs, epilogue.silu)
    y = torch.empty(num_rows, _num_stored(epilogue, num_outputs), dtype=rows.dtype, device=x_TK.device)
    makes_codes = kind.startswith("fp8") and rows.scale_T is None
    left_TB = rows.maxima_TB if rows.norm is None else rows.norm.squares_TB
    num_parts = 0 if left_TB is None else left_TB.shape[1]
    parts = triton.next_power_of_2(max(num_parts, 1))
    side = config.split_k if config.side else 1
    staged = (config.num_stages - 1) * config.block_k
    end = "rope" if epilogue.rope is not None else "silu" if epilogue.silu else "plain"
    codes = "none" if not makes_codes else "maxima" if rows.norm is None else "norm"
    plan = gemv_plan(rows, weight_NK, kind, epilogue, launch, end, codes)
    if plan is not None:
        _multiply_hopper(rows, (weight_NK, w_scale_N), epilogue, launch, plan, y)
        return y
    small_m_kernel[(num_tiles, splits)](
        x_TK, weight_NK, y if rows.scale_T is None else rows.scale_T, y if w_scale_N is None else w_scale_N,
        *epilogue.added(y), y, partial_sums(launch, grid, y, kind == "int8"), launch.counters,
        y if rows.norm is None else rows.norm.weight_D, y if left_TB is None else left_TB, _left(epilogue, y),
        *_places(epilogue, y),
        num_rows, num_outputs, num_inputs, launch.split_columns // config.block_k, num_parts, x_TK.stride(0),
        epilogue.residual_stride, y.stride(0),
        0 if epilogue.rope is None else epilogue.rope.layer.keys_SGd.stride(0),
        0.0 if rows.norm is None else rows.norm.eps,
        BLOCK_M=launch.block_m, BLOCK_N=config.block_n, TAKEN=config.taken,
        BLOCK_K=_FP8_COLUMNS if twice else config.block_k, TWICE=twice, SPLITS=splits,
        EVEN_K=num_inputs == launch.split_columns * config.split_k, KIND=kind,
        END=end, **epilogue.flags, NORM=rows.norm is not None, CODES=codes,
        SIDE=side, KNOWN=_holding(num_rows), ROWS=_rows_read(num_rows, launch.block_m, side, makes_codes, kind),
        SQUARED=1 if rows.norm is None else triton.next_power_of_2(-(-num_inputs // num_parts)),
        PARTS=parts, LEVELS=parts.bit_length() - 1,
        LEAVES=_leaves(epilogue), LEFT_LEVELS=_levels(config), **_heads(epilogue.rope),
        AHEAD=_lines_ahead(config, launch.split_columns - staged, weight_NK.element_size()), STAGED=staged,
        PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return y


def _multiply_hopper(
    rows: Rows, weight: tuple[Tensor, Tensor | None], epilogue: Epilogue, launch: Launch, plan: GemvPlan, y: Tensor
) -> None:
    """Multiply 1 to 4 rows into `y`, with a producer warp for weights."""
    # Gluon is needed here alone: where there is no such GPU its kernels are not even read.
    from slipstream.kernels.triton.gemm.hopper_gemv import hopper_gemv_kernel

    x_TK, config, (weight_NK, w_scale_N) = rows.values_TK, launch.config, weight
    num_outputs, num_inputs = weight_NK.shape
    left_TB = rows.maxima_TB if rows.norm is None else rows.norm.squares_TB
    num_parts = 0 if left_TB is None else left_TB.shape[1]
    parts = triton.next_power_of_2(max(num_parts, 1))
    hopper_gemv_kernel[(launch.grid(len(x_TK), num_outputs, epilogue.silu)[1],)](
        *weight_boxes(weight_NK, plan), x_TK, y if rows.scale_T is None else rows.scale_T,
        y if w_scale_N is None else w_scale_N, *epilogue.added(y), y,
        y if rows.norm is None else rows.norm.weight_D, y if left_TB is None else left_TB, _left(epilogue, y),
        *_places(epilogue, y),
        len(x_TK), num_outputs, num_inputs, num_parts, x_TK.stride(0), epilogue.residual_stride, y.stride(0),
        0 if epilogue.rope is None else epilogue.rope.layer.keys_SGd.stride(0),
        0.0 if rows.norm is None else rows.norm.eps, config.gemv_trigger,
        **plan.constants(), **epilogue.flags, NORM=rows.norm is not None, LEFT=parts,
        LEFT_LEVELS=parts.bit_length() - 1, LEAVES=_leaves(epilogue), LEAVE_LEVELS=_levels(config),
        **_heads(epilogue.rope), PDL=launch.dependent, num_warps=4, maxnreg=REGISTERS,
        **launch_options(launch.dependent),
    )  # fmt: skip


def _holding(num_rows: int) -> int:
    """Return a power of two that holds so many rows."""
    return 1 << (num_rows - 1).bit_length()


def _rows_read(num_rows: int, block_m: int, side: int, makes_codes: bool, kind: str) -> int:
    """Return how many rows a step reads of those it multiplies: a single one alone, or, for codes, few."""
    if side > 1:
        return block_m // side
    if makes_codes:
        return _holding(num_rows)
    return 1 if num_rows == 1 and kind == "dense" else block_m


def _levels(config: LinearConfig) -> int:
    """Return how often pairs are added until a tile's squares are one sum, or one for every 64."""
    return min(config.taken, SQUARED).bit_length() - 1


def _num_stored(epilogue: Epilogue, num_outputs: int) -> int:
    if epilogue.rope is not None:
        return epilogue.rope.heads[0] * epilogue.rope.layer.keys_SGd.shape[2]
    return num_outputs // 2 if epilogue.silu else num_outputs


def _leaves(epilogue: Epilogue) -> str:
    return "squares" if epilogue.squares_TB is not None else "maxima" if epilogue.maxima_TB is not None else "none"


def _left(epilogue: Epilogue, y: Tensor) -> Tensor:
    """Return where a product leaves what it tells of its outputs."""
    if epilogue.maxima_TB is not None:
        assert epilogue.squares_TB is None, "a product leaves one thing of its outputs"
        return epilogue.maxima_TB
    return y if epilogue.squares_TB is None else epilogue.squares_TB


def _places(epilogue: Epilogue, y: Tensor) -> tuple[Tensor, ...]:
    """Return the caches and the tables of a rotation; absent ones are stood in for by one that is not read."""
    if epilogue.rope is None:
        return (y,) * 6
    rope, layer = epilogue.rope.rope, epilogue.rope.layer
    return layer.keys_SGd, layer.values_SGd, rope.slots_T, rope.positions_T, rope.cos_Pr, rope.sin_Pr


def _heads(write: RopeWrite | None) -> dict[str, int]:
    if write is None:
        return {"HEADS": 0, "GROUPS": 0, "HALF": 1}
    return {"HEADS": write.heads[0], "GROUPS": write.heads[1], "HALF": write.rope.cos_Pr.shape[1]}


def _lines_ahead(config: LinearConfig, columns_left: int, itemsize: int) -> int:
    """Return how many lines of a row to ask for, within the split: a power of two."""
    most = max(columns_left * itemsize // _LINE_BYTES, 0)
    return min(config.ahead, 1 << (most.bit_length() - 1)) if most else 0
