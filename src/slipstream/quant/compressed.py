"""The compressed-tensors dialect: what llm-compressor writes, and Kimi-K2.5's official INT4 is stored in."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError
from slipstream.quant.formats.fp8 import BLOCK
from slipstream.quant.formats.nibbles import from_words, to_words, unpack_unsigned
from slipstream.quant.fp8_blocks import fp8_blocks
from slipstream.quant.layout import FLOATS, Layout, Stored
from slipstream.quant.packed import PackedWeight
from slipstream.quant.scheme import Scheme
from slipstream.quant.select import Selection, reader_patterns

_WORD = 8
_OFFSET = 0x88  # codes are stored plus 8: of a two's complement nibble this flips the top bit
_FILE_FORMATS = {
    "fp8_per_channel": "float-quantized",
    "fp8_per_tensor": "float-quantized",
    "w8a8_int8": "int-quantized",
    "int4_per_channel": "pack-quantized",
    "int4_group": "pack-quantized",
}


def write_layout(scheme: Scheme, model_dtype: torch.dtype) -> Layout:
    """Return the stored form slipstream writes a scheme in."""
    if scheme.format not in _FILE_FORMATS:
        raise ConfigError(
            f"Scheme {scheme.name!r} has no form in the compressed-tensors dialect; use --dialect quark, "
            f"or one of ptpc_fp8, fp8, w8a8_int8 and int4."
        )
    return compressed_layout(scheme.format, scheme.group_size, model_dtype)


def compressed_layout(format: str, group_size: int | None, scale_dtype: torch.dtype = torch.bfloat16) -> Layout:
    """Return the layout of a packed format; `scale_dtype` is what the scales of packed INT4 are written as."""
    if format in ("int4_per_channel", "int4_group", "int4_zero"):
        return _packed(format, group_size, scale_dtype)
    if format == "fp8_block":
        return fp8_blocks("weight_scale")
    code = torch.int8 if format == "w8a8_int8" else torch.float8_e4m3fn
    per_tensor = format == "fp8_per_tensor"

    def tensors(rows: int, columns: int) -> dict[str, Stored]:
        scale = Stored((1,), FLOATS, rows_axis=None) if per_tensor else Stored((rows, 1), FLOATS)
        return {
            "weight": Stored((rows, columns), (code,)),
            "weight_scale": scale,
            "input_scale": Stored((1,), FLOATS, rows_axis=None, required=False),
        }

    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        scale = tensors["weight_scale"].float()
        scales = {"scale": scale.reshape(()) if per_tensor else scale.reshape(-1)}
        if "input_scale" in tensors:
            scales["input_scale"] = tensors["input_scale"].float().reshape(())
        return PackedWeight(format, rows, columns, tensors["weight"], scales)

    return Layout(
        format,
        tensors,
        lambda packed: {
            "weight": packed.codes,
            "weight_scale": packed.scales["scale"].reshape(1 if per_tensor else (-1, 1)),
        },
        pack,
    )


def write_config(scheme: Scheme, selection: Selection) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint whose selected layers have been quantized."""
    kind = "float" if scheme.format.startswith("fp8") else "int"
    num_bits = 4 if scheme.format.startswith("int4") else 8
    strategy = {"fp8_per_tensor": "tensor", "int4_group": "group"}.get(scheme.format, "channel")
    inputs = None if num_bits == 4 else _arguments(kind, 8, "token", dynamic=True)
    return {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _arguments(kind, num_bits, strategy, group_size=scheme.group_size),
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "format": _FILE_FORMATS[scheme.format],
        "global_compression_ratio": None,
        "ignore": reader_patterns(selection),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def group_format(group: Mapping[str, Any], source: str) -> tuple[str, int | None]:
    """Return the packed format and group size of one config group; raises CheckpointError for what cannot be run."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    if weights.get("symmetric", True):
        if kind == ("int", 4, "group") and inputs is None:
            return "int4_group", int(weights["group_size"])
        if kind == ("float", 8, "block") and inputs is not None and weights.get("block_structure") == [BLOCK, BLOCK]:
            return "fp8_block", None
        format = _READ.get((*kind, inputs is not None))
        if format is not None:
            return format, None
    elif kind[:2] == ("int", 4) and kind[2] in ("group", "channel") and inputs is None:
        return "int4_zero", int(weights["group_size"]) if kind[2] == "group" else None
    raise CheckpointError(
        f"{source}: quantization_config describes {kind[1]}-bit {kind[0]} weights by {kind[2]}"
        f"{'' if inputs is None else ' with quantized activations'}"
        f"{'' if weights.get('symmetric', True) else ' and zero points'}, which slipstream cannot run in this dialect. "
        f"It runs symmetric FP8 (by tensor, channel or {BLOCK} x {BLOCK}), symmetric INT8 with activations, and INT4 "
        "without."
    )


# (type, bits, strategy, whether activations are quantized) -> packed format
_READ: dict[tuple[object, object, object, bool], str] = {
    ("float", 8, "channel", True): "fp8_per_channel",
    ("float", 8, "tensor", True): "fp8_per_tensor",
    ("int", 8, "channel", True): "w8a8_int8",
    ("int", 4, "channel", False): "int4_per_channel",
}


def _packed(format: str, group_size: int | None, scale_dtype: torch.dtype) -> Layout:
    has_zeros = format == "int4_zero"

    def tensors(rows: int, columns: int) -> dict[str, Stored]:
        groups = columns // group_size if group_size else 1
        zeros = Stored((rows // _WORD, groups), (torch.int32,), rows_per_entry=_WORD)
        return {
            "weight_packed": Stored((rows, columns // _WORD), (torch.int32,)),
            "weight_scale": Stored((rows, groups), (scale_dtype, *FLOATS)),
            "weight_shape": Stored((2,), (torch.int64, torch.int32), rows_axis=None, required=False),
            **({"weight_zero_point": zeros} if has_zeros else {}),
        }

    def store(packed: PackedWeight) -> dict[str, Tensor]:
        assert not has_zeros, "no scheme writes zero points"
        return {
            "weight_packed": to_words(packed.codes ^ _OFFSET, reorder=False),
            "weight_scale": packed.scales["scale"].reshape(packed.out_features, -1).to(scale_dtype),
            "weight_shape": torch.tensor([packed.out_features, packed.in_features]),
        }

    def pack(tensors: Mapping[str, Tensor], rows: int, columns: int) -> PackedWeight:
        codes = from_words(tensors["weight_packed"], reorder=False)
        scale = tensors["weight_scale"].float()
        if has_zeros:  # packed along rows, and plus 8 like the codes
            # A copy, since one word for all rows counts as contiguous either way round, and keeps its strides.
            words = tensors["weight_zero_point"].t().clone(memory_format=torch.contiguous_format)
            zero = unpack_unsigned(from_words(words, reorder=False)).t()
            return PackedWeight(format, rows, columns, codes, {"scale": scale, "zero": zero.float().contiguous()})
        codes = codes ^ _OFFSET
        return PackedWeight(format, rows, columns, codes, {"scale": scale if group_size else scale.reshape(-1)})

    return Layout(format, tensors, store, pack, _WORD if has_zeros else 1, math.lcm(_WORD, group_size or 1))


def _arguments(
    kind: str, num_bits: int, strategy: str, group_size: int | None = None, dynamic: bool = False
) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": num_bits,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    }
