"""One file of tensors: a safetensors file read through its header, or a PyTorch pickle read safely."""

import json
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.checkpoint.source import TensorInfo, check_rows, check_window
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit safetensors itself sets
_PICKLE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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


class PickleShard:
    """A PyTorch .bin file, unpickled with weights_only so that it cannot run code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = _load_pickle(path)
        self.infos = {name: self._describe(name, value) for name, value in self._tensors.items()}

    def _describe(self, name: str, value: Tensor) -> TensorInfo:
        dtype = _PICKLE_DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return TensorInfo(name, tuple(value.shape), dtype, self._path, value.numel() * value.element_size())

    def tensor(self, name: str, device: str) -> Tensor:
        """Return one tensor, mapped from the file where the pickle format allows it."""
        return self._tensors[name].detach().to(device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (excluded)."""
        check_rows(self.infos[name], start, stop)
        return self._tensors[name].detach()[start:stop]

    def part(self, name: str, window: Window) -> Tensor:
        """Return a window of a tensor; where the file is mapped, only that is read."""
        check_window(self.infos[name], window)
        return self._tensors[name].detach()[tuple(slice(span.start, span.stop) for span in window)]


def open_shard(path: Path) -> Shard:
    """Open one file of tensors by its suffix."""
    return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{path}: is truncated or not a safetensors file ({size} bytes, and its header claims "
                    f"{length}); fetch the file again."
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its safetensors header is corrupt; fetch the file again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its safetensors header is corrupt; fetch the file again.")
    header.pop("__metadata__", None)
    infos: dict[str, TensorInfo] = {}
    end = 0
    for name, entry in header.items():
        try:
            first, last = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(length) for length in entry["shape"])
            dtype = str(entry["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the safetensors header describes tensor {name!r} wrongly; fetch the file again."
            ) from error
        infos[name] = TensorInfo(name, shape, dtype, path, last - first)
        end = max(end, last)
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise CheckpointError(
            f"{path}: is {size} bytes where its header promises {expected}: "
            f"{'truncated' if size < expected else 'damaged'}; fetch the file again."
        )
    return infos


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        state = _unpickle(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and slipstream does not run code from a checkpoint. "
            f"Convert it to safetensors where you trust it."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: is truncated or no PyTorch weights file ({first_line}).") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: is not a flat table of named tensors; convert it to safetensors.")
    return {str(name): value for name, value in state.items()}


def _unpickle(path: Path) -> Any:  # whatever the file holds; checked by the caller
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # Files from before PyTorch 1.6 are not zip archives and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True)
