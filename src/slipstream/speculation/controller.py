"""How far to draft: a token is drafted and checked if its chance of being kept is worth the time that takes.

The chance comes from the draft's own confidence, set right by what was kept before; the time from measured passes. A
node whose row costs c seconds pays if its chance p of being kept satisfies p >= c * (tokens a second). A level of the
draft pays if what was kept of it is worth its rows and its own time; if no level does, drafting rests and is tried
again after 64 passes, then after 128, up to 512. Whatever is decided here, the text is the same: the one rule chooses
every token, and drafts only save passes.

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
_PROBE_PASSES = 4
_LONGEST_REST = 512
_WORTH_IT = 0.01  # tokens more than a plain pass gives, as a share of those, below which drafting rests
_PLAIN_MEMORY = 0.95  # of what plain passes take, per plain pass
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
        nodes: for each checked node, its cumulative log-probability and whether it was kept.
        follow_s: what letting the draft follow took.
        by_level: for each level of the chains, how many nodes were checked and how many of them kept.
    """

    num_requests: int
    rows: int
    levels: int
    draft_s: float
    check_s: float
    cycle_s: float
    emitted: int
    nodes: Sequence[tuple[float, bool]]
    follow_s: float = 0.0
    by_level: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Reach:
    """How far to draft: chains of up to `depth` tokens, each of at least the cumulative log-probability `floor`.

    With a depth of 0 drafting rests; unless it `follows`, the draft need not be kept up with the text meanwhile.
    """

    depth: int
    floor: float
    follows: bool = True


_REST = Reach(0, math.inf)


@dataclass
class _Drafted:
    """Running sums over passes that drafted: by level, how many nodes were checked and how many of them kept."""

    weight: float = 0.0
    requests: float = 0.0
    drafted_rows: float = 0.0
    check_s: float = 0.0
    cycle_s: float = 0.0
    draft_s: float = 0.0
    levels: float = 0.0
    by_level: list[tuple[float, float]] = field(default_factory=list)

    @property
    def level_s(self) -> float:
        return self.draft_s / self.levels

    def add(self, seen: DraftedPass, check_s: float, cycle_s: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("requests", seen.num_requests),
            ("drafted_rows", seen.rows - seen.num_requests),
            ("check_s", check_s),
            ("cycle_s", cycle_s),
            ("draft_s", seen.draft_s),
            ("levels", seen.levels),
        ):
            setattr(self, name, _MEMORY * getattr(self, name) + value)
        self.by_level += [(0.0, 0.0)] * (len(seen.by_level) - len(self.by_level))
        for level, (checked, kept) in enumerate(self.by_level):
            new = seen.by_level[level] if level < len(seen.by_level) else (0, 0)
            self.by_level[level] = (_MEMORY * checked + new[0], _MEMORY * kept + new[1])


@dataclass
class _Plain:
    """Running means over passes without drafts, the draft's own time left out."""

    weight: float = 0.0
    requests: float = 0.0
    check_s: float = 0.0
    cycle_s: float = 0.0

    def add(self, num_requests: int, check_s: float, cycle_s: float) -> None:
        self.weight = _PLAIN_MEMORY * self.weight + 1
        for name, value in (("requests", num_requests), ("check_s", check_s), ("cycle_s", cycle_s)):
            before = getattr(self, name)
            setattr(self, name, before + (value - before) / self.weight)


