"""What a file-to-file pass will do: which layers, into which files, how many bytes; worked out from headers alone."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.checkpoint.reader import CheckpointReader
from slipstream.checkpoint.source import TensorInfo
from slipstream.checkpoint.stream import DTYPE_NAMES, DTYPES, FilePlan, plan_file
from slipstream.errors import CheckpointError, ConfigError
from slipstream.quant import compressed, quark
from slipstream.quant.formats.rounding import Rounding
from slipstream.quant.layout import Layout, Stored
from slipstream.quant.scheme import Scheme
from slipstream.quant.select import Selection, linear_modules, select

Dialect = Literal["quark", "compressed-tensors"]
DEFAULT_SHARD_BYTES = 4_000_000_000
_STACK = re.compile(r"\.experts\.\w+$")
_LAYOUTS: dict[str, Callable[[Scheme, torch.dtype], Layout]] = {
    "quark": quark.write_layout,
    "compressed-tensors": compressed.write_layout,
}
_CONFIGS: dict[str, Callable[[Scheme, Selection], dict[str, Any]]] = {
    "quark": quark.write_config,
    "compressed-tensors": compressed.write_config,
}


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a checkpoint.

    Args:
        exclude: names, globs and `re:` patterns of layers to keep; each must match a layer or an embedding or norm.
        include: the same, of layers to quantize though others leave them out.
        full_report: measure the error over every row rather than a sample.
        block_elements: weights taken at a time; memory and cache use follow it.
    """

    scheme: Scheme
    rounding: Rounding = "best"
    dialect: Dialect = "quark"
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    full_report: bool = False
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    block_elements: int = 1 << 18

    def __post_init__(self) -> None:
        if self.dialect not in _LAYOUTS:
            raise ConfigError(f"There is no dialect {self.dialect!r}; there are {', '.join(_LAYOUTS)}.")
        if self.rounding not in ("best", "quark"):
            raise ConfigError(f"There is no rounding {self.rounding!r}; it is 'best' or 'quark'.")
        if self.max_shard_bytes < 1 or self.block_elements < 1:
            raise ConfigError("max_shard_bytes and block_elements must be positive.")


@dataclass(frozen=True)
class Item:
    """One tensor of the source and what becomes of it; `stored` is empty where it is copied as it is."""

    info: TensorInfo
    module: str
    stored: Mapping[str, Stored]


@dataclass(frozen=True)
class ShardPlan:
    """One file to be written."""

    file_name: str
    items: tuple[Item, ...]
    layout: FilePlan


@dataclass(frozen=True)
class QuantizePlan:
    """A whole pass, ready to run."""

    checkpoint: CheckpointReader
    options: QuantizeOptions
    selection: Selection
    layout: Layout
    shards: tuple[ShardPlan, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes to be read."""
        return sum(item.info.nbytes for shard in self.shards for item in shard.items)

    @property
    def target_bytes(self) -> int:
        """Bytes of tensors to be written."""
        return sum(shard.layout.nbytes for shard in self.shards)

    def quantization_config(self) -> dict[str, Any]:
        """Return the block for config.json."""
        return _CONFIGS[self.options.dialect](self.options.scheme, self.selection)

    def fingerprint(self) -> str:
        """Return a hash of the source files, as they are now, and of everything that decides the bytes written."""
        files = sorted({item.info.file for shard in self.shards for item in shard.items})
        stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
        options = self.options
        settings = [options.scheme.name, options.scheme.group_size, options.rounding, options.dialect]
        headers = [shard.layout.header.hex() for shard in self.shards]
        reported = [options.full_report, options.block_elements]
        text = json.dumps([os.fspath(self.checkpoint.folder.resolve()), stats, settings, headers, reported])
        return hashlib.sha256(text.encode()).hexdigest()


def plan_quantize(source: Path, options: QuantizeOptions) -> QuantizePlan:
    """Open a checkpoint folder and plan its quantization; reads headers only, writes nothing."""
    checkpoint = CheckpointReader(source)
    if isinstance(checkpoint.config.get("quantization_config"), dict):
        method = checkpoint.config["quantization_config"].get("quant_method")
        raise CheckpointError(f"{source}: is already quantized ({method}); start from the checkpoint it was made from.")
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    modules = linear_modules({name: (info.shape, info.dtype) for name, info in infos.items()})
    _check_dtypes(infos, modules)
    others = {name.rpartition(".")[0] or name for name in infos} - set(modules)
    selection = select(modules, options.exclude, options.include, others)
    stacked = {name.rpartition(".")[0] for name, info in infos.items() if _STACK.search(name) and len(info.shape) == 3}
    selection = replace(selection, stacked=tuple(sorted(stacked)))
    layout = _LAYOUTS[options.dialect](options.scheme, _scale_dtype(infos, selection))
    chosen = frozenset(selection.quantized)
    items = [
        _item(info, info.name.rpartition(".")[0] in chosen, layout, options.scheme)
        for info in sorted(infos.values(), key=lambda info: (info.file, info.name))
    ]
    return QuantizePlan(checkpoint, options, selection, layout, _shards(items, options.max_shard_bytes))


def _check_dtypes(infos: Mapping[str, TensorInfo], modules: Sequence[str]) -> None:
    """Refuse a projection that is not stored as plain floats: it would be kept, and nobody told."""
    linear = set(modules)
    for info in infos.values():
        module = info.name.removesuffix(".weight")
        if module != info.name and module.endswith("_proj") and len(info.shape) == 2 and module not in linear:
            raise CheckpointError(
                f"{info.file}: {info.name} is stored as {info.dtype}, which is not quantized (F32, F16 and BF16 are). "
                "Start from the checkpoint as it was trained."
            )


def _scale_dtype(infos: Mapping[str, TensorInfo], selection: Selection) -> torch.dtype:
    """Return the dtype of the layers to be quantized, which readers give to group scales too."""
    return DTYPES[infos[f"{selection.quantized[0]}.weight"].dtype]


def _item(info: TensorInfo, quantized: bool, layout: Layout, scheme: Scheme) -> Item:
    module, _, parameter = info.name.rpartition(".")
    if parameter != "weight" or not quantized:
        return Item(info, module, {})
    rows, columns = info.shape
    if columns % scheme.column_multiple or rows % layout.row_multiple:
        raise CheckpointError(
            f"{info.file}: {info.name} is {rows} x {columns}; {scheme.name} needs columns in multiples of "
            f"{scheme.column_multiple} and rows in multiples of {layout.row_multiple}. Exclude {module!r}."
        )
    stored = {suffix: form for suffix, form in layout.tensors(rows, columns).items() if suffix != "input_scale"}
    return Item(info, module, stored)


def _shards(items: list[Item], max_bytes: int) -> tuple[ShardPlan, ...]:
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        nbytes = sum(nbytes for _, _, nbytes in _outputs(item).values())
        if groups[-1] and filled + nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += nbytes
    shards = []
    for i, group in enumerate(groups):
        name = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        outputs: dict[str, tuple[tuple[int, ...], str, int]] = {}
        for item in group:
            outputs.update(_outputs(item))
        shards.append(ShardPlan(name, tuple(group), plan_file(outputs)))
    return tuple(shards)


def _outputs(item: Item) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Return the shape, dtype name and bytes of each tensor an item becomes."""
    if not item.stored:
        return {item.info.name: (item.info.shape, item.info.dtype, item.info.nbytes)}
    return {
        f"{item.module}.{suffix}": (form.shape, DTYPE_NAMES[form.dtypes[0]], form.nbytes)
        for suffix, form in item.stored.items()
    }
