"""How products of 1 to 4 rows are launched with a producer warp for weights (`hopper_gemv`, sm_90)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.triton.gemm.split_k import Epilogue, Launch, Rows
from slipstream.kernels.triton.tuning import CHAIN_ROWS, LinearConfig

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
    side: int
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
            "SEG": self.seg, "OWN": self.own, "BOXES": len(self.boxes()), "BN": self.bn, "SIDE": self.side,
            "MP": self.mp, "STEPS": self.steps, "C": self.chunk, "U": self.unrolled, "SLOTS": self.slots,
            "END": self.end, "CODES": self.codes,
        }  # fmt: skip

    def boxes(self) -> tuple[int, ...]:
        """Return the rows of the boxes in which TMA loads a split's, the largest first: powers of two."""
        return tuple(1 << bit for bit in reversed(range(self.own.bit_length())) if self.own >> bit & 1)


def plan_of(
    config: LinearConfig, num_rows: int, split_columns: int, itemsize: int, end: str, codes: str, half: int
) -> GemvPlan | None:
    """Return how a product runs, or None where it cannot.

    Args:
        split_columns: those of one split of K; all have as many.
        end, codes: as in `small_m.small_m_kernel`.
        half: half a head's columns, where heads are rotated.
    """
    side, parts = config.split_k if config.side else 1, 1 if end == "plain" else 2
    seg, own = config.block_n // (side * parts), config.taken // parts
    columns = STEP_BYTES // itemsize
    fits = num_rows <= CHAIN_ROWS and side in (1, 2, 4) and (config.side or config.split_k == 1)
    fits = fits and side * seg % _MATRIX_ROWS == 0 and own % _LEAST_BOX == 0 and split_columns % columns == 0
    if not fits or own.bit_count() > _MOST_BOXES or (end == "rope" and half % own):
        return None
    mp = 1 << (num_rows - 1).bit_length()
    steps, bn = split_columns // columns, 8 if side * mp <= 8 else 16
    whole = steps & (steps - 1) == 0
    if codes == "norm":
        if not whole or steps < 8 or steps * side * mp * columns > 2 * _MOST_NUMBERS:
            return None
        chunk = steps
    elif whole and steps * bn * STEP_BYTES <= _MOST_PREPARED and steps * side * mp * columns <= _MOST_NUMBERS:
        chunk = steps
    else:
        chunk = _MOST_PREPARED // (2 * bn * STEP_BYTES)
        while steps % chunk or chunk * side * mp * columns > _MOST_NUMBERS:
            chunk //= 2
    prepared = steps if chunk == steps else 2 * chunk
    if prepared * 32 < parts * side * seg:  # sums go where the rows were
        return None
    most = (_SHARED - prepared * bn * STEP_BYTES - 1024) // (side * seg * STEP_BYTES + _BARRIERS)
    slots = min(config.gemv_stages, steps * parts, most)
    return GemvPlan(seg, own, bn, side, mp, steps, chunk, min(chunk, 4), slots, end, codes) if slots >= 2 else None


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
