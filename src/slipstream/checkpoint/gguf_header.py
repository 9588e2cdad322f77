"""Parse a GGUF file's header: the metadata and where each tensor lies.

The `gguf` package's own reader makes a NumPy array of every string, seconds for a vocabulary; this takes a tenth of
that. Block layouts and dequantisation stay with the package.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from slipstream.checkpoint.files import check_regular, short, shown
from slipstream.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type -> struct code: u8 i8 u16 i16 u32 i32 f32 bool, then u64 i64 f64.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_VALUES = 1 << 23  # a vocabulary takes one for each token, merge, score and type
_MAX_TENSORS = 1 << 20
_MAX_STRING_BYTES = 1 << 26
_MAX_ALIGNMENT = 1 << 20
_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored: `shape` has rows first; `data` maps the file, as bytes where the type is packed."""

    name: str
    shape: tuple[int, ...]
    quant_type: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[Any]]

    @property
    def nbytes(self) -> int:
        """What it takes in the file."""
        return self.data.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata (foreign values, hence Any) and its tensors by GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Map a GGUF file and parse its header; a damaged file is a CheckpointError."""
    check_regular(path)
    try:
        content = np.memmap(path, mode="r", dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    try:
        return _parse(_Cursor(content), content, path)
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: is truncated or not a GGUF file ({type(error).__name__}: {short(str(error))}); fetch the file "
            "again."
        ) from error


class _Cursor:
    """A place in the file that moves as values are read."""

    def __init__(self, content: np.ndarray[Any, Any]) -> None:
        self._view: memoryview = content.data
        self.position = 0
        self._values_left = _MAX_VALUES

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._view, self.position)
        self.position += layout.size
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a string claims {length} bytes")
        raw = self._view[self.position : self.position + length]
        if len(raw) != length:
            raise ValueError("a string runs past the end")
        self.position += length
        return str(raw, "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:  # whatever type the file gives it
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_CODES[kind])[0]
        item_kind, length = (*self.take("I"), *self.take("Q"))
        self._values_left -= length
        if self._values_left < 0 or depth == _MAX_DEPTH:
            raise ValueError(f"its metadata holds more than {_MAX_VALUES} values, or arrays in arrays")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind, depth + 1) for _ in range(length)]
        return list(self.take(_CODES[item_kind], length))


def _parse(cursor: _Cursor, content: np.ndarray[Any, Any], path: Path) -> GgufHeader:
    if bytes(content[:4]) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.position = 4
    (version,) = cursor.take("I")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: is GGUF version {version}; slipstream reads versions 2 and 3 (little-endian).")
    num_tensors, num_values = cursor.take("Q", 2)
    if num_tensors > _MAX_TENSORS or num_values > _MAX_TENSORS:
        raise ValueError(f"it claims {num_tensors} tensors and {num_values} metadata values")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.take("I"))
    places = []
    for _ in range(num_tensors):
        name = cursor.string()
        (num_dims,) = cursor.take("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {short(name)!r} has {num_dims} dimensions")
        dims = cursor.take("Q", num_dims)
        kind, offset = (*cursor.take("I"), *cursor.take("Q"))
        places.append((name, dims, kind, offset))
    if len({name for name, *_ in places}) != len(places):
        raise ValueError("two tensors have one name")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {shown(alignment)}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(content, name, dims, kind, start + offset) for name, dims, kind, offset in places}
    return GgufHeader(metadata, tensors)


def _tensor(content: np.ndarray[Any, Any], name: str, dims: tuple[int, ...], kind: int, first: int) -> GgufTensor:
    quant_type = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[quant_type]
    shape = tuple(reversed(dims))
    row = shape[-1] if shape else 1
    if row % block:
        raise ValueError(f"tensor {short(name)!r} has rows of {row}, no multiple of its block of {block}")
    stored_shape = (*shape[:-1], row // block * block_bytes)
    nbytes = math.prod(stored_shape)
    data = content[first : first + nbytes]
    if data.size != nbytes:
        raise ValueError(f"tensor {short(name)!r} runs past the end")
    plain = _PLAIN.get(quant_type)
    data = data.reshape(stored_shape) if plain is None else data.view(plain).reshape(shape)
    return GgufTensor(name, shape, quant_type, data)
