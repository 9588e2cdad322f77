"""How far to draft: a token is drafted and checked if its chance of being kept is worth the time that takes.

The chance comes from the draft's own confidence, set right by what was kept before, and from the text it may be copied
from; the time from measured passes. A node whose row costs c seconds pays if its chance p of being kept satisfies
p >= c * (tokens a second), where a row costs the more, the more there are; another level of the draft pays if the
chains it would go on from are likely enough together. If drafting cut so gains nothing over passes without drafts,
which are measured too, it rests and is tried again after 16 passes, then after 32 and 64, over many requests after up
to 512. What the text says is copied meanwhile.
Whatever is decided here, the text is the same: the one rule chooses every token, and drafts only save passes.

Plain values in, plain values out: no clock and no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.kernels import Cut, row_work
from slipstream.speculation.outcomes import DraftedChain, DraftedPass

_TRUST = 0.5  # power of its confidence that a draft is believed with at first: hopeful enough to be tried and corrected
_TRUST_STEP = 0.02  # of its logarithm, for a token kept or not
_TRUSTS = (0.05, 20.0)
_MEMORY = 0.98  # of costs, per pass
_GAIN_MEMORY = 0.99  # of what drafting gained, per pass that drafted
_HOPE, _HOPE_WEIGHT = 0.4, 8.0  # tokens a request gained before anything was seen, and the passes that counts for
_REST_WEIGHT, _MANY_REST_WEIGHT = 6.0, 24.0  # passes that gains before a rest count for when drafting is tried again
_OLD_WEIGHT = 1.0  # the same for what it cost
_GOES_ON = 0.5  # tokens that a level gives for one it goes on from; replayed answers said so
_LEARNING_PASSES = 12
_MEASURED_PASSES = 16.0  # from which the clock is asked, too
_PROBE_EVERY = 64
_PROBE_PASSES = 4
_SHORTEST_REST = 16
_LONGEST_REST, _MANY_LONGEST_REST = 64, 512  # few requests may gain much, as soon as a text drafts well
_WORTH_IT = 0.03  # tokens more than a plain pass gives, as a share of those, below which drafting rests
_CLEAR = 0.1  # the same, above which drafting is plainly right
_PLAIN_MEMORY = 0.75  # of what plain passes take, per plain pass
_LEARNING_ROWS = (0.3, 1.2)  # what a row is worth at first; rows must differ for their cost to show
_MANY = 5  # requests from which a row each is dear, so that learning takes fewer and surer ones
_MANY_ROWS, _MANY_DEPTH = (0.4, 0.8), 2
_BELOW = 0.5  # of what rows are worth, to look at times at less likely ones: of what is never checked nothing is known
_MIN_VARIANCE = 0.05  # of rows, below which a slope would be noise


@dataclass(frozen=True)
class Reach:
    """How far to draft: chains of up to `depth` tokens, cut where they do not pay.

    With a depth of 0 drafting rests; unless it `follows`, the draft need not be kept up with the text meanwhile. This
    holds for so many `passes` before it is asked for again.
    """

    depth: int
    cut: Cut = field(default_factory=Cut)
    follows: bool = True
    passes: int = 1


_NOTHING = Cut(math.inf, row=math.inf)


@dataclass
class _Mean:
    """A running mean, old values fading."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, memory: float) -> None:
        self.weight = memory * self.weight + 1
        self.value += (value - self.value) / self.weight


@dataclass
class _Plain:
    """Running means over passes without drafts, the draft's own time and what was copied left out."""

    work: _Mean = field(default_factory=_Mean)
    check_s: _Mean = field(default_factory=_Mean)
    round_s: _Mean = field(default_factory=_Mean)

    def add(self, num_requests: int, check_s: float, round_s: float) -> None:
        self.work.add(row_work(num_requests), _PLAIN_MEMORY)
        self.check_s.add(check_s, _PLAIN_MEMORY)
        self.round_s.add(round_s, _PLAIN_MEMORY)


