"""What follows a product that left the sums of its stretches: they are added, then the residual, then a norm.

A product that adds its own stretches waits for the slowest of them, tile by tile, with few programs at work. Here every
row has a program, which must run anyway for the norm. The arithmetic is that of a product's end and of `norm_rope`.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.norm_rope import Norm, added_stretches, pair_sums
from slipstream.kernels.triton.variants import Variant


@triton.jit
def _add_kernel(
    parts_ptr, residual_ptr, weight_ptr, hidden_ptr, normed_ptr, width, part_stride, residual_stride, eps,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finish a row of hidden states, and normalise it."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    dtype = hidden_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * residual_stride + at, mask=real, other=0.0).to(tl.float32)
    total = added_stretches(parts_ptr + row * width + at, part_stride, real, SPLITS)
    hidden = (total.to(dtype).to(tl.float32) + residual).to(dtype)
    tl.store(hidden_ptr + row * width + at, hidden, mask=real)
    if NORM:
        x = hidden.to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(tl.float32)
        squares = pair_sums(tl.reshape(x * x, (1, BLOCK)), LEVELS)
        rstd = tl.rsqrt(tl.sum(tl.reshape(squares, (1,)), 0) / width + eps)
        # Rounded where torch rounds: after the norm, and after the weight.
        normed = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
        tl.store(normed_ptr + row * width + at, normed, mask=real)


def add_stretches(
    parts_STD: Tensor, residual_TD: Tensor, norm: Norm | None, dependent: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a product's rows with their residual, and these normalised if there is a norm."""
    splits, num_rows, width = parts_STD.shape
    hidden = torch.empty(num_rows, width, dtype=residual_TD.dtype, device=residual_TD.device)
    normed = None if norm is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_kernel[(num_rows,)](
        parts_STD, residual_TD, hidden if norm is None else norm.weight_D, hidden,
        hidden if normed is None else normed, width, parts_STD.stride(0), residual_TD.stride(0),
        0.0 if norm is None else norm.eps, BLOCK=block, LEVELS=block.bit_length() - 1, SPLITS=splits,
        NORM=norm is not None, PDL=dependent, num_warps=8 if width > 1024 else 4, **launch_options(dependent),
    )  # fmt: skip
    return hidden, normed


def variants(architecture: str) -> list[Variant]:
    """List what ships, at the width of an 8B model: two to eight stretches, with the norm and without."""
    signature = {
        "parts_ptr": "*fp32", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "hidden_ptr": "*bf16",
        "normed_ptr": "*bf16", "width": "i32", "part_stride": "i32", "residual_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    divisible = tuple(name for name, kind in signature.items() if kind != "fp32")
    return [
        Variant(f"add {splits} stretches, norm {norm}", _add_kernel, signature,
                {"BLOCK": 4096, "LEVELS": 12, "SPLITS": splits, "NORM": norm, "PDL": False}, 8, 2, divisible=divisible)
        for splits, norm in ((2, True), (4, True), (8, True), (4, False))
    ]  # fmt: skip
