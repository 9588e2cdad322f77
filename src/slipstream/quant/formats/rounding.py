"""The two ways to round: the better one, and the one that gives Quark's bits."""

from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["best", "quark"]
"""`best` rounds once, in float32, with searched scales where that pays; `quark` repeats Quark 0.13 bit for bit."""

SCALE_FLOOR = 2.0**-23
"""The smallest scale Quark writes, and the scale of a row of zeros in either mode."""
_SMALLEST_NORMAL = 2.0**-126


def row_amax(weight_OI: Tensor) -> Tensor:
    """Return the largest magnitude of each row, in the weight's dtype; NaN and Inf come through."""
    if weight_OI.dtype in (torch.bfloat16, torch.float16):
        # As integers, magnitudes of one sign order like the floats they are, and integers are compared faster.
        bits_O = (weight_OI.view(torch.int16) & 0x7FFF).amax(-1)
        return bits_O.view(weight_OI.dtype)
    return weight_OI.abs().amax(-1)


def search_scales(weight_OI: Tensor, low: int, high: int, shrink: tuple[float, ...]) -> Tensor:
    """Return float32 scales [O] that make integer codes `low` to `high` lose least in the square.

    Each candidate shrinks the range that covers the whole row; for the codes it gives, the best scale is a least
    squares fit, so a coarse grid is enough. Rows are normalised first: no square can overflow.
    """
    base_O = (row_amax(weight_OI).float() / ((high - low) / 2)).clamp(min=_SMALLEST_NORMAL)
    unit_OI = torch.div(weight_OI, base_O[:, None])
    best_O = torch.zeros_like(base_O)
    fit_O = torch.ones_like(base_O)
    codes_OI, scratch_OI = torch.empty_like(unit_OI), torch.empty_like(unit_OI)
    for factor in shrink:
        torch.mul(unit_OI, 1.0 / factor, out=codes_OI)
        gain_O, scale_O = _fit(unit_OI, codes_OI.round_().clamp_(low, high), scratch_OI)
        better_O = gain_O > best_O
        best_O = torch.where(better_O, gain_O, best_O)
        fit_O = torch.where(better_O, scale_O, fit_O)
    torch.div(unit_OI, fit_O[:, None], out=codes_OI)
    _, refit_O = _fit(unit_OI, codes_OI.round_().clamp_(low, high), scratch_OI)
    scale_O = base_O * torch.where(best_O > 0, refit_O, fit_O)
    return torch.where(best_O > 0, scale_O.clamp(min=_SMALLEST_NORMAL), torch.full_like(scale_O, SCALE_FLOOR))


def _fit(unit_OI: Tensor, codes_OI: Tensor, scratch_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much of each row's energy its codes explain, and the scale that does it; `scratch_OI` is used up."""
    product_O = torch.mul(unit_OI, codes_OI, out=scratch_OI).sum(-1)
    square_O = torch.mul(codes_OI, codes_OI, out=scratch_OI).sum(-1).clamp_(min=1.0)
    return product_O * product_O / square_O, product_O / square_O
