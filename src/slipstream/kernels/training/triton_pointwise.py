"""What lies between the products of a block as differentiable Triton kernels: norms, rotations, SiLU times up.

Specified by `TrainOps`; imported only where a GPU was chosen. Unlike serving's they have gradients, and no promise of
equal bits to keep.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_PROGRAMS = 1056
_TILE = 2048
"""Numbers of a tensor that a program holds at once."""


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, N, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    real = (row < N) & (at < W)
    gate = tl.load(x_ptr + row * 2 * W + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * W + W + at, mask=real, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * W + at, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _silu_mul_grad_kernel(x_ptr, grad_ptr, out_ptr, N, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    real = (row < N) & (at < W)
    gate = tl.load(x_ptr + row * 2 * W + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * W + W + at, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * W + at, mask=real, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out_ptr + row * 2 * W + at, grad_gate.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(out_ptr + row * 2 * W + W + at, (grad * gate * share).to(out_ptr.dtype.element_ty), mask=real)


def silu_mul(gate_up_TN: Tensor) -> Tensor:
    """Return silu(first half) * second half of each row."""
    apply: Any = _SiluMul.apply  # torch leaves it untyped
    out: Tensor = apply(gate_up_TN)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # torch's own ctx
        x = x.contiguous()
        ctx.save_for_backward(x)
        width = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
        grid, tile = _tiles(x.numel() // x.shape[-1], width)
        _silu_mul_kernel[grid](x, out, x.numel() // x.shape[-1], width, **tile, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # torch's own types
        (x,) = ctx.saved_tensors
        num_rows, width = x.numel() // x.shape[-1], x.shape[-1] // 2
        out = torch.empty_like(x)
        grid, tile = _tiles(num_rows, width)
        _silu_mul_grad_kernel[grid](x, grads[0].contiguous(), out, num_rows, width, **tile, num_warps=4)
        return out


def _tiles(num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return a grid over rows and columns, and the tile of each program."""
    columns = min(512, triton.next_power_of_2(width))
    rows = _TILE // columns
    return (triton.cdiv(num_rows, rows), triton.cdiv(width, columns)), {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, N, slot_stride, sign,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate some of N heads by their slots' angles, or back where `sign` is -1; REST lanes hold what does not turn."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    slot = row // H
    source = x_ptr + slot * slot_stride + (row % H) * D
    lane = tl.arange(0, LANES)[None, :]
    real = (row < N) & (lane < HALF)
    a = tl.load(source + lane, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + lane, mask=real, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + slot * HALF + lane, mask=real, other=0.0)
    sin = tl.load(sin_ptr + slot * HALF + lane, mask=real, other=0.0) * sign
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * D + lane, (a * cos - b * sin).to(dtype), mask=real)
    tl.store(out_ptr + row * D + HALF + lane, (b * cos + a * sin).to(dtype), mask=real)
    if REST > 0:
        at = 2 * HALF + tl.arange(0, REST)[None, :]
        kept = (row < N) & (at < D)
        tl.store(out_ptr + row * D + at, tl.load(source + at, mask=kept, other=0.0), mask=kept)


def rotate(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
    """Rotate pairs (i, i + r) of each head's first 2r values; the rest passes."""
    apply: Any = _Rotate.apply  # torch leaves it untyped
    out: Tensor = apply(x_THd, cos_Tr, sin_Tr)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # torch's own ctx
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    heads, width = x.shape[-2:]
    num_slots = x.numel() // (heads * width)
    # Slots at one distance, as the heads that a product split off its columns are, need no copy.
    x = x if x.stride()[-2:] == (width, 1) and _evenly(x) else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    lanes = triton.next_power_of_2(half)
    rows = max(1, _TILE // lanes)
    _rotate_kernel[(triton.cdiv(num_slots * heads, rows),)](
        x, cos, sin, out, num_slots * heads, x.stride(-3), sign, H=heads, D=width, HALF=half, ROWS=rows, LANES=lanes,
        REST=triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0, num_warps=4,
    )  # fmt: skip
    return out


def _evenly(x: Tensor) -> bool:
    """Tell whether all slots lie one distance apart, over every leading dimension."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 3))


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, N, W, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    real = (row < N) & (at < W)
    x = tl.load(x_ptr + row * W + at, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < W, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / W + eps)[:, None]
    tl.store(out_ptr + row * W + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _norm_grad_kernel(
    x_ptr, weight_ptr, grad_ptr, out_ptr, parts_ptr, N, W, eps,
    BY_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Work out this program's share of the weight's gradient, and its rows' own where they are wanted."""
    at = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < W, other=0.0).to(tl.float32)
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        real = (row < N) & (at < W)
        x = tl.load(x_ptr + row * W + at, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * W + at, mask=real, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / W + eps)[:, None]
        normed = x * scale
        part += grad * normed
        if BY_ROWS:
            wanted = grad * weight
            mean = (tl.sum(wanted * normed, 1) / W)[:, None]
            grad_x = (wanted - normed * mean) * scale
            tl.store(out_ptr + row * W + at, grad_x.to(out_ptr.dtype.element_ty), mask=real)
    column = tl.arange(0, BLOCK)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * W + column, tl.sum(part, 0), mask=column < W)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight_D`."""
    apply: Any = _RmsNorm.apply  # torch leaves it untyped
    out: Tensor = apply(x_TD, weight_D, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # torch's own ctx
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
        out = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        rows = max(1, _TILE // block)
        _norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, weight, out, num_rows, width, eps, ROWS=rows, BLOCK=block, num_warps=4 if block <= _TILE else 8
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        x, weight = ctx.saved_tensors
        num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
        block = triton.next_power_of_2(width)
        rows = max(1, _TILE // block)
        programs = min(triton.cdiv(num_rows, rows), _NORM_PROGRAMS)
        by_rows = bool(ctx.needs_input_grad[0])
        out = torch.empty_like(x) if by_rows else x
        parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _norm_grad_kernel[(programs,)](
            x, weight, grads[0].contiguous(), out, parts, num_rows, width, ctx.eps, BY_ROWS=by_rows, ROWS=rows,
            BLOCK=block, num_warps=4 if block <= _TILE else 8,
        )  # fmt: skip
        return out if by_rows else None, parts.sum(0).to(weight.dtype), None
