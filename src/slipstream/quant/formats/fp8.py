"""FP8 E4M3: weights with one scale per row, per tensor or per 128 x 128 block, and activations per token."""

import torch
from torch import Tensor

from slipstream.quant.formats.rounding import SCALE_FLOOR, Rounding, row_amax

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128


def encode_per_channel(weight_OI: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return codes [O, I] and float32 scales [O]."""
    scale_O = _scale(row_amax(weight_OI))
    # Quark divides by the scale rounded to the weight's dtype, but stores it unrounded.
    divisor_O = scale_O.to(weight_OI.dtype) if rounding == "quark" else scale_O
    quotient_OI = torch.div(weight_OI, divisor_O[:, None])
    lost_O = divisor_O == 0  # F16 rounds a scale below 2^-25 to zero; Quark then writes NaN for 0 / 0
    if bool(lost_O.any()):
        quotient_OI = torch.where(lost_O[:, None], torch.div(weight_OI, scale_O[:, None]), quotient_OI)
    return _cast(quotient_OI), scale_O


def encode_per_tensor(weight_OI: Tensor, amax: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return codes [O, I] and one float32 scale []; `amax` is the whole tensor's, `weight_OI` may be a part."""
    scale = per_tensor_scale(amax)
    if rounding == "quark":
        # A 0-d divisor does not widen the weight: the quotient is rounded to the weight's dtype.
        return _cast(weight_OI / scale), scale
    return _cast(weight_OI.float() / scale), scale


def per_tensor_scale(amax: float) -> Tensor:
    """Return the float32 scale [] of a tensor whose largest magnitude is `amax`."""
    return _scale(torch.tensor(amax, dtype=torch.float32))


def quantize_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations per token: codes [T, D] and float32 scales [T], divided as in `int8.quantize_rows`."""
    x_TD = x_TD.float()
    largest_T = x_TD.abs().amax(-1).clamp(min=1e-12)
    scale_T = largest_T / torch.full_like(largest_T, E4M3_MAX)
    return _cast(x_TD / scale_T[..., None]), scale_T


def decode(codes_OI: Tensor, scale: Tensor) -> Tensor:
    """Return float32 weights; `scale` is [], [O] or [O, ceil(I / 128)]."""
    codes_OI = codes_OI.float()
    if scale.ndim == 2:
        return codes_OI * spread_groups(scale, BLOCK, codes_OI.shape[-1])
    return codes_OI * (scale[:, None] if scale.ndim == 1 else scale)


def spread_groups(scale_OG: Tensor, group_size: int, num_columns: int) -> Tensor:
    """Repeat each group's scale over its columns; the last group may be short."""
    return scale_OG.repeat_interleave(group_size, dim=-1)[..., :num_columns]


def _scale(amax: Tensor) -> Tensor:
    scale = amax.float() / E4M3_MAX
    return torch.where(scale == 0, SCALE_FLOOR, scale)


def _cast(quotient: Tensor) -> Tensor:
    return quotient.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
