"""A PyTorch .bin file: a pickle, which is a program, so it is looked through before torch reads it without code."""

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from slipstream.checkpoint.files import open_regular, short
from slipstream.checkpoint.source import TensorInfo, check_rows, check_window
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

_MAX_PICKLE_BYTES = 64 << 20
_MAX_SHARED_TUPLES = 40
"""How often a pickle may use a tuple again: tuples of the same tuples double in size with every level when hashed."""
_LEGACY_PICKLES = 5  # magic number, protocol, system, tensors, storages: what torch.save wrote before it wrote archives
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


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        _look_through(path)
        state = _unpickle(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and slipstream does not run code from a checkpoint. "
            f"Convert it to safetensors where you trust it."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle makes torch raise nearly anything
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: is truncated or no PyTorch weights file ({first_line}).") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: is not a flat table of named tensors; convert it to safetensors.")
    for name, value in state.items():
        if value.layout != torch.strided or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: tensor {short(str(name))!r} claims more values than are stored; convert it to safetensors."
            )
    return {str(name): value for name, value in state.items()}


def _look_through(path: Path) -> None:
    """Raise CheckpointError if the file would unfold into more than it holds: packed records, tuples of tuples."""
    with open_regular(path) as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _look_through_pickle(path, file)
            return
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{path}: holds packed records, which torch.save never writes.")
                if record.filename.endswith("data.pkl"):
                    with archive.open(record) as stream:
                        _look_through_pickle(path, stream)


def _look_through_pickle(path: Path, stream: IO[bytes]) -> None:
    tuples: set[object] = set()
    before, shared, num_kept = "", 0, 0
    for opcode, argument, position in pickletools.genops(stream):
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            if before.startswith("TUPLE"):
                tuples.add(num_kept if name == "MEMOIZE" else argument)
            num_kept += 1
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            shared += argument in tuples
        if name == "DUP" or shared > _MAX_SHARED_TUPLES or (position or 0) > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{path}: is no plain table of tensors; convert it to safetensors where you trust it."
            )
        before = name


def _unpickle(path: Path) -> Any:  # whatever the file holds; checked by the caller
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # Files from before PyTorch 1.6 are not zip archives and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True)