@dataclass
class _Drafted:
    """Running means over passes that drafted.

    `gain` is what they would have gained over plain passes had they been cut as today, in tokens, by what rows and
    levels cost; `emitted` and `round_s` are what passes gave and took since drafting last rested.
    """

    work: _Mean = field(default_factory=_Mean)
    check_s: _Mean = field(default_factory=_Mean)
    level_s: _Mean = field(default_factory=_Mean)
    follow_s: _Mean = field(default_factory=_Mean)
    other_s: _Mean = field(default_factory=_Mean)
    gain: _Mean = field(default_factory=_Mean)
    emitted: _Mean = field(default_factory=_Mean)
    round_s: _Mean = field(default_factory=_Mean)

    def add(self, seen: DraftedPass, check_s: float) -> None:
        self.work.add(seen.work - row_work(len(seen.chains)), _MEMORY)
        self.check_s.add(check_s, _MEMORY)
        other_s = seen.round_s - seen.draft_s - seen.check_s - seen.follow_s
        for mean, seconds in (
            (self.level_s, seen.draft_s / seen.levels),
            (self.follow_s, seen.follow_s),
            (self.other_s, other_s),
        ):
            usual = min(seconds, 2 * mean.value) if mean.weight > 2 else seconds  # one that lost its core tells nothing
            mean.add(usual, _MEMORY)

    def make_way(self, gain_weight: float) -> None:
        for mean in (self.work, self.check_s, self.level_s, self.follow_s, self.other_s):
            mean.weight = min(mean.weight, _OLD_WEIGHT)
        self.gain.weight = min(self.gain.weight, gain_weight)


