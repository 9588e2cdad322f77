"""Copies: some tokens' queries and residuals, and keys of accepted nodes to the slots of plain decoding."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs, wait_then_let_start

_BLOCK = 128


@triton.jit
def _take_kernel(
    rows_ptr, q_ptr, residual_ptr, q_out_ptr, residual_out_ptr, q_width, width, q_stride, residual_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one token's queries, or its residual."""
    wait_then_let_start(PDL)  # attention is next, and reads what was written before the kernel before
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + to)
    at = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(
            q_out_ptr + to * q_width + at, tl.load(q_ptr + row * q_stride + at, mask=at < q_width), mask=at < q_width
        )
    else:
        taken = tl.load(residual_ptr + row * residual_stride + at, mask=at < width)
        tl.store(residual_out_ptr + to * width + at, taken, mask=at < width)


def take_rows(rows_L: Tensor, q_THd: Tensor, residual_TD: Tensor, dependent: bool) -> tuple[Tensor, Tensor]:
    """Return the queries and residuals of some tokens, contiguous; what is given may have rows that lie apart."""
    q = q_THd.new_empty((len(rows_L), *q_THd.shape[1:]))
    residual = residual_TD.new_empty((len(rows_L), residual_TD.shape[1]))
    q_width, width = q[0].numel(), residual.shape[1]
    block = triton.next_power_of_2(max(q_width, width))
    _take_kernel[(len(rows_L), 2)](
        rows_L, q_THd, residual_TD, q, residual, q_width, width, q_THd.stride(0), residual_TD.stride(0),
        BLOCK=block, PDL=dependent, num_warps=4 if block <= 2048 else 8, **launch_options(dependent),
    )  # fmt: skip
    return q, residual


@triton.jit
def move_kernel(
    k_ptr, v_ptr, from_ptr, to_ptr, from_stride, to_stride, layer_stride, slot_stride, width, depth,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move some columns of a row's slots in a layer, all of which are read before any is written.

    Args:
        APART: values are not a view of the keys.
    """
    wait_for_inputs(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64) * layer_stride
    level = tl.arange(0, DEPTH)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = level < depth
    taken = tl.load(from_ptr + row * from_stride + level, mask=there, other=0)
    given = tl.load(to_ptr + row * to_stride + level, mask=there, other=0)
    moves = there & (taken != given)
    mask = moves[:, None] & (column < width)[None, :]
    taken_at = first + taken[:, None] * slot_stride + column[None, :]
    given_at = first + given[:, None] * slot_stride + column[None, :]
    keys = tl.load(k_ptr + taken_at, mask=mask)
    if APART:
        values = tl.load(v_ptr + taken_at, mask=mask)
    tl.debug_barrier()
    tl.store(k_ptr + given_at, keys, mask=mask)
    if APART:
        tl.store(v_ptr + given_at, values, mask=mask)


def move_paths(layers: Sequence[KvLayer], from_RD: Tensor, to_RD: Tensor, dependent: bool) -> None:
    """Copy slots to slots in every row; a slot stays where it is told to move to itself.

    Layers that lie evenly apart in one allocation (`KvCache.allocate`) take one launch.
    """
    keys, values = _as_one([layer.keys_SGd for layer in layers]), _as_one([layer.values_SGd for layer in layers])
    if keys is None or values is None:
        for layer in layers:
            move_paths([layer], from_RD, to_RD, dependent)
        return
    apart = keys.data_ptr() != values.data_ptr()
    assert not apart or keys.stride() == values.stride(), "keys and values lie alike"
    (num_rows, depth), width = from_RD.shape, keys.shape[2] * keys.shape[3]
    move_kernel[(num_rows, triton.cdiv(width, _BLOCK), len(layers))](
        keys, values, from_RD, to_RD, from_RD.stride(0), to_RD.stride(0), *keys.stride()[:2], width, depth,
        DEPTH=triton.next_power_of_2(depth), BLOCK=_BLOCK, APART=apart, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie evenly apart in one allocation as one tensor of them all; None for others."""
    first, at = parts[0], [part.storage_offset() for part in parts]
    step = at[-1] - at[-2] if len(parts) > 1 else 0
    alike = {(part.untyped_storage().data_ptr(), part.shape, part.stride()) for part in parts}
    if len(alike) > 1 or at != [at[0] + number * step for number in range(len(parts))]:
        return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))
