"""One file of tensors: a safetensors file read through its header, or a PyTorch pickle."""

import math
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.checkpoint.files import check_regular, open_regular, parse_json, short, shown
from slipstream.checkpoint.pickles import PickleShard
from slipstream.checkpoint.source import TensorInfo, check_rows, check_window
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit safetensors itself sets
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 1 << 48
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
    "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class Shard(Protocol):
    """A file of tensors; `infos` costs a header, a tensor costs only itself."""

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor of the file by name."""
        ...

    def tensor(self, name: str, device: str) -> Tensor:
        """Read one tensor whole."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some leading-dimension rows of one tensor."""
        ...

    def part(self, name: str, window: Window) -> Tensor:
        """Read a part of one tensor."""
        ...


class SafetensorsShard:
    """A safetensors file, checked when opened: header, offsets and file size must agree."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.infos = _read_header(path)
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")  # its stub is untyped
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: safetensors cannot open it ({error}); fetch the file again.") from error

    def tensor(self, name: str, device: str) -> Tensor:
        """Read one tensor whole; on the CPU it maps the file rather than copying it."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read ({error}).") from error
        return tensor.to(device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded) only."""
        check_rows(self.infos[name], start, stop)
        try:
            tensor: Tensor = self._file.get_slice(name)[start:stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read ({error}).") from error
        return tensor

    def part(self, name: str, window: Window) -> Tensor:
        """Read the window only; one that leaves nothing out is the tensor itself."""
        check_window(self.infos[name], window)
        if all(span.is_whole for span in window):
            return self.tensor(name, "cpu")
        try:
            tensor: Tensor = self._file.get_slice(name)[tuple(slice(span.start, span.stop) for span in window)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read ({error}).") from error
        return tensor


def open_shard(path: Path) -> Shard:
    """Open one file of tensors by its suffix."""
    return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = check_regular(path)
    with open_regular(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise CheckpointError(
                f"{path}: is truncated or not a safetensors file ({size} bytes, and its header claims "
                f"{length}); fetch the file again."
            )
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    if not isinstance(header, dict):
        raise _corrupt(path, "it is no JSON object")
    header.pop("__metadata__", None)
    infos = {name: _describe(path, name, entry) for name, entry in header.items()}
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise CheckpointError(
            f"{path}: is {size} bytes where its header promises {expected}: "
            f"{'truncated' if size < expected else 'damaged'}; fetch the file again."
        )
    return infos


def _describe(path: Path, name: str, entry: Any) -> TensorInfo:  # foreign JSON
    """Return one tensor of a header whose numbers can be trusted: whole, and of the bytes its shape takes."""
    fields = entry if isinstance(entry, dict) else {}
    offsets, shape, dtype = (
        _whole_numbers(fields.get("data_offsets")),
        _whole_numbers(fields.get("shape")),
        fields.get("dtype"),
    )
    if offsets is None or shape is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"it describes tensor {short(name)!r} wrongly")
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    nbytes = offsets[1] - offsets[0]
    if bits is None:
        raise _corrupt(path, f"tensor {short(name)!r} has dtype {shown(dtype)}, which safetensors does not know")
    if math.prod(max(length, 1) for length in shape) > _MOST_ELEMENTS or math.prod(shape) * bits != nbytes * 8:
        raise _corrupt(
            path, f"tensor {short(name)!r} has shape {shown(list(shape))} and {nbytes} bytes, which do not agree"
        )
    return TensorInfo(name, shape, str(dtype), path, nbytes)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:  # foreign JSON
    """Return a short list of whole numbers that a file can hold; None if it is anything else."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number <= _MOST_ELEMENTS for number in value) else None


def _corrupt(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: its safetensors header is corrupt ({problem}); fetch the file again.")
