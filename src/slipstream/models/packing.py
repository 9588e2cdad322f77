"""Packed weights on their way from a checkpoint into a model: as a GGUF stores them, or as a quantizer wrote them."""

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.span import Span
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels import Ops
from slipstream.models.layers import Linear
from slipstream.quant.formats import int8
from slipstream.quant.gguf_blocks import BLOCK_FORMATS, BlockFormat, mxfp4_of_ggml
from slipstream.quant.load import QuantScheme, packed_part, read_scheme
from slipstream.quant.packed import PackedWeight

Shape = tuple[int, ...]
_FLOATS = ("F32", "F16", "BF16")
_MXFP4 = "mxfp4"
_log = logging.getLogger(__name__)


class PackedSource(Protocol):
    """Where packed weights come from; modules go by their names in the checkpoint."""

    def stored(self, module: str, shape: Shape) -> dict[str, Shape] | None:
        """Return the tensors that make up a module's packed weight, by suffix; None if it is stored dense."""
        ...

    def check_cut(self, module: str, rows: Span, columns: Span) -> None:
        """Raise ConfigError if those rows and columns of a packed weight begin or end inside a stored block."""
        ...

    def read(self, module: str, rows: Span, columns: Span) -> PackedWeight:
        """Return a module's packed weight, or the rows and columns of it that one rank holds."""
        ...


class GgufBlocks:
    """Weights in a GGUF's blocks, kept as stored where the kernels know the format."""

    def __init__(self, reader: GgufReader) -> None:
        self._reader = reader

    def stored(self, module: str, shape: Shape) -> dict[str, Shape] | None:
        """A block format is one tensor, whose shape a GGUF gives in weights."""
        return {"weight": shape} if self._format(module) in (*BLOCK_FORMATS, _MXFP4) else None

    def check_cut(self, module: str, rows: Span, columns: Span) -> None:
        """Blocks lie along rows, so any rows can be had, but columns by the block."""
        blocks = _blocks_of(self._format(module))
        if columns.start % blocks.columns or columns.stop % blocks.columns:
            raise ConfigError(
                f"{self._reader.path}: a rank's columns [{columns.start}, {columns.stop}) of {module} cut through a "
                f"block of {blocks.columns}. A named --dtype expands the blocks, which can then be cut anywhere."
            )

    def read(self, module: str, rows: Span, columns: Span) -> PackedWeight:
        """Copy the blocks out of the file."""
        self.check_cut(module, rows, columns)
        raw = self._reader.raw(f"{module}.weight")
        format = raw.quant_type.lower()
        blocks = _blocks_of(format)
        first, last = (blocks.row_bytes(index) for index in (columns.start, columns.stop))
        data = raw.data.reshape(rows.total, -1).view("uint8")[rows.start : rows.stop, first:last]
        stored = torch.from_numpy(data.copy())
        if format == _MXFP4:
            return mxfp4_of_ggml(stored, columns.size)
        return PackedWeight(format, rows.size, columns.size, stored)

    def _format(self, module: str) -> str:
        return self._reader.info(f"{module}.weight").dtype.lower()

    def say_expanded(self, tensors: Iterable[str], dtype: torch.dtype) -> None:
        """Say which of a model's weights are not kept as stored, and what that costs."""
        infos = [self._reader.info(name) for name in tensors]
        quantized = [info for info in infos if info.dtype not in _FLOATS]
        if quantized:
            _log.warning(
                "%s: %d tensors in %s are expanded to %s, %.0f MB instead of %.0f; slipstream keeps %s as stored, "
                "where all parts of a joined layer (q, k, v; gate, up) are among them.",
                self._reader.path,
                len(quantized),
                ", ".join(sorted({info.dtype for info in quantized})),
                str(dtype).removeprefix("torch."),
                sum(info.num_elements for info in quantized) * dtype.itemsize / 1e6,
                sum(info.nbytes for info in quantized) / 1e6,
                ", ".join(format.upper() for format in BLOCK_FORMATS),
            )


def _blocks_of(format: str) -> BlockFormat:
    return BlockFormat(32, 17) if format == _MXFP4 else BLOCK_FORMATS[format]


class QuantizedFolder:
    """Weights that Quark, compressed-tensors or slipstream quantized."""

    def __init__(self, source: TensorSource, scheme: QuantScheme) -> None:
        self._source = source
        self._scheme = scheme
        self._names = frozenset(source.names())

    def stored(self, module: str, shape: Shape) -> dict[str, Shape] | None:
        """Ask the scheme; where it leaves dimensions of one open, the file decides."""
        if not self._scheme.is_quantized(module):
            return None
        stored = {}
        for suffix, form in self._scheme.tensors_for(module, *shape).items():
            name = f"{module}.{suffix}"
            actual = self._source.info(name).shape if name in self._names else form.shape
            stored[suffix] = actual if form.fits(actual) else form.shape
        return stored

    def check_cut(self, module: str, rows: Span, columns: Span) -> None:
        """Work out the windows that would be read."""
        names = {suffix: f"{module}.{suffix}" for suffix in self._scheme.tensors_for(module, rows.total, columns.total)}
        shapes = {suffix: self._source.info(name).shape for suffix, name in names.items() if name in self._names}
        self._scheme.windows(module, rows, columns, shapes)

    def read(self, module: str, rows: Span, columns: Span) -> PackedWeight:
        """Read and normalise."""
        packed = packed_part(self._source, self._scheme, module, rows, columns)
        assert packed is not None, "only quantized modules are read"
        return packed


def packed_source(source: TensorSource, ops: Ops | None) -> PackedSource | None:
    """Return where a checkpoint's packed weights come from, if it has any that are to be kept packed.

    A GGUF's blocks are kept when there are kernels to read them, and expanded otherwise.
    """
    if isinstance(source, GgufReader):
        return None if ops is None else GgufBlocks(source)
    scheme = read_scheme(source.config, source.names(), source.folder)
    return None if scheme is None else QuantizedFolder(source, scheme)


def checkpoint_modules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the checkpoint's name of each module, by ours, given its tensors' names by ours."""
    return {ours.rpartition(".")[0]: theirs.rpartition(".")[0] for ours, theirs in names.items()}


def check_uniform(where: str, part: str, whole: bool) -> None:
    """Raise unless all parts of a joined layer are packed."""
    if not whole:
        raise CheckpointError(
            f"{where}: {part} belongs to layers that are joined (q, k, v; gate, up; the experts of a block), of which "
            "some are quantized and some are not; quantize or exclude all of them."
        )


def quantize_linears(model: nn.Module, ops: Ops, but: nn.Module | None = None) -> None:
    """Turn the dense linear layers of a model into INT8 with a scale per row, for the kernels at hand.

    Args:
        but: a layer the model shares with another, which stays as it is.
    """
    for module in model.modules():
        if module is not but and isinstance(module, Linear) and module.weight is not None and not module.stays_dense:
            codes, scale = int8.encode(module.weight.detach(), "best")
            module.pack(ops.prepare(PackedWeight("w8a8_int8", len(codes), module.in_features, codes, {"scale": scale})))
