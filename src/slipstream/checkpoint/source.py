"""What every checkpoint offers, whatever its file format: named tensors, read one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as stored: `dtype` in the file format's own spelling (F32, BF16, F8_E4M3, Q4_1, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int

    @property
    def num_elements(self) -> int:
        """The number of values, which for a packed format is not the number of stored elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class TensorSource(Protocol):
    """A checkpoint opened for reading; nothing is read before it is asked for."""

    @property
    def folder(self) -> Path:
        """The folder the checkpoint lies in (for messages, and for the tokenizer beside it)."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json, or its equivalent: foreign JSON, hence Any."""
        ...

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Describe one tensor without reading its data."""
        ...

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """Read one tensor whole."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded) of one tensor, on the CPU."""
        ...

    def part(self, name: str, window: Window) -> Tensor:
        """Read a part of one tensor, a span for each dimension, on the CPU; the rest of it is not read."""
        ...


def check_rows(info: TensorInfo, start: int, stop: int) -> None:
    """Raise CheckpointError unless rows `start` to `stop` exist in the tensor."""
    if not info.shape or not 0 <= start <= stop <= info.shape[0]:
        raise CheckpointError(
            f"{info.file}: rows {start} to {stop} were asked of tensor {info.name!r}, "
            f"whose shape is {list(info.shape)}."
        )


def check_window(info: TensorInfo, window: Window) -> None:
    """Raise CheckpointError unless the window was cut from a tensor of this shape."""
    if tuple(span.total for span in window) != info.shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, where {[span.total for span in window]} "
            "was to be split over ranks."
        )
