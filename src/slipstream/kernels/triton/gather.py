"""Going on with some tokens of a pass: their queries, and what their outputs are added to, side by side."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import launch_options, wait_then_let_start


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
