"""Products with quantized weights, each in its scheme's own arithmetic.

Activations that a scheme quantizes really are, per token, so a row's result never depends on the other rows of the
pass; integer products are exact sums of integers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.quant.formats import fp8, int8, mxfp4
from slipstream.quant.formats.nibbles import unpack_signed
from slipstream.quant.packed import PackedWeight
from slipstream.quant.scheme import by_row, dequantize

_EXACT = 1 << 24  # float32 holds every integer up to here


def _dequantized(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """Weight-only formats: the weight is expanded to float32, the input stays as it is."""
    return (x_TD.float() @ dequantize(weight).t()).to(x_TD.dtype)


def _fp8(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """FP8 inputs, per token or with a static scale, times FP8 codes; scales are applied to the sum."""
    if (static := weight.scales.get("input_scale")) is not None:
        scale = static.max()  # joined layers share one input, hence the widest of their scales
        codes_TD = (x_TD.float() / scale).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(fp8.E4M3)
        scale_T = scale.expand(x_TD.shape[:-1])
    else:
        codes_TD, scale_T = fp8.quantize_rows(x_TD)
    sum_TN = codes_TD.float() @ weight.codes.float().t()
    return (sum_TN * (scale_T[..., None] * by_row(weight.scales["scale"], weight))).to(x_TD.dtype)


def _fp8_block(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """FP8 inputs per token and 128 columns, times FP8 codes with a scale per row and 128 columns."""
    out_TN = x_TD.new_zeros((*x_TD.shape[:-1], weight.out_features), dtype=torch.float32)
    for group, start in enumerate(range(0, weight.in_features, fp8.BLOCK)):
        columns = slice(start, start + fp8.BLOCK)
        codes_TB, scale_T = fp8.quantize_rows(x_TD[..., columns])
        sum_TN = codes_TB.float() @ weight.codes[:, columns].float().t()
        out_TN += sum_TN * (scale_T[..., None] * weight.scales["scale"][:, group])
    return out_TN.to(x_TD.dtype)


def _int8_inputs(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """INT8 inputs per token times integer codes: y = sum * (input scale * weight scale), the sum exact."""
    codes_ND = weight.codes if weight.format == "w8a8_int8" else unpack_signed(weight.codes)
    codes_TD, scale_T = int8.quantize_rows(x_TD)
    sum_TN = integer_product(codes_TD, codes_ND)
    return (sum_TN * (scale_T[..., None] * by_row(weight.scales["scale"], weight))).to(x_TD.dtype)


def _int4_fp8(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """FP8 inputs per token times INT4 codes; both scales of the weight are applied to the sum."""
    codes_TD, scale_T = fp8.quantize_rows(x_TD)
    sum_TN = codes_TD.float() @ unpack_signed(weight.codes).float().t()
    scale_N = by_row(weight.scales["scale"], weight) * weight.scales["scale_2"]
    return (sum_TN * (scale_T[..., None] * scale_N)).to(x_TD.dtype)


def _mxfp4_inputs(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """Inputs rounded to MXFP4 as the weights are."""
    rows = x_TD.reshape(-1, x_TD.shape[-1])
    y = mxfp4.requantize_rows(rows) @ dequantize(weight).t()
    return y.view(*x_TD.shape[:-1], -1).to(x_TD.dtype)


def integer_product(codes_TD: Tensor, codes_ND: Tensor) -> Tensor:
    """Return codes_TD @ codes_ND.T as float32 integers, rounded at most once: when a sum exceeds 2^24.

    Columns are taken in stretches whose sums float32 holds exactly, and stretches are added in int32.
    """
    largest = 128 * 128
    stretch = max(_EXACT // largest, 1)
    sum_TN = torch.zeros((*codes_TD.shape[:-1], codes_ND.shape[0]), dtype=torch.int32, device=codes_TD.device)
    for start in range(0, codes_ND.shape[1], stretch):
        columns = slice(start, start + stretch)
        sum_TN += (codes_TD[..., columns].float() @ codes_ND[:, columns].float().t()).to(torch.int32)
    return sum_TN.float()


QUANTIZED_LINEARS: dict[str, Callable[[Tensor, PackedWeight], Tensor]] = {
    "fp8_per_channel": _fp8,
    "fp8_per_tensor": _fp8,
    "fp8_block": _fp8_block,
    "int4_per_channel": _dequantized,
    "int4_group": _dequantized,
    "w8a8_int8": _int8_inputs,
    "w4a8": _int8_inputs,
    "int4_fp8": _int4_fp8,
    "mxfp4": _dequantized,
    "mxfp4_act": _mxfp4_inputs,
}
"""x_TD and a weight to y_TN, by format."""
