"""Quark's dialect: the quantization_config its readers understand, written for a scheme and read back."""

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.quant.layout import Layout
from slipstream.quant.quark_layout import quark_layout
from slipstream.quant.scheme import Scheme
from slipstream.quant.select import Selection, reader_patterns

VERSION = "0.13"
_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
}
# Quark's own word for the nibble order; only its two-scale INT4 really is interleaved.
_REORDERED = frozenset({"int4_fp8"})


def write_layout(scheme: Scheme, model_dtype: torch.dtype) -> Layout:
    """Return the stored form slipstream writes a scheme in."""
    return quark_layout(scheme.format, scheme.group_size, scheme.format in _REORDERED, model_dtype)


def write_config(scheme: Scheme, selection: Selection) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint whose selected layers have been quantized."""
    weight, inputs = _specs(scheme)
    return {
        "global_quant_config": {
            "input_tensors": inputs,
            "output_tensors": None,
            "weight": weight,
            "bias": None,
            "target_device": None,
        },
        "exclude": reader_patterns(selection),
        "algo_config": None,
        "softmax_quant_spec": None,
        "quant_method": "quark",
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": VERSION,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "order" if _packs_in_order(scheme) else "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def layer_format(spec: Mapping[str, Any], source: str) -> tuple[str, int | None]:
    """Return the packed format and group size of one layer's config ({"weight": ..., "input_tensors": ...}).

    Raises CheckpointError for what slipstream cannot run; `source` names the file in the message.
    """
    weight, inputs = spec.get("weight"), spec.get("input_tensors")
    if isinstance(weight, list) and len(weight) == 1:
        weight = weight[0]
    if isinstance(weight, list):
        kinds = [(part.get("dtype"), part.get("qscheme")) for part in weight]
        if kinds == [("fp8_e4m3", "per_tensor"), ("int4", "per_channel")]:
            return "int4_fp8", None
        raise _unreadable(source, f"a weight of {len(weight)} stages {kinds}")
    if not isinstance(weight, dict):
        raise _unreadable(source, "no weight")
    kind = (weight.get("dtype"), weight.get("qscheme"))
    input_dtype = inputs.get("dtype") if isinstance(inputs, dict) else None
    if kind == ("int4", "per_group") and input_dtype is None and weight.get("symmetric") is not False:
        return "int4_group", int(weight["group_size"])
    if kind == ("fp4", "per_group") and weight.get("scale_format") == "e8m0" and weight.get("group_size") == 32:
        if input_dtype not in (None, "fp4"):
            raise _unreadable(source, f"MXFP4 weights with {input_dtype} activations")
        return ("mxfp4" if input_dtype is None else "mxfp4_act"), 32
    format = _FORMATS.get((*kind, input_dtype))
    if format is None or weight.get("symmetric") is False:
        raise _unreadable(source, f"{kind[0]} {kind[1]} weights with {input_dtype} activations")
    return format, None


# (weight dtype, weight qscheme, activation dtype) -> packed format
_FORMATS: dict[tuple[object, object, object], str] = {
    ("fp8_e4m3", "per_channel", "fp8_e4m3"): "fp8_per_channel",
    ("fp8_e4m3", "per_tensor", "fp8_e4m3"): "fp8_per_tensor",
    ("int8", "per_channel", "int8"): "w8a8_int8",
    ("int4", "per_channel", None): "int4_per_channel",
    ("int4", "per_channel", "int8"): "w4a8",
}


def _packs_in_order(scheme: Scheme) -> bool:
    return scheme.format in ("int4_per_channel", "int4_group", "w4a8")


def _unreadable(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: quantization_config describes {what}, which slipstream cannot run. It runs FP8 per channel and "
        f"per tensor, INT4 per channel and per group, INT8 and W4A8 with INT8 activations, INT4 over FP8, and MXFP4."
    )


def _specs(scheme: Scheme) -> tuple[Any, dict[str, Any] | None]:
    """Return Quark's description of the weight (a list where it has stages) and of the input."""
    if scheme.format in ("fp8_per_channel", "fp8_per_tensor"):
        qscheme = "per_channel" if scheme.format == "fp8_per_channel" else "per_tensor"
        return _spec("fp8_e4m3", qscheme=qscheme), _spec("fp8_e4m3", qscheme="per_channel", ch_axis=1, is_dynamic=True)
    if scheme.format == "w8a8_int8":
        return _spec("int8", qscheme="per_channel"), _spec("int8", qscheme="per_channel", ch_axis=1, is_dynamic=True)
    if scheme.format == "w4a8":
        return _spec("int4", qscheme="per_channel"), _spec("int8", qscheme="per_channel", ch_axis=1, is_dynamic=True)
    if scheme.format == "int4_per_channel":
        return _spec("int4", qscheme="per_channel"), None
    if scheme.format == "int4_group":
        return _spec("int4", qscheme="per_group", ch_axis=-1, group_size=scheme.group_size), None
    if scheme.format == "int4_fp8":
        stages = [_spec("fp8_e4m3", qscheme="per_tensor"), _spec("int4", qscheme="per_channel")]
        inputs = _spec("fp8_e4m3", qscheme="per_tensor", is_dynamic=True)
        for spec in (*stages, inputs):
            spec["scale_type"] = "float32"
        return stages, inputs
    assert scheme.format in ("mxfp4", "mxfp4_act"), scheme.format
    return _mx_spec(is_dynamic=False), _mx_spec(is_dynamic=True) if scheme.format == "mxfp4_act" else None


def _mx_spec(is_dynamic: bool) -> dict[str, Any]:
    spec = _spec("fp4", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=is_dynamic)
    spec.update(symmetric=None, scale_format="e8m0", scale_calculation_mode="even", observer_cls="PerBlockMXObserver")
    return spec


def _spec(
    dtype: str,
    qscheme: str,
    ch_axis: int | None = None,
    group_size: int | None = None,
    is_dynamic: bool = False,
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "is_dynamic": is_dynamic,
        "qscheme": qscheme,
        "ch_axis": 0 if qscheme == "per_channel" and ch_axis is None else ch_axis,
        "group_size": group_size,
        "block_size": None,
        "symmetric": True,
        "round_method": "half_even",
        "scale_type": "float",
        "zero_point_type": "int32",
        "scale_format": None,
        "scale_calculation_mode": None,
        "mx_element_dtype": None,
        "observer_cls": _OBSERVERS[qscheme],
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }
