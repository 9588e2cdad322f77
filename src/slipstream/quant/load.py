"""From a quantized checkpoint to packed weights: which layers are quantized, in what form, whoever wrote them.

The files decide which layers are quantized (a layer with scales is), not the exclude lists, whose names are often
those of some engine; config.json decides how.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.checkpoint.fields import Fields, config_file, quantization_config
from slipstream.checkpoint.files import shown
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.span import Span, Window
from slipstream.errors import CheckpointError
from slipstream.quant import compressed, quark
from slipstream.quant.cut import stored_windows
from slipstream.quant.formats.fp8 import BLOCK
from slipstream.quant.fp8_blocks import fp8_blocks
from slipstream.quant.layout import Layout, Stored
from slipstream.quant.packed import PackedWeight
from slipstream.quant.patterns import matched
from slipstream.quant.quark_layout import quark_layout
from slipstream.quant.word_columns import awq_layout, gptq_layout

_log = logging.getLogger(__name__)
# What no layer has unless it is quantized.
_MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
_LAST_MISLABELLED = (0, 13)


class QuantScheme:
    """The stored form of every quantized layer of one checkpoint; modules go by their names in the files."""

    def __init__(self, layouts: Mapping[str, Layout], tensor_names: frozenset[str], source: Path) -> None:
        self._layouts = layouts
        self._names = tensor_names
        self._source = source

    @property
    def modules(self) -> list[str]:
        """The quantized modules."""
        return sorted(self._layouts)

    def is_quantized(self, module: str) -> bool:
        """Tell whether a module's weight is stored packed."""
        return module in self._layouts

    def tensors_for(self, module: str, out_features: int, in_features: int) -> dict[str, Stored]:
        """Return what is stored of a quantized module, by suffix; optional tensors only if the file has them."""
        stored = self._layouts[module].tensors(out_features, in_features)
        return {suffix: form for suffix, form in stored.items() if form.required or f"{module}.{suffix}" in self._names}

    def windows(self, module: str, rows: Span, columns: Span, shapes: dict[str, tuple[int, ...]]) -> dict[str, Window]:
        """Return which part of each stored tensor, by suffix, some rows and columns of a quantized module are."""
        return stored_windows(self._layouts[module], module, rows, columns, shapes)

    def pack(self, module: str, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> PackedWeight:
        """Turn a module's tensors, by suffix, into its packed weight; pack orders are made one here."""
        layout = self._layouts[module]
        try:
            layout.check(module, tensors, out_features, in_features)
            stored = layout.tensors(out_features, in_features)
            # Writers differ in dimensions of one; the layouts read them as they write them.
            shaped = {suffix: tensor.reshape(stored[suffix].shape) for suffix, tensor in tensors.items()}
            return layout.pack(shaped, out_features, in_features)
        except CheckpointError as error:
            raise CheckpointError(f"{self._source}: {module}: {error}") from error


def read_scheme(config: Mapping[str, Any], tensor_names: Iterable[str], source: Path) -> QuantScheme | None:
    """Read how a checkpoint is quantized from its config.json and the names of its tensors; None if it is not."""
    quantization = quantization_config(config)
    if quantization is None:
        return None
    names = frozenset(tensor_names)
    modules = sorted({name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _MARKS})
    there = {name: value for name, value in quantization.items() if value != []}  # an empty list says as little as null
    _check_fields(Fields(there, config_file(source), "quantization_config."))
    method = there.get("quant_method")
    readers: dict[object, Callable[[_Described, str, frozenset[str], Path], Layout]] = {
        "quark": _quark_layer,
        "compressed-tensors": _compressed_layer,
        "fp8": _fp8_layer,
        "mxfp4": _mxfp4_layer,
        "awq": _awq_layer,
        "gptq": _gptq_layer,
    }
    if method not in readers:
        raise CheckpointError(
            f"{source}: quantization_config has quant_method {shown(method)}; slipstream reads "
            f"{', '.join(map(str, readers))}."
        )
    read = readers[method]
    described = _described(quantization, modules, source)
    layouts = {module: read(described, module, names, source) for module in modules}
    if not layouts:
        _log.warning("%s: config.json speaks of %s, but no layer is quantized; reading it as it is.", source, method)
    _note_repairs(quantization, layouts, names, source)
    return QuantScheme(layouts, names, source)


@dataclass(frozen=True)
class _Described:
    """A quantization_config, and which modules each of its patterns covers."""

    config: Mapping[str, Any]
    covered: Mapping[str, frozenset[str]]


def _described(quantization: Mapping[str, Any], modules: list[str], source: Path) -> _Described:
    layers = quantization.get("layer_quant_config") or {}
    groups = (quantization.get("config_groups") or {}).values()
    targets = [target for group in groups for target in group.get("targets") or () if target.startswith("re:")]
    patterns = list(dict.fromkeys([*layers, *targets]))
    return _Described(quantization, matched(patterns, modules, f"{config_file(source)}: quantization_config"))


def _check_fields(fields: Fields) -> None:
    """Raise CheckpointError if what the readers below look at is there with another type."""
    fields.text("quant_method", "")
    fields.nested("export").text("pack_method", "")
    if fields.has("weight_block_size") and len(fields.integers("weight_block_size")) != 2:
        raise fields.error(
            "weight_block_size", f"is {fields.values['weight_block_size']!r} where two numbers are needed."
        )
    layers = fields.nested("layer_quant_config")
    for layer in (fields.nested("global_quant_config"), *(layers.nested(name) for name in layers.values)):
        stages = layer.values.get("weight")
        for stage in stages if isinstance(stages, list) else [stages]:
            weight = Fields({"weight": stage}, layer.file, layer.name("")).nested("weight")
            weight.text("dtype", "")
            if weight.text("qscheme", "") == "per_group":
                weight.integer("group_size")
        if isinstance(layer.values.get("input_tensors"), Mapping):
            layer.nested("input_tensors").text("dtype", "")
    groups = fields.nested("config_groups")
    for group in (groups.nested(name) for name in groups.values):
        weights = group.nested("weights")
        weights.text("type", "")
        weights.integer("num_bits", 1)
        if weights.text("strategy", "") == "group":
            weights.integer("group_size")
        for target in group.texts("targets"):
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except (re.error, RecursionError, OverflowError) as error:
                raise group.error("targets", f"holds {target!r}, which is no valid expression: {error}.") from error


def packed_weight(
    checkpoint: TensorSource, scheme: QuantScheme, module: str, out_features: int, in_features: int
) -> PackedWeight | None:
    """Read one module's packed weight from a checkpoint; None if its weight is stored dense."""
    return packed_part(checkpoint, scheme, module, Span.whole(out_features), Span.whole(in_features))


def packed_part(
    checkpoint: TensorSource, scheme: QuantScheme, module: str, rows: Span, columns: Span
) -> PackedWeight | None:
    """Read some rows and columns of one module's packed weight, and no more; None if its weight is stored dense."""
    if not scheme.is_quantized(module):
        return None
    names = {suffix: f"{module}.{suffix}" for suffix in scheme.tensors_for(module, rows.total, columns.total)}
    if rows.is_whole and columns.is_whole:
        tensors = {suffix: checkpoint.tensor(name) for suffix, name in names.items()}
    else:
        shapes = {suffix: checkpoint.info(name).shape for suffix, name in names.items()}
        windows = scheme.windows(module, rows, columns, shapes)
        tensors = {suffix: checkpoint.part(name, windows[suffix]) for suffix, name in names.items()}
    return scheme.pack(module, tensors, rows.size, columns.size)


def _quark_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    quantization = described.config
    spec = quantization.get("global_quant_config")
    for pattern, layer_spec in (quantization.get("layer_quant_config") or {}).items():
        if module in described.covered[pattern]:
            spec = layer_spec
    if not isinstance(spec, dict):
        raise CheckpointError(f"{source}: quantization_config has no global_quant_config.")
    format, group_size = quark.layer_format(spec, str(source))
    file_to_file = _is_file_to_file(quantization, module, names)
    reorder = (quantization.get("export") or {}).get("pack_method", "reorder") == "reorder"
    if format != "int4_fp8":  # the one form Quark's file-to-file pass does interleave
        reorder = reorder and not file_to_file
    return quark_layout(format, group_size, reorder, file_to_file=file_to_file)


def _is_file_to_file(quantization: Mapping[str, Any], module: str, names: frozenset[str]) -> bool:
    """Tell whether INT4 words come from Quark's file-to-file pass: it writes no zero points, all else does."""
    numbers = re.findall(r"\d+", str(quantization.get("version", ""))[:20])[:2]
    version = tuple(int(number) for number in numbers)
    return f"{module}.weight_zero_point" not in names and version <= _LAST_MISLABELLED


def _note_repairs(
    quantization: Mapping[str, Any], layouts: Mapping[str, Layout], names: frozenset[str], source: Path
) -> None:
    if quantization.get("quant_method") != "quark":
        return
    packed = [
        module for module, layout in layouts.items() if layout.format in ("int4_per_channel", "int4_group", "w4a8")
    ]
    export = quantization.get("export") or {}
    repaired = [module for module in packed if _is_file_to_file(quantization, module, names)]
    if repaired and export.get("pack_method", "reorder") == "reorder":
        _log.warning(
            "%s: %d INT4 layers come from Quark %s's file-to-file pass, which packs in order but writes pack_method "
            "'reorder'; they are read in order.",
            source,
            len(repaired),
            quantization.get("version"),
        )


def _compressed_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    groups = list((described.config.get("config_groups") or {}).values())
    chosen = [group for group in groups if _targets(group, module, described.covered)] or groups[:1]
    if not chosen:
        raise CheckpointError(f"{source}: quantization_config has no config_groups.")
    return compressed.compressed_layout(*compressed.group_format(chosen[0], str(source)))


def _targets(group: Mapping[str, Any], module: str, covered: Mapping[str, frozenset[str]]) -> bool:
    for target in group.get("targets") or ():
        if target == "Linear" or target == module or module.endswith(f".{target}"):
            return True
        if module in covered.get(target, ()):
            return True
    return False


def _fp8_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    quantization = described.config
    block = quantization.get("weight_block_size")
    if block is None:
        return quark_layout("fp8_per_tensor", None, reorder=False)
    if list(block) != [BLOCK, BLOCK] or quantization.get("activation_scheme", "dynamic") != "dynamic":
        raise CheckpointError(
            f"{source}: quantization_config has weight_block_size {block} and activation_scheme "
            f"{quantization.get('activation_scheme')!r}; slipstream runs FP8 blocks of 128 x 128 with dynamic "
            f"activations."
        )
    return fp8_blocks("weight_scale_inv")


def _mxfp4_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    """As OpenAI publishes gpt-oss, its stacks of experts taken apart (`checkpoint/joined.py`)."""
    return quark_layout("mxfp4", None, reorder=False)


def _awq_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    return awq_layout(Fields(described.config, config_file(source), "quantization_config."))


def _gptq_layer(described: _Described, module: str, names: frozenset[str], source: Path) -> Layout:
    return gptq_layout(Fields(described.config, config_file(source), "quantization_config."))
