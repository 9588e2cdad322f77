"""RMSNorm and SiLU times up; a norm may store its rows as FP8 or INT8 codes."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.gemm.quantize import CODE_DTYPES, Codes, encode, row_scale
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs

SQUARED = 64
"""How many numbers of a row share a sum of squares where a product leaves them for the norm."""


@triton.jit
def pair_sums(x, LEVELS: tl.constexpr):
    """Add neighbours [M, n] -> [M, n / 2], so many times: one order of a sum, whatever threads hold the numbers."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return x


@triton.jit
def _norm_kernel(
    x_ptr, other_ptr, weight_ptr, other_weight_ptr, out_ptr, scale_ptr, width, x_stride, other_stride, out_stride, eps,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise a row of `x`, or in the grid's second column one of `other`, which goes behind it in the output."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < width
    source, weight_at = x_ptr + row * x_stride, weight_ptr
    if part == 1:
        source, weight_at = other_ptr + row * other_stride, other_weight_ptr
    x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + at, mask=real, other=0.0).to(tl.float32)
    squares = pair_sums(tl.reshape(x * x, (1, BLOCK)), LEVELS)
    rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (1,)), 0) / width + eps)
    dtype = x_ptr.dtype.element_ty
    # Rounded where torch rounds: after the norm, and after the weight.
    normed = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
    target = out_ptr + row * out_stride + part * width + at
    if CODES == "none":
        tl.store(target, normed, mask=real)
    else:
        numbers = normed.to(tl.float32)
        scale = row_scale(tl.max(tl.abs(numbers), 0), CODES)
        tl.store(scale_ptr + row, scale)
        tl.store(target, encode(numbers, tl.broadcast_to(scale, [BLOCK]), CODES), mask=real)


@dataclass(frozen=True)
class Norm:
    """A norm's weight and eps, as kernels need them."""

    weight_D: Tensor
    eps: float


def rms_norm(x_TD: Tensor, norm: Norm, dependent: bool) -> Tensor:
    """Return normalised rows; the last dimension of `x_TD` is contiguous."""
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch_norm((x_TD, x_TD), (norm, norm), out, out, "none", 1, dependent)
    return out


def norm_codes(x_TD: Tensor, norm: Norm, codes: Codes, dependent: bool) -> tuple[Tensor, Tensor]:
    """Return normalised rows as codes [T, D] and their scales [T]."""
    out = torch.empty(x_TD.shape, dtype=CODE_DTYPES[codes], device=x_TD.device)
    scale_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
    _launch_norm((x_TD, x_TD), (norm, norm), out, scale_T, codes, 1, dependent)
    return out, scale_T


def norm_both(first_TD: Tensor, second_TD: Tensor, norms: tuple[Norm, Norm], dependent: bool) -> Tensor:
    """Return [norm(first) ; norm(second)] in rows of twice the width; both norms share their eps."""
    out = torch.empty(first_TD.shape[0], 2 * first_TD.shape[1], dtype=first_TD.dtype, device=first_TD.device)
    _launch_norm((first_TD, second_TD), norms, out, out, "none", 2, dependent)
    return out


def _launch_norm(
    rows: tuple[Tensor, Tensor], norms: tuple[Norm, Norm], out: Tensor, scale_T: Tensor, codes: str, parts: int,
    dependent: bool,
) -> None:  # fmt: skip
    num_rows, width = rows[0].shape
    assert norms[0].eps == norms[1].eps
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows, parts)](
        *rows, norms[0].weight_D, norms[1].weight_D, out, scale_T, width, rows[0].stride(0), rows[1].stride(0),
        out.stride(0), norms[0].eps, BLOCK=block, LEVELS=block.bit_length() - 1, CODES=codes, PDL=dependent,
        num_warps=8 if width > 1024 else 4, **launch_options(dependent),
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    dtype = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + at, mask=real, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up).to(dtype), mask=real)


def silu_mul(gate_up_TN: Tensor, dependent: bool) -> Tensor:
    """Return silu(first half) * second half of each row."""
    num_rows, width = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up_TN.dtype, device=gate_up_TN.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, 1024))](
        gate_up_TN, out, width, gate_up_TN.stride(0), BLOCK=1024, PDL=dependent, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip
    return out
