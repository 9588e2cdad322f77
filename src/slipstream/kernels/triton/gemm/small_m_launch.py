"""How GEMMs of a few rows are launched: `small_m`, and `hopper_gemv` where its ring fits (sm_90, 1 to 4 rows)."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.triton.gemm.small_m import small_m_kernel
from slipstream.kernels.triton.gemm.split_k import Epilogue, Launch, Rows, partial_sums
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.norm import SQUARED
from slipstream.kernels.triton.rope import RopeWrite
from slipstream.kernels.triton.tuning import CHAIN_ROWS, LinearConfig

MOST_ROWS = 16
"""The token tile these products have; from 17 rows on those for many rows are faster."""
MOST_WHOLE_ROWS = 8
"""A program reads so many whole rows beside its tile, to make codes after their norm; more do not fit in registers."""
_LINE_BYTES = 128
_FP8_COLUMNS = 128  # after so many an FP8 sum is made whole
STEP_BYTES = 128
"""Columns of a step, in bytes of a weight row."""
REGISTERS = 96
"""The most a thread may have, over all warps; with 80 and with 128 products were no faster."""
_MOST_PREPARED = 16 << 10  # shared memory that prepared rows may take where they are not all needed at once
_SHARED = 227 << 10  # bytes of shared memory that a program of an sm_90 may have
_BARRIERS = 16  # bytes a stage, of its two mbarriers
_MATRIX_ROWS = 64
_MOST_BOXES = 3
_LEAST_BOX = 8  # rows after which the order of a row's pieces in shared memory is the same again
_MOST_NUMBERS = 64 * 128  # of a chunk, over all threads


@dataclass(frozen=True)
class GemvPlan:
    """What a product is compiled with; the names are those of `hopper_gemv.hopper_gemv_kernel`."""

    seg: int
    own: int
    bn: int
    slices: int
    mp: int
    steps: int
    chunk: int
    unrolled: int
    slots: int
    end: str
    codes: str

    def constants(self) -> dict[str, int | str]:
        """Return the kernel's arguments."""
        return {
            "SEG": self.seg, "OWN": self.own, "BOXES": len(self.boxes()), "BN": self.bn, "SLICES": self.slices,
            "MP": self.mp, "STEPS": self.steps, "C": self.chunk, "U": self.unrolled, "SLOTS": self.slots,
            "END": self.end, "CODES": self.codes,
        }  # fmt: skip

    def boxes(self) -> tuple[int, ...]:
        """Return the rows of the boxes in which TMA loads a split's, the largest first: powers of two."""
        return tuple(1 << bit for bit in reversed(range(self.own.bit_length())) if self.own >> bit & 1)


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
    slices = config.split_k if config.sliced_k else 1
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
        BLOCK_M=launch.block_m, BLOCK_N=config.block_n, PROGRAM_N=config.outputs,
        BLOCK_K=_FP8_COLUMNS if twice else config.block_k, TWICE=twice, SPLITS=splits,
        EVEN_K=num_inputs == launch.split_columns * config.split_k, KIND=kind,
        END=end, **epilogue.flags, NORM=rows.norm is not None, CODES=codes,
        SLICES=slices, KNOWN=_holding(num_rows), ROWS=_rows_read(num_rows, launch.block_m, slices, makes_codes, kind),
        SQUARED=1 if rows.norm is None else triton.next_power_of_2(-(-num_inputs // num_parts)),
        PARTS=parts, LEVELS=parts.bit_length() - 1,
        LEAVES=_leaves(epilogue), LEFT_LEVELS=_levels(config), **_heads(epilogue.rope),
        LINES=_lines_ahead(config, launch.split_columns - staged, weight_NK.element_size()), STAGED=staged,
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


def _rows_read(num_rows: int, block_m: int, slices: int, makes_codes: bool, kind: str) -> int:
    """Return how many rows a step reads of those it multiplies: a single one alone, or, for codes, few."""
    if slices > 1:
        return block_m // slices
    if makes_codes:
        return _holding(num_rows)
    return 1 if num_rows == 1 and kind == "dense" else block_m


def _levels(config: LinearConfig) -> int:
    """Return how often pairs are added until a tile's squares are one sum, or one for every 64."""
    return min(config.outputs, SQUARED).bit_length() - 1


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
    """Return how many lines of a row to prefetch, within the split: a power of two."""
    most = max(columns_left * itemsize // _LINE_BYTES, 0)
    return min(config.prefetch_lines, 1 << (most.bit_length() - 1)) if most else 0


def plan_of(
    config: LinearConfig, num_rows: int, split_columns: int, itemsize: int, end: str, codes: str, half: int
) -> GemvPlan | None:
    """Return how a product runs, or None where it cannot.

    Args:
        split_columns: those of one split of K; all have as many.
        end, codes: as in `small_m.small_m_kernel`.
        half: half a head's columns, where heads are rotated.
    """
    slices, parts = config.split_k if config.sliced_k else 1, 1 if end == "plain" else 2
    seg, own = config.block_n // (slices * parts), config.outputs // parts
    columns = STEP_BYTES // itemsize
    fits = num_rows <= CHAIN_ROWS and slices in (1, 2, 4) and (config.sliced_k or config.split_k == 1)
    fits = fits and slices * seg % _MATRIX_ROWS == 0 and own % _LEAST_BOX == 0 and split_columns % columns == 0
    if not fits or own.bit_count() > _MOST_BOXES or (end == "rope" and half % own):
        return None
    mp = 1 << (num_rows - 1).bit_length()
    steps, bn = split_columns // columns, 8 if slices * mp <= 8 else 16
    whole = steps & (steps - 1) == 0
    if codes == "norm":
        if not whole or steps < 8 or steps * slices * mp * columns > 2 * _MOST_NUMBERS:
            return None
        chunk = steps
    elif whole and steps * bn * STEP_BYTES <= _MOST_PREPARED and steps * slices * mp * columns <= _MOST_NUMBERS:
        chunk = steps
    else:
        chunk = _MOST_PREPARED // (2 * bn * STEP_BYTES)
        while steps % chunk or chunk * slices * mp * columns > _MOST_NUMBERS:
            chunk //= 2
    prepared = steps if chunk == steps else 2 * chunk
    if prepared * 32 < parts * slices * seg:  # sums go where the rows were
        return None
    most = (_SHARED - prepared * bn * STEP_BYTES - 1024) // (slices * seg * STEP_BYTES + _BARRIERS)
    slots = min(config.gemv_stages, steps * parts, most)
    return GemvPlan(seg, own, bn, slices, mp, steps, chunk, min(chunk, 4), slots, end, codes) if slots >= 2 else None


def gemv_plan(
    rows: Rows, weight_NK: Tensor, kind: str, epilogue: Epilogue, launch: Launch, end: str, codes: str
) -> GemvPlan | None:
    """Return how a product runs here, or None where `small_m_kernel` must multiply."""
    config, itemsize = launch.config, weight_NK.element_size()
    aligned = weight_NK.data_ptr() % 16 == 0 and weight_NK.shape[1] * itemsize % 16 == 0
    known = (kind == "dense" and weight_NK.dtype == torch.bfloat16) or kind == "fp8"
    x_TK = rows.values_TK
    even = x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0
    whole = weight_NK.shape[1] == launch.split_columns * config.split_k
    if not (config.gemv_stages and aligned and known and even and whole and weight_NK.is_contiguous()):
        return None
    half = 1 if epilogue.rope is None else epilogue.rope.rope.cos_Pr.shape[1]
    return plan_of(config, x_TK.shape[0], launch.split_columns, itemsize, end, codes, half)


def weight_boxes(weight_NK: Tensor, plan: GemvPlan) -> tuple[Any, Any, Any]:  # triton has no types of its own
    """Return the descriptions by which TMA reads boxes of a weight; those left over repeat the first."""
    # Gluon is needed here alone: where there is no such GPU its kernels are not even read.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    itemsize = weight_NK.element_size()
    layout = NVMMASharedLayout(STEP_BYTES, 8 * itemsize, 2)
    shape, strides = list(weight_NK.shape), [weight_NK.stride(0), 1]
    first, *others = plan.boxes()
    second, third = (*others, first, first)[:2]

    def boxes(rows: int) -> Any:
        return TensorDescriptor(weight_NK, shape, strides, [rows, STEP_BYTES // itemsize], layout)

    return boxes(first), boxes(second), boxes(third)