@dataclass
class _Costs:
    """Running sums for one range of batch sizes, old passes fading; `row_s` is what they tell of a row."""

    passes: int = 0
    weight: float = 0.0
    rows: float = 0.0
    rows_squared: float = 0.0
    check_s: float = 0.0
    rows_check_s: float = 0.0
    cycle_s: float = 0.0
    emitted: float = 0.0
    row_s: float = 0.0
    plain: _Plain = field(default_factory=_Plain)
    drafted: _Drafted = field(default_factory=_Drafted)
    probe_from: int = _LEARNING_PASSES + _PROBE_EVERY
    probe_after: int = _PROBE_EVERY

    def add(self, seen: DraftedPass) -> None:
        check_s, cycle_s = self._usual(seen)
        for name, value in (
            ("weight", 1.0),
            ("rows", seen.rows),
            ("rows_squared", seen.rows**2),
            ("check_s", check_s),
            ("rows_check_s", seen.rows * check_s),
            ("cycle_s", cycle_s),
            ("emitted", seen.emitted),
        ):
            setattr(self, name, _MEMORY * getattr(self, name) + value)
        self.passes += 1
        if seen.levels:
            self.drafted.add(seen, check_s, cycle_s)
        else:
            self.plain.add(seen.num_requests, check_s, cycle_s - seen.follow_s)
        variance = self.rows_squared / self.weight - (self.rows / self.weight) ** 2
        if variance > _MIN_VARIANCE:
            covariance = self.rows_check_s / self.weight - self.rows * self.check_s / self.weight**2
            self.row_s = max(covariance / variance, 0.0)
        if self.passes >= self.probe_from + _PROBE_PASSES:  # rests that prove right last longer
            rests = self.drafted.weight > 0 and self.best_depth(len(self.drafted.by_level)) == 0
            self.probe_after = min(2 * self.probe_after, _LONGEST_REST) if rests else _PROBE_EVERY
            self.probe_from = self.passes + self.probe_after

    def _usual(self, seen: DraftedPass) -> tuple[float, float]:
        """Return what a pass took to check and as a whole; one that lost its core for a while says nothing of rows."""
        if not self.weight:
            return seen.check_s, seen.cycle_s
        more_s = self.row_s * (seen.rows - self.rows / self.weight)
        factor = 2.0 if self.passes < _LEARNING_PASSES else 1.5
        check_s = factor * max(self.check_s / self.weight + more_s, seen.rows * self.row_s)
        return min(seen.check_s, check_s), min(seen.cycle_s, factor * max(self.cycle_s / self.weight + more_s, check_s))

    def rate(self, num_requests: int) -> float:
        """Return tokens a second: as it goes now, or without drafting if that gives more."""
        now = self.emitted / self.cycle_s
        return max(now, num_requests / self.plain_cycle_s(num_requests)) if self.plain.weight else now

    def plain_cycle_s(self, num_requests: float) -> float:
        """Return what a pass without drafts takes, by those seen at about this number of requests."""
        return self.plain.cycle_s + self.row_s * (num_requests - self.plain.requests)

    @property
    def probing(self) -> int | None:
        """Which of the passes that look again comes next, if it is time for them."""
        step = self.passes - self.probe_from
        return step if 0 <= step < _PROBE_PASSES else None

    def best_depth(self, most: int) -> int:
        """Return how many levels gain most over not drafting at all, in tokens a pass; 0 if none gains anything."""
        seen, plain = self.drafted, self.plain
        requests = seen.requests / seen.weight
        rate = self.rate(round(requests))
        row_s, other_s = self.row_s, (seen.cycle_s - seen.draft_s - seen.check_s) / seen.weight
        if plain.weight and seen.drafted_rows > 0:  # the first rows beyond a plain pass may cost more than others
            plain_check_s = plain.check_s + row_s * (requests - plain.requests)
            row_s = max(row_s, (seen.check_s - plain_check_s * seen.weight) / seen.drafted_rows)
            other_s -= plain.cycle_s - plain.check_s
        gain, best, best_gain = -max(other_s, 0.0) * rate, 0, _WORTH_IT * requests
        for depth, (checked, kept) in enumerate(seen.by_level[:most], start=1):
            gain += (kept - checked * row_s * rate) / seen.weight - seen.level_s * rate
            if gain > best_gain:
                best_gain, best = gain, depth
        return best


class ChainController:
    """Learns costs by batch size and the worth of the draft's confidence, and says how far drafting pays."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._offered = [0.0] * len(_EDGES)
        self._kept = [0.0] * len(_EDGES)

    def reach(self, num_requests: int, most: int) -> Reach:
        """Return how far the next pass should draft, with chains of at most `most` tokens."""
        costs = self._costs.get(_size_class(num_requests))
        passes = 0 if costs is None else costs.passes
        if passes < _LEARNING_PASSES:  # with and without drafts, so that both show what they cost
            return _REST if passes % 3 == 2 else Reach(most, self.floor(num_requests))
        assert costs is not None, "passes were counted"
        depth = costs.best_depth(most) if costs.drafted.weight else most
        if costs.probing is not None:  # look again at what has not been tried for long
            return _REST if costs.probing == 0 else Reach(min(most, depth + 2), self.floor(num_requests))
        return Reach(depth, self.floor(num_requests), follows=True) if depth else Reach(0, math.inf, follows=False)

    def floor(self, num_requests: int) -> float:
        """Return the cumulative log-probability below which a node is not worth checking."""
        costs = self._costs.get(_size_class(num_requests))
        passes = 0 if costs is None else costs.passes
        if costs is None or passes < _LEARNING_PASSES:
            return _LEARNING_FLOORS[passes % 2]
        if costs.probing == 1:
            return _PROBE_FLOOR
        least = costs.row_s * costs.rate(num_requests)
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
