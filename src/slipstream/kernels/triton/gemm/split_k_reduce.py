"""What follows a product that left the sums of its splits: they are added, then the residual, then a norm.

A product that adds its own splits waits for the slowest of them, tile by tile, with few programs at work. Here every
row has a program, which must run anyway for the norm. The arithmetic is that of a product's end and of `norm`.
"""
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
from slipstream.kernels.triton.norm import Norm, pair_sums

_CODE_WARPS = 16  # of a program that makes codes of its row, which it goes over twice


@dataclass(frozen=True)
class PartialSums:
    """Float32 sums [S, T, N] of a product's splits of K, still to be added in their order.

    Args:
        scales: of the rows [T] and of the outputs [N], if these are sums of codes.
        waited: whether the product has waited for its inputs before it let the next kernel start.
    """

    parts_STN: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    waited: bool = False


@triton.jit
def sum_partials(at, stride, real, SPLITS: tl.constexpr):
    """Return numbers as they are stored, or the sums of a product's splits, added in their order."""
    x = tl.load(at, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride, mask=real, other=0.0)
    return x


@triton.jit
def scaled_sums(sums, x_scale_ptr, w_scale_ptr, row, at, real):
    """Turn a row's sums of codes into numbers, as a product's end does; without scales they are numbers."""
    if x_scale_ptr is not None:
        sums *= tl.load(x_scale_ptr + row) * tl.load(w_scale_ptr + at, mask=real, other=0.0)
    return sums


@triton.jit
def _add_kernel(
    parts_ptr, residual_ptr, weight_ptr, hidden_ptr, normed_ptr, x_scale_ptr, w_scale_ptr, scale_ptr, width,
    part_stride, residual_stride, eps,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Finish a row of hidden states, and normalise it; with CODES what is normalised is stored as codes and a scale."""
    at = tl.arange(0, BLOCK)
    real = at < width
    if NORM:
        weight = tl.load(weight_ptr + at, mask=real, other=0.0)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype = hidden_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * residual_stride + at, mask=real, other=0.0).to(tl.float32)
    total = sum_partials(parts_ptr + row * width + at, part_stride, real, SPLITS)
    total = scaled_sums(total, x_scale_ptr, w_scale_ptr, row, at, real)
    hidden = (total.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(hidden_ptr + row * width + at, hidden, mask=real)
    if NORM:
        x = hidden.to(tl.float32)
        squares = pair_sums(tl.reshape(x * x, (1, BLOCK)), LEVELS)
        rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (1,)), 0) / width + eps)
        # Rounded where torch rounds: after the norm, and after the weight.
        normed = ((x * rstd).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
        if CODES == "none":
            tl.store(normed_ptr + row * width + at, normed, mask=real)
        else:
            numbers = normed.to(tl.float32)
            scale = row_scale(tl.max(tl.abs(numbers), 0), CODES)
            tl.store(scale_ptr + row, scale)
            codes = encode(numbers, tl.broadcast_to(scale, [BLOCK]), CODES)
            tl.store(normed_ptr + row * width + at, codes, mask=real)


def reduce_partials(
    sums: PartialSums, residual_TD: Tensor, norm: Norm | None, dependent: bool, warps: int
) -> tuple[Tensor, Tensor | None]:
    """Return a product's rows with their residual, and these normalised if there is a norm.

    Args:
        warps: see `slipstream.kernels.triton.tuning.Tuning.add_warps`.
    """
    hidden = torch.empty(sums.parts_STN.shape[1:], dtype=residual_TD.dtype, device=residual_TD.device)
    normed = None if norm is None else torch.empty_like(hidden)
    _launch(sums, residual_TD, norm, (hidden, hidden if normed is None else normed, None), "none", dependent, warps)
    return hidden, normed


def reduce_to_codes(
    sums: PartialSums, residual_TD: Tensor, norm: Norm, codes: Codes, dependent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a product's rows with their residual, and these normalised: codes [T, D] and their scales [T]."""
    hidden = torch.empty(sums.parts_STN.shape[1:], dtype=residual_TD.dtype, device=residual_TD.device)
    codes_TD = torch.empty(hidden.shape, dtype=CODE_DTYPES[codes], device=hidden.device)
    scale_T = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    _launch(sums, residual_TD, norm, (hidden, codes_TD, scale_T), codes, dependent, _CODE_WARPS)
    return hidden, codes_TD, scale_T


def _launch(
    sums: PartialSums, residual_TD: Tensor, norm: Norm | None, outs: tuple[Tensor, Tensor, Tensor | None], codes: str,
    dependent: bool, warps: int,
) -> None:  # fmt: skip
    splits, num_rows, width = sums.parts_STN.shape
    block = triton.next_power_of_2(width)
    _add_kernel[(num_rows,)](
        sums.parts_STN, residual_TD, outs[0] if norm is None else norm.weight_D, *outs[:2],
        *(sums.scales or (None, None)), outs[2], width, sums.parts_STN.stride(0), residual_TD.stride(0),
        0.0 if norm is None else norm.eps, BLOCK=block, LEVELS=block.bit_length() - 1, SPLITS=splits,
        NORM=norm is not None, CODES=codes, PDL=dependent, num_warps=_num_warps(width, warps),
        **launch_options(dependent),
    )  # fmt: skip


def _num_warps(width: int, warps: int) -> int:
    """Return the warps of a row: four where it is short, else so many, but no fewer than four numbers to a thread.

    With four of them all loads of a row are in flight at once. The compiler has a thread with more read one part
    after another.
    """
    return 4 if width <= 1024 else min(warps, int(triton.next_power_of_2(width)) // 128)
