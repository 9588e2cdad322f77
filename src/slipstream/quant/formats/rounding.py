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
    """Return float32 scales [O] that make integer codes `low` to `high` lose little in the square.

    Candidates shrink the range that covers the whole row. The best is then refined twice: for the codes it gives, the
    scale that loses least is a least squares fit, so a coarse grid is enough. Rows are normalised first, so that no
    square can overflow.
    """
    # In the weight's dtype, as Quark divides: the first candidate is then Quark's own, so no row loses more than there.
    amax_O, half_range = row_amax(weight_OI), (high - low) / 2
    base_O = (amax_O / half_range).float()
    # Below its normal numbers F16 holds a quotient too coarsely to start from.
    is_coarse_O = base_O < torch.finfo(weight_OI.dtype).smallest_normal
    base_O = torch.where(is_coarse_O, amax_O.float() / half_range, base_O).clamp(min=_SMALLEST_NORMAL)
    unit_OI = torch.div(weight_OI, base_O[:, None])
    scratch_OI = torch.empty_like(unit_OI)
    least_O = torch.full_like(base_O, torch.inf)
    fit_O = torch.ones_like(base_O)
    for factor in shrink:
        torch.mul(unit_OI, 1.0 / factor, out=scratch_OI).round_().clamp_(low, high)
        torch.add(unit_OI, scratch_OI, alpha=-factor, out=scratch_OI)
        error_O = torch.linalg.vector_norm(scratch_OI, dim=-1)
        fit_O.masked_fill_(error_O < least_O, factor)
        least_O = torch.minimum(least_O, error_O)
    for _ in range(2):
        torch.div(unit_OI, fit_O[:, None], out=scratch_OI).round_().clamp_(low, high)
        square_O = torch.linalg.vector_norm(scratch_OI, dim=-1).square_()
        fit_O = torch.where(square_O > 0, scratch_OI.mul_(unit_OI).sum(-1) / square_O, 0.0)
    # Codes of a row of zeros say nothing about its scale.
    return torch.where(fit_O > 0, (base_O * fit_O).clamp(min=_SMALLEST_NORMAL), SCALE_FLOOR)
