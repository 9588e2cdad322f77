"""INT4: weights with one scale per row or per group of columns, and Quark's two-scale form behind an FP8 stage."""

import torch
from torch import Tensor

from slipstream.quant.formats import fp8
from slipstream.quant.formats.nibbles import pack_nibbles, unpack_signed
from slipstream.quant.formats.rounding import SCALE_FLOOR, Rounding, row_amax, search_scales

LOW, HIGH = -8, 7
_HALF_RANGE = 7.5
_SHRINK = (1.0, 0.85, 0.72, 0.6, 0.48, 0.36)


def encode_per_channel(
    weight_OI: Tensor, rounding: Rounding, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return packed codes [O, I / 2] and scales [O] in the dtype they will be stored in."""
    codes, scale_O1 = encode_grouped(weight_OI, weight_OI.shape[1], scale_dtype, rounding)
    return codes, scale_O1.view(-1)


def encode_grouped(
    weight_OI: Tensor, group_size: int, scale_dtype: torch.dtype, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Return packed codes [O, I / 2] and scales [O, I / group_size] in the dtype they will be stored in."""
    groups = weight_OI.reshape(-1, group_size)
    # Codes are rounded against the scale a reader will see, so rounding the scale costs nothing but its own error.
    scale = _scales(groups, rounding).to(scale_dtype)
    scale = torch.where(scale == 0, torch.finfo(scale_dtype).tiny, scale)
    codes = _round(groups, scale.float(), rounding).view(weight_OI.shape)
    return pack_nibbles(codes), scale.view(weight_OI.shape[0], -1)


def encode_two_scale(weight_OI: Tensor, amax: float, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, the float32 scale [] of the FP8 stage and the float32 scales [O] of the INT4 stage.

    Quark rounds to FP8 first and to INT4 after; the better way rounds once, to what the two scales multiply to.
    """
    if rounding == "quark":
        stage_OI, scale = fp8.encode_per_tensor(weight_OI, amax, rounding)
        rows_OI = stage_OI.float()
        scale_2_O = (row_amax(rows_OI) / _HALF_RANGE).clamp(min=SCALE_FLOOR)
        return pack_nibbles(_round(rows_OI, scale_2_O, rounding)), scale, scale_2_O
    scale = fp8.per_tensor_scale(amax)
    scale_2_O = (search_scales(weight_OI, LOW, HIGH, _SHRINK) / scale).clamp(min=SCALE_FLOOR)
    return pack_nibbles(_round(weight_OI, scale_2_O * scale, rounding)), scale, scale_2_O


def decode(packed: Tensor, scale: Tensor) -> Tensor:
    """Return float32 weights; `scale` is [O] or [O, groups]."""
    codes_OI = unpack_signed(packed).float()
    if scale.ndim == 1:
        return codes_OI * scale.float()[:, None]
    group_size = codes_OI.shape[-1] // scale.shape[-1]
    return codes_OI * fp8.spread_groups(scale.float(), group_size, codes_OI.shape[-1])


def _scales(weight_OI: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "quark":
        # Evaluated in the weight's dtype, over half of the code range: 7.5, not 7 or 8.
        return (row_amax(weight_OI) / _HALF_RANGE).clamp(min=SCALE_FLOOR).float()
    return search_scales(weight_OI, LOW, HIGH, _SHRINK)


def _round(weight_OI: Tensor, scale_O: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "quark":
        codes_OI = weight_OI.float() * (1.0 / scale_O)[:, None]
    else:
        codes_OI = torch.div(weight_OI, scale_O[:, None])
    return codes_OI.round_().clamp_(LOW, HIGH).to(torch.int8)
