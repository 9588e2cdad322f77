"""How far to draft: a token is drafted and checked if its chance of being kept is worth the time that takes.

The chance comes from the draft's own confidence, set right by what was kept before; the time from measured passes. A
node that costs c seconds pays if its chance p of being kept satisfies p >= c * (tokens a second now). Whatever is
decided here, the text is the same: the one rule chooses every token, and drafts only save passes.

Plain values in, plain values out: no clock and no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_EDGES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PRIOR_WEIGHT = 10.0
_MEMORY = 0.98  # of costs, per pass
_CALIBRATION_MEMORY = 0.998  # of what was kept, per pass
_LEARNING_PASSES = 12
_PROBE_EVERY = 64
_LEARNING_FLOORS = (math.log(0.1), math.log(0.4))  # rows must differ for their cost to show
_PROBE_FLOOR = math.log(0.05)
_MIN_VARIANCE = 0.05  # of rows, below which a slope would be noise


@dataclass(frozen=True)
class DraftedPass:
    """One round of drafting and checking, with nothing else in it (no prompt).

    Args:
        rows: nodes the target checked, roots included.
        levels: how many levels the draft ran over.
        draft_s: what proposing took.
        check_s: from the proposal to the target's verdict.
        cycle_s: the whole round.
        emitted: tokens it gave out.
        nodes: for each drafted node, its cumulative log-probability and whether it was kept.
    """

    num_requests: int
    rows: int
    levels: int
    draft_s: float
    check_s: float
    cycle_s: float
    emitted: int
    nodes: Sequence[tuple[float, bool]]


@dataclass
class _Costs:
    """Running sums for one range of batch sizes, old passes fading; `row_s` and `level_s` are what they tell."""

    passes: int = 0
    weight: float = 0.0
    rows: float = 0.0
    rows_squared: float = 0.0
    check_s: float = 0.0
    rows_check_s: float = 0.0
    draft_s: float = 0.0
    levels: float = 0.0
    cycle_s: float = 0.0
    emitted: float = 0.0
    row_s: float = field(default=0.0)

    def add(self, seen: DraftedPass) -> None:
        # A pass that lost its core for a while says nothing about rows.
        usual_s = self.check_s / self.weight if self.weight else seen.check_s
        check_s = min(seen.check_s, 2 * usual_s)
        cycle_s = min(seen.cycle_s, 2 * self.cycle_s / self.weight if self.weight else seen.cycle_s)
        for name, value in (
            ("weight", 1.0),
            ("rows", seen.rows),
            ("rows_squared", seen.rows**2),
            ("check_s", check_s),
            ("rows_check_s", seen.rows * check_s),
            ("draft_s", seen.draft_s),
            ("levels", seen.levels),
            ("cycle_s", cycle_s),
            ("emitted", seen.emitted),
        ):
            setattr(self, name, _MEMORY * getattr(self, name) + value)
        self.passes += 1
        variance = self.rows_squared / self.weight - (self.rows / self.weight) ** 2
        if variance > _MIN_VARIANCE:
            covariance = self.rows_check_s / self.weight - self.rows * self.check_s / self.weight**2
            self.row_s = max(covariance / variance, 0.0)

    def least_chance(self, num_requests: int) -> float:
        """Return the chance at which a node pays: its row, and its share of a level of the draft."""
        level_s = self.draft_s / self.levels if self.levels else 0.0
        return (self.row_s + level_s / num_requests) * self.emitted / self.cycle_s


class ChainController:
    """Learns costs by batch size and the worth of the draft's confidence, and says where chains end."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._offered = [0.0] * len(_EDGES)
        self._kept = [0.0] * len(_EDGES)

    def floor(self, num_requests: int) -> float:
        """Return the cumulative log-probability below which a node is not worth drafting and checking."""
        costs = self._costs.get(_size_class(num_requests))
        passes = 0 if costs is None else costs.passes
        if costs is None or passes < _LEARNING_PASSES:
            return _LEARNING_FLOORS[passes % 2]
        if passes % _PROBE_EVERY == 0:  # look again at what has not been tried for long
            return _PROBE_FLOOR
        least = costs.least_chance(num_requests)
        lowest = len(_EDGES)
        while lowest > 0 and self.chance(_EDGES[lowest - 1]) >= least:
            lowest -= 1
        if lowest == len(_EDGES):
            return math.inf
        return math.log(_EDGES[lowest]) if _EDGES[lowest] > 0 else -math.inf

    def chance(self, confidence: float) -> float:
        """Return how often nodes of about this confidence are kept.

        Where little was seen, the square root of the confidence: hopeful enough to be tried and then corrected.
        """
        index = _class_of(confidence)
        upper = _EDGES[index + 1] if index + 1 < len(_EDGES) else 1.0
        hope = math.sqrt((_EDGES[index] + upper) / 2)
        return (self._kept[index] + _PRIOR_WEIGHT * hope) / (self._offered[index] + _PRIOR_WEIGHT)

    def learn(self, nodes: Sequence[tuple[float, bool]]) -> None:
        """Take in drafted nodes: cumulative log-probability, and whether each was kept."""
        for index in range(len(_EDGES)):
            self._offered[index] *= _CALIBRATION_MEMORY
            self._kept[index] *= _CALIBRATION_MEMORY
        for score, kept in nodes:
            index = _class_of(math.exp(score))
            self._offered[index] += 1
            self._kept[index] += kept

    def record(self, seen: DraftedPass) -> None:
        """Take in a whole pass."""
        self.learn(seen.nodes)
        self._costs.setdefault(_size_class(seen.num_requests), _Costs()).add(seen)


def _class_of(confidence: float) -> int:
    return sum(confidence >= edge for edge in _EDGES[1:])


def _size_class(num_requests: int) -> int:
    """Batches of 1, 2, 3 to 4, 5 to 8, ... cost alike."""
    return (num_requests - 1).bit_length()