@dataclass
class _Costs:
    """Running sums for one range of batch sizes, old passes fading; `row_s` is what they tell of a row among many."""

    passes: int = 0
    weight: float = 0.0
    work: float = 0.0
    work_squared: float = 0.0
    check_s: float = 0.0
    work_check_s: float = 0.0
    round_s: float = 0.0
    emitted: float = 0.0
    row_s: float = 0.0
    plain: _Plain = field(default_factory=_Plain)
    drafted: _Drafted = field(default_factory=_Drafted)
    early: list[DraftedPass] = field(default_factory=list)
    resting: bool = False
    probe_from: int = _LEARNING_PASSES + _SHORTEST_REST
    probe_after: int = _SHORTEST_REST
    probe_every: int = _SHORTEST_REST

    def add(self, seen: DraftedPass) -> None:
        if self.resting and self.probing == 0:
            self._make_way(len(seen.chains))
        done, emitted = seen.work, seen.emitted
        check_s, round_s = self._usual(seen, done)
        self.weight = _MEMORY * self.weight + 1
        self.work = _MEMORY * self.work + done
        self.work_squared = _MEMORY * self.work_squared + done**2
        self.check_s = _MEMORY * self.check_s + check_s
        self.work_check_s = _MEMORY * self.work_check_s + done * check_s
        self.round_s = _MEMORY * self.round_s + round_s
        self.emitted = _MEMORY * self.emitted + emitted
        self.passes += 1
        if seen.levels:
            self.drafted.add(seen, check_s)
            if self.passes > _LEARNING_PASSES and not self.resting:
                self.drafted.emitted.add(emitted, _MEMORY)
                self.drafted.round_s.add(round_s, _MEMORY)
        else:
            copied_s = self.row_s * (done - row_work(len(seen.chains)))
            self.plain.add(len(seen.chains), check_s - copied_s, round_s - copied_s - seen.follow_s)
        variance = self.work_squared / self.weight - (self.work / self.weight) ** 2
        if variance > _MIN_VARIANCE:
            covariance = self.work_check_s / self.weight - self.work * self.check_s / self.weight**2
            self.row_s = max(covariance / variance, 0.0)

    def _make_way(self, num_requests: int) -> None:
        """Let old costs count for little: the machine may have been busy when drafting last seemed not to pay."""
        share = min(1.0, _OLD_WEIGHT / self.weight)
        self.weight *= share
        self.work *= share
        self.work_squared *= share
        self.check_s *= share
        self.work_check_s *= share
        self.round_s *= share
        self.emitted *= share
        self.drafted.make_way(_MANY_REST_WEIGHT if num_requests >= _MANY else _REST_WEIGHT)

    def _usual(self, seen: DraftedPass, done: float) -> tuple[float, float]:
        """Return what a pass took to check and as a whole; one that lost its core for a while says nothing of rows."""
        if not self.weight:
            return seen.check_s, seen.round_s
        more_s = self.row_s * (done - self.work / self.weight)
        factor = 2.0 if self.passes < _LEARNING_PASSES else 1.5
        check_s = factor * max(self.check_s / self.weight + more_s, done * self.row_s)
        return min(seen.check_s, check_s), min(seen.round_s, factor * max(self.round_s / self.weight + more_s, check_s))

    def rate(self, num_requests: int) -> float:
        """Return tokens a second: as it goes now, or without drafting if that gives more."""
        now = self.emitted / self.round_s
        if not self.plain.round_s.weight:
            return now
        return max(now, num_requests / self.plain_s(num_requests))

    def plain_s(self, num_requests: int) -> float:
        """Return what a pass without drafts takes."""
        return self.plain.round_s.value + self.row_s * (row_work(num_requests) - self.plain.work.value)

    def gain(self, num_requests: int) -> float:
        """Return what drafting gains over a plain pass, in tokens a request: by its costs, or by the clock if less."""
        drafted = self.drafted
        by_costs = drafted.gain.value / num_requests
        if drafted.round_s.weight < _MEASURED_PASSES or not self.plain.round_s.weight:
            return by_costs
        rate = drafted.emitted.value / drafted.round_s.value
        return min(by_costs, rate * self.plain_s(num_requests) / num_requests - 1)

    def learn_gain(self, seen: DraftedPass, cut: Cut) -> None:
        """Take in what a pass that drafted would have gained with today's cut, in tokens."""
        requests, drafted, plain = len(seen.chains), self.drafted, self.plain
        row_s = self.row_s
        if plain.check_s.weight and drafted.work.value > 0:  # the first rows beyond a plain pass may be the dearest
            plain_s = plain.check_s.value + row_s * (row_work(requests) - plain.work.value)
            row_s = max(row_s, (drafted.check_s.value - plain_s) / drafted.work.value)
        levels, checked, kept = seen.within(cut)
        more_s = max(drafted.other_s.value - (plain.round_s.value - plain.check_s.value), 0.0)
        spent_s = (
            (row_work(requests + checked) - row_work(requests)) * row_s
            + levels * drafted.level_s.value
            + drafted.follow_s.value
            + more_s
        )
        if not drafted.gain.weight:
            drafted.gain = _Mean(_HOPE * requests, _HOPE_WEIGHT / math.sqrt(requests))
        drafted.gain.add(kept - spent_s * self.rate(requests), _GAIN_MEMORY)

    def decide(self, num_requests: int) -> None:
        """Rest if drafting has gained nothing, and set when to look again."""
        gain = self.gain(num_requests)
        gains = gain > _WORTH_IT
        if self.passes >= self.probe_from + _PROBE_PASSES:  # rests that prove right last longer
            longest = _MANY_LONGEST_REST if num_requests >= _MANY else _LONGEST_REST
            self.probe_after = _SHORTEST_REST if gains else min(2 * self.probe_after, longest)
            # Where the gain is not clear, plain passes are looked at often, and so they are at first.
            self.probe_every = min(2 * self.probe_every, _PROBE_EVERY) if gain > _CLEAR else _SHORTEST_REST
            self.probe_from = self.passes + (self.probe_every if gains else self.probe_after)
            self.resting = not gains
        elif not gains and not self.resting and self.probing is None:
            self.resting, self.probe_from = True, self.passes + self.probe_after
        if self.resting:
            self.drafted.emitted, self.drafted.round_s = _Mean(), _Mean()

    @property
    def probing(self) -> int | None:
        """Which of the passes that look again comes next, if it is time for them."""
        step = self.passes - self.probe_from
        return step if 0 <= step < _PROBE_PASSES else None


