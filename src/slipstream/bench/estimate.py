"""How long a sweep still takes, from the points it has measured."""

from collections.abc import Sequence

from slipstream.bench.plan import Point
from slipstream.records.point import PointKey


class TimeLeft:
    """Estimates a point's time from measured ones, the most alike first: same workload and concurrency, then
    same concurrency, then any, in proportion to the tokens they write. Starting servers counts with the point that did.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = {point.key: point for point in points}
        self._seconds: dict[PointKey, float] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers of the sweep."""
        return sum(_tokens(point) for point in self._points.values())

    def measured(self, key: PointKey, seconds: float) -> None:
        """Take in how long a point took."""
        self._seconds[key] = seconds

    def seconds(self) -> float | None:
        """Return how long the points not measured yet should take; None before the first."""
        if not self._seconds:
            return None
        return sum(self._of(point) for key, point in self._points.items() if key not in self._seconds)

    def _of(self, point: Point) -> float:
        key = point.key
        alike = [k for k in self._seconds if (k.workload, k.concurrency) == (key.workload, key.concurrency)]
        alike = alike or [k for k in self._seconds if k.concurrency == key.concurrency] or list(self._seconds)
        spent = sum(self._seconds[k] for k in alike)
        return spent * _tokens(point) / sum(_tokens(self._points[k]) for k in alike)


def in_words(seconds: float) -> str:
    """Return a time for a reader: seconds below two minutes, minutes below two hours, then hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tokens(point: Point) -> int:
    return point.load.num_requests * point.load.workload.output_tokens
