"""How the packed weight of one linear layer lies in a file: the tensors beside its name, and the way there and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.quant.packed import PackedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stored:
    """One tensor of a layer.

    Args:
        dtypes: the first is what slipstream writes, all are read.
        rows_axis: the dimension along which the weight's rows lie; None if the tensor belongs to the whole weight.
        rows_per_entry: how many of the weight's rows one entry along that dimension holds.
        required: whether a reader can do without.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    rows_axis: int | None = 0
    rows_per_entry: int = 1
    required: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes it takes as slipstream writes it."""
        return torch.Size(self.shape).numel() * self.dtypes[0].itemsize

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a stored shape is this one; writers differ in dimensions of one ([], [1], [N], [N, 1])."""
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


@dataclass(frozen=True)
class Layout:
    """The stored form of one packed format in one dialect; suffixes follow the layer's name and a dot.

    Args:
        tensors: from (out_features, in_features) to the tensors by suffix.
        store: from a packed weight, or some of its rows, to tensors by suffix.
        pack: from tensors by suffix and (out_features, in_features) back.
        row_multiple: what the number of rows must be a multiple of.
        column_multiple: what the number of columns must be a multiple of.
    """

    format: str
    tensors: Callable[[int, int], dict[str, Stored]]
    store: Callable[[PackedWeight], dict[str, Tensor]]
    pack: Callable[[Mapping[str, Tensor], int, int], PackedWeight]
    row_multiple: int = 1
    column_multiple: int = 1

    def check(self, module: str, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> None:
        """Raise CheckpointError unless the tensors have the dtypes and sizes of this layout."""
        if out_features % self.row_multiple or in_features % self.column_multiple:
            raise CheckpointError(
                f"the weight is {out_features} x {in_features}; {self.format} as config.json describes it has rows in "
                f"multiples of {self.row_multiple} and columns in multiples of {self.column_multiple}."
            )
        for suffix, stored in self.tensors(out_features, in_features).items():
            tensor = tensors.get(suffix)
            if tensor is None:
                if stored.required:
                    raise CheckpointError(
                        f"{module}.{suffix} is missing, though config.json says the layer is quantized."
                    )
                continue
            if tensor.dtype not in stored.dtypes or not stored.fits(tuple(tensor.shape)):
                raise CheckpointError(
                    f"{module}.{suffix} is {_name(tensor.dtype)} {list(tensor.shape)}; the layer's {self.format} "
                    f"weight needs {' or '.join(map(_name, stored.dtypes))} {list(stored.shape)}."
                )
            if tensor.dtype in FLOATS and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{module}.{suffix} holds NaN or infinite values; the file is damaged.")


def refuse_zero_points(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a symmetric format carries zero points that are not zero."""
    zero_point = tensors.get("weight_zero_point")
    if zero_point is not None and bool(zero_point.any()):
        raise CheckpointError(
            "weight_zero_point holds values other than zero, but config.json calls the weight symmetric; "
            "slipstream reads symmetric INT4 and INT8 only."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
