"""Safetensors files block by block: rows are read and written at their offsets, so no tensor is ever held whole."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from slipstream.checkpoint.reader import CheckpointReader
from slipstream.checkpoint.source import TensorInfo
from slipstream.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' names of dtypes."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_COPY_BYTES = 1 << 24
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in its file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file before it exists: its header, and where each tensor will lie."""

    header: bytes
    tensors: Mapping[str, Placed]
    nbytes: int


def plan_file(tensors: Mapping[str, tuple[tuple[int, ...], str, int]]) -> FilePlan:
    """Lay out a file from each tensor's shape, dtype name and bytes; wide dtypes come first, so all are aligned."""
    order = sorted(tensors, key=lambda name: (-_alignment(tensors[name][1]), name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype, nbytes = tensors[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = {}
    offset = len(header)
    for name in order:
        shape, dtype, nbytes = tensors[name]
        placed[name] = Placed(shape, dtype, offset, nbytes)
        offset += nbytes
    return FilePlan(header, placed, len(header) + end)


class BlockReader:
    """Rows of a checkpoint's tensors, read at their offsets; threads may share one. Use it in a `with` block.

    Pickled checkpoints have no offsets; theirs are mapped.
    """

    def __init__(self, checkpoint: CheckpointReader) -> None:
        self._checkpoint = checkpoint
        self._placed: dict[Path, dict[str, Placed]] = {}
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        for name in self._checkpoint.names():
            path = self._checkpoint.info(name).file
            if path.suffix == ".safetensors" and path not in self._placed:
                self._placed[path] = _placements(path)
                self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded) into fresh memory."""
        if info.file not in self._placed:
            return self._checkpoint.rows(info.name, start, stop)
        placed = self._placed[info.file][info.name]
        row_bytes = placed.nbytes // max(placed.shape[0], 1)
        buffer = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        self._fill(info, buffer, placed.offset + start * row_bytes)
        return buffer.view(DTYPES[placed.dtype]).view(stop - start, *placed.shape[1:])

    def copy(self, info: TensorInfo, target: "BlockWriter", start: int, stop: int) -> None:
        """Copy bytes `start` to `stop` of a tensor as they are; inside the kernel where the file system can."""
        if info.file not in self._placed:
            flat = self._checkpoint.tensor(info.name).reshape(-1).contiguous().view(torch.uint8)
            target.write_bytes(info.name, start, flat[start:stop].numpy().data)
            return
        placed = self._placed[info.file][info.name]
        target.copy_from(info.name, self._descriptors[info.file], placed.offset, start, stop)

    def _fill(self, info: TensorInfo, buffer: Tensor, offset: int) -> None:
        view = buffer.numpy().data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptors[info.file], [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{info.file}: ends inside tensor {info.name!r}; fetch the file again.")
            done += count


class BlockWriter:
    """A safetensors file written at offsets, in any order, by any thread. Use it in a `with` block."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self._path = path
        self._plan = plan
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._descriptor, self._plan.nbytes)
        self._write(memoryview(self._plan.header), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)  # it is about to be noted as done
        finally:
            os.close(self._descriptor)

    def write_rows(self, name: str, tensor: Tensor, start: int, axis: int = 0) -> None:
        """Write a block of a tensor that begins at `start` along `axis` (0, or 1 of a matrix)."""
        placed = self._plan.tensors[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if axis == 0:
            row_bytes = placed.nbytes // max(placed.shape[0], 1) if placed.shape else placed.nbytes
            self._write(data, placed.offset + start * row_bytes)
            return
        assert axis == 1 and len(placed.shape) == 2
        piece = len(data) // placed.shape[0]
        row_bytes = placed.nbytes // placed.shape[0]
        offset = placed.offset + start * (row_bytes // placed.shape[1])
        for row in range(placed.shape[0]):
            self._write(data[row * piece : (row + 1) * piece], offset + row * row_bytes)

    def write_bytes(self, name: str, start: int, data: memoryview) -> None:
        """Write bytes that begin at byte `start` of a tensor."""
        self._write(data, self._plan.tensors[name].offset + start)

    def copy_from(self, name: str, descriptor: int, offset: int, start: int, stop: int) -> None:
        """Copy bytes `start` to `stop` of a tensor that lies at `offset` of an open file."""
        target = self._plan.tensors[name].offset
        while start < stop:
            count = min(stop - start, _COPY_BYTES)
            try:
                copied = os.copy_file_range(descriptor, self._descriptor, count, offset + start, target + start)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                data = os.pread(descriptor, count, offset + start)
                self._write(memoryview(data), target + start)
                copied = len(data)
            if copied == 0:
                raise CheckpointError(f"The source of tensor {name!r} ends early; fetch the file again.")
            start += copied

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], offset + done)


def split_rows(num_rows: int, rows_per_block: int) -> Sequence[tuple[int, int]]:
    """Cut rows into blocks (start, stop)."""
    return [(start, min(start + rows_per_block, num_rows)) for start in range(0, num_rows, rows_per_block)]


def _placements(path: Path) -> dict[str, Placed]:
    """Return where each tensor lies; the reader has checked the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    placed = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        placed[name] = Placed(tuple(entry["shape"]), entry["dtype"], 8 + length + first, last - first)
    return placed


def _alignment(dtype: str) -> int:
    return DTYPES[dtype].itemsize if dtype in DTYPES else 1
