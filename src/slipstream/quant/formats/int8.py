"""INT8: weights with one scale per row, and activations per token."""

import torch
from torch import Tensor

from slipstream.quant.formats.rounding import SCALE_FLOOR, Rounding, row_amax, search_scales

LOW, HIGH = -128, 127
ACTIVATION_MAX = 127.0
_SHRINK = (1.0, 0.99, 0.97, 0.93)
_AT_A_TIME = 1 << 17  # weights: what the search for a scale goes over again and again stays in a core's cache


def encode(weight_OI: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return int8 codes [O, I] and float32 scales [O]."""
    most = max(1, _AT_A_TIME // max(1, weight_OI.shape[1]))
    if len(weight_OI) > most and weight_OI.device.type == "cpu":
        parts = [encode(rows, rounding) for rows in torch.split(weight_OI, most)]
        return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])
    if rounding == "quark":
        # Quark evaluates the scale in the weight's dtype, and multiplies by its reciprocal.
        scale_O = (row_amax(weight_OI) / 127.5).clamp(min=SCALE_FLOOR).float()
        codes_OI = weight_OI.float() * (1.0 / scale_O)[:, None]
    else:
        scale_O = search_scales(weight_OI, LOW, HIGH, _SHRINK)
        codes_OI = torch.div(weight_OI, scale_O[:, None])
    return codes_OI.round_().clamp_(LOW, HIGH).to(torch.int8), scale_O


def decode(codes_OI: Tensor, scale_O: Tensor) -> Tensor:
    """Return float32 weights."""
    return codes_OI.float() * scale_O[:, None]


def quantize_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations per token, symmetric: int8 codes [T, D] and float32 scales [T] = amax / 127.

    On a GPU torch divides by a number as it multiplies by its inverse, and only by a tensor as it divides: with a scale
    one bit off, a number halfway between two codes would go the other way there.
    """
    x_TD = x_TD.float()
    largest_T = x_TD.abs().amax(-1)
    scale_T = largest_T / torch.full_like(largest_T, ACTIVATION_MAX)
    divisor_T1 = torch.where(scale_T == 0, 1.0, scale_T)[..., None]
    return (x_TD / divisor_T1).round_().clamp_(-ACTIVATION_MAX, ACTIVATION_MAX).to(torch.int8), scale_T
