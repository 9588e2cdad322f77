"""MXFP4: E2M1 codes in blocks of 32 columns that share a power of two (E8M0), by arithmetic on the bits of floats.

E2M1 says 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. A value divided by its block's power of two keeps its mantissa, so
the division is a subtraction from the exponent bits and rounding to even is integer arithmetic: in 16 bits for
BF16 weights, which halves the bytes and doubles the lanes of the same code in 32 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.quant.formats.nibbles import pack_nibbles, unpack_unsigned
from slipstream.quant.formats.rounding import Rounding

BLOCK = 32
_BIAS = 127
_MAX_EXPONENT = 2  # of E2M1: 4 and 6 are 2^2 times 1 and 1.5
_SMALLEST_STORED = -126
_TINY = -100
_LIFT = 64
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class _Bits:
    """A float type of 8 exponent bits, seen as integers."""

    integer: torch.dtype
    mantissa: int

    @property
    def sign_shift(self) -> int:
        return self.mantissa + 8

    def of(self, value: float) -> int:
        """Return the bits of a value that this type holds exactly."""
        bits = torch.tensor(value, dtype=torch.float32).view(torch.int32).item()
        return int(bits) >> (23 - self.mantissa)


_BF16 = _Bits(torch.int16, 7)
_F32 = _Bits(torch.int32, 23)


def encode(weight_OI: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return packed codes [O, I / 2] and E8M0 scales, uint8 [O, I / 32]."""
    kind = _BF16 if weight_OI.dtype == torch.bfloat16 else _F32
    weight_OI = weight_OI if kind is _BF16 else weight_OI.float()
    weight_OGB = weight_OI.reshape(weight_OI.shape[0], -1, BLOCK)
    exponent_OG = _even_exponent(weight_OGB.view(kind.integer), kind)
    if rounding == "best":
        exponent_OG = _better_exponent(weight_OGB, exponent_OG).clamp(min=_SMALLEST_STORED)
    # Where its scale would be 2^-127, Quark rounds to it but stores 2^-126; so blocks of zeros store byte 1.
    stored_OG = (exponent_OG.clamp(min=_SMALLEST_STORED) + _BIAS).to(torch.uint8)
    tiny_OG = exponent_OG < _TINY
    if bool(tiny_OG.any()):
        # Subnormal numbers do not divide by subtraction, so blocks that could hold some are lifted first.
        weight_OGB = torch.where(tiny_OG[..., None], weight_OGB * 2.0**_LIFT, weight_OGB)
        exponent_OG = torch.where(tiny_OG, exponent_OG + _LIFT, exponent_OG)
    codes_OGB = _round_bits(weight_OGB.view(kind.integer), exponent_OG, kind)
    return pack_nibbles(codes_OGB.flatten(-2)), stored_OG


def decode(packed: Tensor, scale_OG: Tensor) -> Tensor:
    """Return float32 weights."""
    signed = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device)
    values_OI = signed[unpack_unsigned(packed).int()]
    power_OG1 = torch.exp2(scale_OG.float() - _BIAS)[..., None]
    return (values_OI.reshape(values_OI.shape[0], -1, BLOCK) * power_OG1).flatten(-2)


def requantize_rows(x_TD: Tensor) -> Tensor:
    """Return activations after a round trip through MXFP4, in float32, as a reader with FP4 inputs sees them."""
    return decode(*encode(x_TD.float(), "quark"))


def _even_exponent(bits_OGB: Tensor, kind: _Bits) -> Tensor:
    """Return the exponent Quark calls "even": the amax is rounded to one mantissa bit, up from 1.75."""
    amax_OG = (bits_OGB & ((1 << kind.sign_shift) - 1)).amax(-1).int()
    rounded_OG = (amax_OG + (1 << (kind.mantissa - 2))) >> kind.mantissa
    return (rounded_OG - _BIAS - _MAX_EXPONENT).clamp(-_BIAS, _BIAS)


def _better_exponent(weight_OGB: Tensor, exponent_OG: Tensor) -> Tensor:
    """Return the even exponent or, where that loses less in the square, the one below: finer steps, some clipping."""
    magnitude_OGB = torch.mul(weight_OGB, torch.exp2(-exponent_OG.float())[..., None]).abs_()
    finer_OG = _error(magnitude_OGB, 0.5) < _error(magnitude_OGB, 1.0)
    return exponent_OG - finer_OG.int()


def _error(magnitude_OGB: Tensor, factor: float) -> Tensor:
    """Return each block's squared error when its scale is `factor` times the even one, in units of the even one."""
    value = magnitude_OGB * (1.0 / factor)
    # Adding 2^22 times a value's power of two leaves one mantissa bit; below 1 the step stays 0.5.
    power = (value.view(torch.int32) & 0x7F800000).clamp_(min=_F32.of(1.0)).add_(22 << 23).view(torch.float32)
    rounded = torch.add(value, power).sub_(power).clamp_(max=_VALUES[-1])
    loss_OG = rounded.sub_(value).square_().sum(-1)
    return loss_OG * (factor * factor)


def _round_bits(bits_OGB: Tensor, exponent_OG: Tensor, kind: _Bits) -> Tensor:
    """Return codes 0 to 15 of values whose bits are given, divided by 2^exponent; ties go to even codes.

    A value that rounds to zero loses its sign, as in Quark.
    """
    half = 1 << (kind.mantissa - 2)
    sign_bit = kind.integer.itemsize * 8 - 1
    shift_OG1 = (exponent_OG << kind.mantissa).to(kind.integer)[..., None]
    value = (bits_OGB & ((1 << kind.sign_shift) - 1)).sub_(shift_OG1)
    # From 1 up: round to one mantissa bit, and count half binades; below 1 this gives at most code 2.
    odd = (value >> (kind.mantissa - 1)).bitwise_and_(1)
    high = odd.add_(value).add_(half - 1).bitwise_right_shift_(kind.mantissa - 1)
    one = 2 * _BIAS
    high.clamp_(one, one + 5).sub_(one)
    # Below 1: code 1 above 0.25, code 2 from 0.75. The sign bit of a difference is a comparison without a branch.
    above_quarter = (value - (kind.of(0.25) + 1)).bitwise_right_shift_(sign_bit)
    from_three_quarters = value.sub_(kind.of(0.75)).bitwise_right_shift_(sign_bit)
    codes = high.add_(above_quarter).add_(from_three_quarters).add_(2)
    nonzero = (-codes).bitwise_right_shift_(sign_bit)
    sign = (bits_OGB >> (kind.sign_shift - 3)).bitwise_and_(8).bitwise_and_(nonzero)
    return codes.bitwise_or_(sign)
