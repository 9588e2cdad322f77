"""What a pass did: the error of each layer under both roundings, the dtypes before and after, the bytes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.quant.scheme import Scheme, dequantize


@dataclass(frozen=True)
class ErrorSums:
    """Squared sums over some rows of one layer, in float64; they add up over blocks."""

    rows: int
    energy: float
    best: float
    quark: float

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        return ErrorSums(
            self.rows + other.rows,
            self.energy + other.energy,
            self.best + other.best,
            self.quark + other.quark,
        )

    @property
    def relative_best(self) -> float:
        """Relative mean squared error of the better rounding."""
        return self.best / self.energy if self.energy else 0.0

    @property
    def relative_quark(self) -> float:
        """Relative mean squared error of Quark's rounding."""
        return self.quark / self.energy if self.energy else 0.0


NO_ERRORS = ErrorSums(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer: its shape, and its error over `errors.rows` of its rows."""

    module: str
    rows: int
    columns: int
    errors: ErrorSums


@dataclass(frozen=True)
class DtypeCount:
    """How many tensors of a dtype there are, and their bytes."""

    dtype: str
    tensors: int
    nbytes: int


def measure(weight_OI: Tensor, scheme: Scheme, amax: float | None, scale_dtype: Any) -> ErrorSums:
    """Encode rows under both roundings and sum what each loses; `scale_dtype` as in `Scheme.encode`."""
    exact = weight_OI.double()
    best, quark = (
        float((dequantize(scheme.encode(weight_OI, rounding, amax, scale_dtype)).double() - exact).square().sum())
        for rounding in ("best", "quark")
    )
    return ErrorSums(weight_OI.shape[0], float(exact.square().sum()), best, quark)


def dtype_table(tensors: Iterable[tuple[str, int]]) -> list[DtypeCount]:
    """Count tensors by dtype from (dtype, bytes) pairs, most bytes first."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for dtype, size in tensors:
        counts[dtype] += 1
        nbytes[dtype] += size
    return [DtypeCount(dtype, counts[dtype], size) for dtype, size in nbytes.most_common()]


def errors_from_json(value: Mapping[str, Any]) -> ErrorSums:
    """Read sums written by `errors_to_json`."""
    return ErrorSums(int(value["rows"]), float(value["energy"]), float(value["best"]), float(value["quark"]))


def errors_to_json(errors: ErrorSums) -> dict[str, Any]:
    """Return sums as JSON."""
    return {"rows": errors.rows, "energy": errors.energy, "best": errors.best, "quark": errors.quark}
