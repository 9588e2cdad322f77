"""Keys and values in FP8 (E4M3) with a power of two for each token and head.

A token's codes depend on that token alone, so they are the same whatever shares the pass, the page or the batch. What
codes stand for is exact in bfloat16, and a power of two commutes with rounding: kernels may multiply scores and weights
by it instead of keys and values, and get the bits that attention over the numbers themselves would give.
"""

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer

FP8 = torch.float8_e4m3fn
MOST_SCALE = 246
"""With a larger one 448 would be no number any more; what is beyond that, infinities too, is kept as the largest."""
_MOST = 448.0
_MOST_EXPONENT, _MOST_MANTISSA = 8, 0x600000  # 448 is 1.75 x 2^8


def kv_scales(rows_TGd: Tensor) -> Tensor:
    """Return the least powers of two with which the codes of each token and head stay within 448: uint8 [T, G]."""
    most_TG = rows_TGd.float().abs().amax(-1)
    bits_TG = most_TG.view(torch.int32)
    codes_TG = (bits_TG >> 23) - _MOST_EXPONENT + ((bits_TG & 0x7FFFFF) > _MOST_MANTISSA).int()
    return codes_TG.clamp(1, MOST_SCALE).to(torch.uint8)


def encode_kv(rows_TGd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of keys or values, FP8 [T, G, d], and their scales."""
    scales_TG = kv_scales(rows_TGd)
    scaled_TGd = rows_TGd.float() * _power(254 - scales_TG.int()).unsqueeze(-1)
    return scaled_TGd.clamp(-_MOST, _MOST).to(FP8), scales_TG


def decode_kv(codes_TGd: Tensor, scales_TG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes and scales stand for."""
    return (codes_TGd.float() * _power(scales_TG.int()).unsqueeze(-1)).to(dtype)


def write_kv_fp8(layer: KvLayer, keys_TGd: Tensor, values_TGd: Tensor, slots_T: Tensor) -> None:
    """Write keys and values into their slots; values that are a view of the keys are written with them."""
    assert layer.scales is not None, "FP8 has scales"
    key_scales_SG, value_scales_SG = layer.scales
    _write(layer.keys_SGd, key_scales_SG, keys_TGd, slots_T)
    if value_scales_SG is not key_scales_SG:
        _write(layer.values_SGd, value_scales_SG, values_TGd, slots_T)


def keys_and_values(layer: KvLayer, slots_K: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of some slots as numbers."""
    if layer.scales is None:
        return layer.keys_SGd[slots_K].to(dtype), layer.values_SGd[slots_K].to(dtype)
    found = []
    for codes_SGd, scales_SG in zip((layer.keys_SGd, layer.values_SGd), layer.scales, strict=True):
        codes_KGd = codes_SGd.view(torch.uint8)[slots_K].view(FP8)
        found.append(decode_kv(codes_KGd, scales_SG[slots_K], dtype))
    return found[0], found[1]


def _write(codes_SGd: Tensor, scales_SG: Tensor, rows_TGd: Tensor, slots_T: Tensor) -> None:
    codes_TGd, scales_TG = encode_kv(rows_TGd)
    codes_SGd.view(torch.uint8).index_copy_(0, slots_T, codes_TGd.view(torch.uint8))  # torch copies no FP8 by index
    scales_SG.index_copy_(0, slots_T, scales_TG)


def _power(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 127) of exponents from 1 to 254."""
    return (exponents << 23).view(torch.float32)
