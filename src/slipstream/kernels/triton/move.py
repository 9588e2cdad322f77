"""Moving the keys and values of accepted nodes to where plain decoding has them, one launch a layer."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs

_BLOCK = 128


@triton.jit
def move_kernel(
    k_ptr, v_ptr, from_ptr, to_ptr, from_stride, to_stride, slot_stride, width, depth,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move some columns of a row's slots, all of which are read before any is written.

    Args:
        APART: values are not a view of the keys.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, DEPTH)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = level < depth
    taken = tl.load(from_ptr + row * from_stride + level, mask=there, other=0)
    given = tl.load(to_ptr + row * to_stride + level, mask=there, other=0)
    moves = there & (taken != given)
    mask = moves[:, None] & (column < width)[None, :]
    taken_at = taken[:, None] * slot_stride + column[None, :]
    given_at = given[:, None] * slot_stride + column[None, :]
    keys = tl.load(k_ptr + taken_at, mask=mask)
    if APART:
        values = tl.load(v_ptr + taken_at, mask=mask)
    tl.debug_barrier()
    tl.store(k_ptr + given_at, keys, mask=mask)
    if APART:
        tl.store(v_ptr + given_at, values, mask=mask)


def move_paths(layer: KvLayer, from_RD: Tensor, to_RD: Tensor, dependent: bool) -> None:
    """Copy slots to slots in every row; a slot stays where it is told to move to itself."""
    keys, values = layer.keys_SGd, layer.values_SGd
    apart = keys.data_ptr() != values.data_ptr()
    assert not apart or keys.stride() == values.stride(), "keys and values lie alike"
    (num_rows, depth), width = from_RD.shape, keys.shape[1] * keys.shape[2]
    move_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        keys, values, from_RD, to_RD, from_RD.stride(0), to_RD.stride(0), keys.stride(0), width, depth,
        DEPTH=triton.next_power_of_2(depth), BLOCK=_BLOCK, APART=apart, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip
