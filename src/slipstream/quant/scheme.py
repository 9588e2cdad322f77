"""The schemes `slipstream quantize` offers: which number format, which scales, what becomes of activations."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.quant.formats import fp8, int4, int8, mxfp4
from slipstream.quant.formats.nibbles import unpack_unsigned
from slipstream.quant.formats.rounding import Rounding
from slipstream.quant.packed import PackedWeight


@dataclass(frozen=True)
class Scheme:
    """One way to store the weight of a linear layer, and to treat its input.

    Args:
        format: the packed format (`PackedWeight.format`) it gives.
        column_multiple: what the number of input columns must be a multiple of.
        needs_amax: whether rows cannot be encoded before the whole tensor's largest magnitude is known.
        group_size: columns that share a scale; None for one scale per row or per tensor.
    """

    name: str
    format: str
    summary: str
    column_multiple: int = 1
    needs_amax: bool = False
    group_size: int | None = None

    def encode(
        self, weight_OI: Tensor, rounding: Rounding, amax: float | None = None, scale_dtype: torch.dtype = torch.float32
    ) -> PackedWeight:
        """Encode a weight, or some of its rows (then `amax` is the whole tensor's).

        Args:
            scale_dtype: what INT4 scales will be stored as; codes are rounded against the rounded scale.
        """
        codes, scales = self._codes(weight_OI, rounding, amax, scale_dtype)
        return PackedWeight(self.format, weight_OI.shape[0], weight_OI.shape[1], codes, scales)

    def _codes(
        self, weight_OI: Tensor, rounding: Rounding, amax: float | None, scale_dtype: torch.dtype
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.needs_amax:
            assert amax is not None, f"{self.name} needs the tensor's largest magnitude"
            if self.format == "int4_fp8":
                codes, scale, scale_2 = int4.encode_two_scale(weight_OI, amax, rounding)
                return codes, {"scale": scale, "scale_2": scale_2}
            codes, scale = fp8.encode_per_tensor(weight_OI, amax, rounding)
        elif self.format == "fp8_per_channel":
            codes, scale = fp8.encode_per_channel(weight_OI, rounding)
        elif self.format == "w8a8_int8":
            codes, scale = int8.encode(weight_OI, rounding)
        elif self.format in ("mxfp4", "mxfp4_act"):
            codes, scale = mxfp4.encode(weight_OI, rounding)
        elif self.group_size is not None:
            codes, scale = int4.encode_grouped(weight_OI, self.group_size, scale_dtype, rounding)
        else:
            codes, scale = int4.encode_per_channel(weight_OI, rounding, scale_dtype)
        return codes, {"scale": scale}


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("ptpc_fp8", "fp8_per_channel", "FP8 E4M3 weights per channel, FP8 activations per token"),
        Scheme("fp8", "fp8_per_tensor", "FP8 E4M3 weights per tensor, FP8 activations per token", needs_amax=True),
        Scheme("int4", "int4_per_channel", "INT4 weights per channel or per group, activations as they are", 8),
        Scheme("w8a8_int8", "w8a8_int8", "INT8 weights per channel, INT8 activations per token"),
        Scheme("w4a8", "w4a8", "INT4 weights per channel, INT8 activations per token", 8),
        Scheme("int4_fp8", "int4_fp8", "INT4 weights behind an FP8 stage (two scales), FP8 activations", 8, True),
        Scheme("mxfp4", "mxfp4_act", "MXFP4 weights and activations, blocks of 32", 32, False, 32),
        Scheme("mxfp4_weight_only", "mxfp4", "MXFP4 weights, activations as they are", 32, False, 32),
    )
}


def scheme_named(name: str, group_size: int | None = None) -> Scheme:
    """Return a scheme by name; only `int4` takes a group size."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise ConfigError(f"There is no scheme {name!r}; there are {', '.join(SCHEMES)}.")
    if group_size is None:
        return scheme
    if name != "int4":
        raise ConfigError(f"Scheme {name!r} takes no group size; only 'int4' does.")
    if group_size < 8 or group_size % 8:
        raise ConfigError(f"A group of {group_size} columns cannot be packed; use a multiple of 8, such as 32 or 128.")
    return replace(scheme, format="int4_group", group_size=group_size, column_multiple=group_size)


def dequantize(packed: PackedWeight) -> Tensor:
    """Return the float32 weight [out, in] that a packed one stands for."""
    codes, scales = packed.codes, packed.scales
    if packed.format == "int4_fp8":
        return int4.decode(codes, by_row(scales["scale"], packed) * scales["scale_2"])
    if packed.format in ("mxfp4", "mxfp4_act"):
        return mxfp4.decode(codes, scales["scale"])
    if packed.format in ("int4_per_channel", "int4_group", "w4a8"):
        return int4.decode(codes, scales["scale"])
    if packed.format == "int4_zero":
        width = packed.in_features // scales["scale"].shape[1]
        scale_OI, zero_OI = (scales[name].repeat_interleave(width, dim=1) for name in ("scale", "zero"))
        return (unpack_unsigned(codes).float() - zero_OI) * scale_OI
    if packed.format == "w8a8_int8":
        return int8.decode(codes, by_row(scales["scale"], packed))
    if packed.format in ("fp8_per_channel", "fp8_per_tensor", "fp8_block"):
        return fp8.decode(codes, scales["scale"])
    raise ConfigError(f"There is no number format {packed.format!r} among those slipstream quantizes to.")


def by_row(scale: Tensor, packed: PackedWeight) -> Tensor:
    """Return a per-tensor or per-row scale as one value per row."""
    return scale.reshape(-1).expand(packed.out_features) if scale.numel() == 1 else scale