class ChainController:
    """Learns costs by batch size and the worth of the draft's confidence, and says how far drafting pays."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._trust = _TRUST

    def reach(self, num_requests: int, most: int) -> Reach:
        """Return how far the next pass should draft, with chains of at most `most` tokens."""
        costs = self._costs.get(_size_class(num_requests))
        passes = 0 if costs is None else costs.passes
        if costs is None or passes < _LEARNING_PASSES:  # with and without drafts, so that both show what they cost
            return Reach(0, _NOTHING) if passes % 3 == 2 else self._learning(num_requests, passes, most)
        if costs.probing == 0:
            return Reach(0, _NOTHING)
        until_probe = max(costs.probe_from - passes, 1)
        if costs.resting and costs.probing is None:
            return Reach(0, replace(self.cut(num_requests), floor=math.inf), follows=False, passes=until_probe)
        return Reach(most, self.cut(num_requests, _BELOW if costs.probing == 1 else 1.0), passes=until_probe)

    def cut(self, num_requests: int, share: float = 1.0) -> Cut:
        """Return where nodes stop being worth (a share of) their rows, and levels their time, by what is known."""
        costs = self._costs.get(_size_class(num_requests))
        if costs is None or costs.passes < _LEARNING_PASSES:
            return Cut(trust=self._trust)
        rate = costs.rate(num_requests)
        return self._cut(num_requests, share * costs.row_s * rate, costs.drafted.level_s.value * rate / _GOES_ON)

    def _cut(self, num_requests: int, row: float, need: float = 0.0) -> Cut:
        """Return where nodes end that are worth less than their rows, the first of which costs least."""
        first = Cut(row=row).price(num_requests)
        floor = math.log(first) / self._trust if first > 0 else -math.inf
        return Cut(floor, need, row=row, trust=self._trust)

    def _learning(self, num_requests: int, passes: int, most: int) -> Reach:
        few = num_requests < _MANY
        row = (_LEARNING_ROWS if few else _MANY_ROWS)[passes % 2]
        return Reach(most if few else min(most, _MANY_DEPTH), self._cut(num_requests, row))

    def explain(self, num_requests: int) -> dict[str, object]:
        """Say what is known of batches of this size and what follows from it; nothing before it was learned."""
        costs = self._costs.get(_size_class(num_requests))
        if costs is None or costs.passes < _LEARNING_PASSES:
            return {}
        cut = self.cut(num_requests)
        return {
            "chosen": "no drafts" if costs.resting else "chains as long as they pay",
            "gain_in_tokens_a_request": round(costs.gain(num_requests), 3),
            "row_ms": round(1e3 * costs.row_s, 3),
            "level_ms": round(1e3 * costs.drafted.level_s.value, 3),
            "plain_pass_ms": round(1e3 * costs.plain_s(num_requests), 3),
            "tokens_a_second": round(costs.rate(num_requests), 1),
            "least_confidence": round(math.exp(cut.floor), 3) if cut.floor < 0 else None,
            "least_chance_of_a_copy": round(max(cut.least, cut.price(num_requests)), 3),
        }

    def learn(self, chains: Sequence[DraftedChain]) -> None:
        """Take in what became of drafted tokens: as many should be kept as were hoped for."""
        for chain in chains:
            for place, score in enumerate(chain.scores[: chain.checked]):
                hoped = math.exp(self._trust * score)
                trust = self._trust * math.exp(_TRUST_STEP * (hoped - (place < chain.kept)))
                self._trust = min(max(trust, _TRUSTS[0]), _TRUSTS[1])

    def begin_text(self) -> None:
        """Take in that another text begins: where one is written at a time, drafting that rests is tried at once."""
        alone = self._costs.get(_size_class(1))
        if alone is not None and alone.resting and alone.probing is None:
            alone.probe_from = alone.passes

    def record(self, seen: DraftedPass) -> None:
        """Take in a whole pass."""
        num_requests = len(seen.chains)
        costs = self._costs.setdefault(_size_class(num_requests), _Costs())
        costs.add(seen)
        if seen.levels:
            self.learn(seen.chains)
            costs.early.append(seen)
        if costs.passes < _LEARNING_PASSES:  # what drafting gains can be told once costs are known
            return
        if costs.early:
            cut = self.cut(num_requests)
            for drafted in costs.early:
                costs.learn_gain(drafted, cut)
            costs.early.clear()
        costs.decide(num_requests)


def _size_class(num_requests: int) -> int:
    """Batches of 1, 2, 3 to 4, 5 to 8, ... cost alike."""
    return (num_requests - 1).bit_length()
