"""A linear layer's weight as it is stored: codes and scales in a number format, never expanded in memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedWeight:
    """Codes of a weight [out_features, in_features] and whatever turns them into numbers.

    Args:
        format: the name of the number format, a key of the tables in `slipstream.quant` and `slipstream.kernels`.
        codes: integer or float8 tensor whose first dimension is out_features.
        scales: further tensors the format needs, by its own names ("scale", "scale_2", "zero_point", ...); a tensor
            whose first dimension is out_features belongs to rows, a 0-d one to the whole weight.
    """

    format: str
    out_features: int
    in_features: int
    codes: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "PackedWeight":
        """Return the weight on another device."""
        scales = {name: scale.to(device) for name, scale in self.scales.items()}
        return replace(self, codes=self.codes.to(device), scales=scales)

    @property
    def runs(self) -> tuple["PackedWeight", ...]:
        """All rows have one format."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """Return the bytes this weight takes."""
        return self.codes.nbytes + sum(scale.nbytes for scale in self.scales.values())


@dataclass(frozen=True)
class MixedWeight:
    """Rows of several formats, run after run, as a GGUF may store the q, k and v that are joined into one layer."""

    runs: tuple[PackedWeight, ...]

    @property
    def format(self) -> str:
        """Name the formats."""
        return " and ".join(run.format for run in self.runs)

    @property
    def out_features(self) -> int:
        """Count the rows of all runs."""
        return sum(run.out_features for run in self.runs)

    @property
    def in_features(self) -> int:
        """Return the columns, which all runs share."""
        return self.runs[0].in_features

    @property
    def nbytes(self) -> int:
        """Return the bytes this weight takes."""
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True)
class ExpertWeights:
    """The same layer of E experts, as stored: a `PackedWeight` whose tensors have a leading expert dimension.

    Args:
        format: a `PackedWeight` format, or "dense": floating-point weights, their codes [E, out, in] and no scales.
        codes: [E, out_features, ...].
        scales: each [E, out_features, ...]; a scale of a whole weight is repeated for each of its rows.
        bias_EN: what is added to each expert's products, if anything.
    """

    format: str
    out_features: int
    in_features: int
    codes: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)
    bias_EN: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes these weights take."""
        return self.codes.nbytes + sum(scale.nbytes for scale in self.scales.values())

    def expert(self, index: int) -> PackedWeight:
        """Return one expert's weight, a view."""
        scales = {name: scale[index] for name, scale in self.scales.items()}
        return PackedWeight(self.format, self.out_features, self.in_features, self.codes[index], scales)


def join_rows(parts: list[PackedWeight]) -> PackedWeight:
    """Stack weights that share a format and an input, as q, k and v do; each keeps its own per-tensor scales by row."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.format == first.format and part.in_features == first.in_features for part in parts)
    scales = {}
    for name in first.scales:
        scales[name] = torch.cat([_by_row(part, part.scales[name]) for part in parts])
    return PackedWeight(
        first.format,
        sum(part.out_features for part in parts),
        first.in_features,
        torch.cat([part.codes for part in parts]),
        scales,
    )


def join_runs(parts: list[PackedWeight]) -> list[PackedWeight]:
    """Stack neighbours of one format among weights that share an input."""
    return [join_rows(list(run)) for _, run in groupby(parts, key=lambda part: part.format)]


def stack_experts(parts: Iterable[PackedWeight], count: int, device: torch.device) -> ExpertWeights:
    """Put the weights of `count` experts, taken one at a time, into tensors of all experts on a device."""
    stack: ExpertWeights | None = None
    for index, part in enumerate(parts):
        scales = {name: _by_row(part, scale) for name, scale in part.scales.items()}
        if stack is None:
            stack = ExpertWeights(
                part.format,
                part.out_features,
                part.in_features,
                torch.empty((count, *part.codes.shape), dtype=part.codes.dtype, device=device),
                {name: torch.empty((count, *s.shape), dtype=s.dtype, device=device) for name, s in scales.items()},
            )
        assert part.format == stack.format and scales.keys() == stack.scales.keys(), "experts differ in format"
        stack.codes[index].copy_(part.codes)
        for name, scale in scales.items():
            stack.scales[name][index].copy_(scale)
    assert stack is not None and index + 1 == count, "as many parts as experts"
    return stack


def reorder_rows(weight: PackedWeight, order: Tensor) -> PackedWeight:
    """Return a weight whose row i is row order[i] of this one."""
    scales = {
        name: scale[order] if scale.ndim and len(scale) == weight.out_features else scale
        for name, scale in weight.scales.items()
    }
    return replace(weight, codes=weight.codes[order], scales=scales)


def _by_row(part: PackedWeight, scale: Tensor) -> Tensor:
    """Give a per-tensor scale to each row, so that joined weights may differ in it."""
    return scale.reshape(1).expand(part.out_features) if scale.numel() == 1 else scale
