"""What the next step drafts, where steps are made ready for a few chains and trees: as many tokens a second as can be.

A step of depth K over n rows of which d draft gives n + d * (s_1 + ... + s_K) tokens, where s_k is the chance that the
first k drafted tokens are kept; what it takes was measured for each choice, batch size and bound on keys when it was
made ready. Chances are learned from every row of every step that drafted, those of chains and of each tree apart; a
tree of which little is known is taken to fail a little more rarely than the next smaller choice. A step without drafts
may let the draft follow the text or not. If it does not, rows it decodes are *late*: they draft no more, and those that
begin later do. What was learned fades while nothing is drafted, so a draft that did not pay is tried again.

Plain values in, plain values out: no clock and no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HOPE, _HOPE_WEIGHT = 0.88, 8.0  # chance that a drafted token is kept after the one before, and rows that counts for
_MEMORY = 0.998  # of rows, per step that drafted
_FADING = 0.9995  # of rows, per step that did not
_CLEARLY = 1.01  # by how much another choice must be better than the last, so that noise changes nothing
_LOOK_FURTHER = 64  # steps after which a larger choice is tried once, each in turn: else nothing is known of it
_FEWER_FAILURES = 0.8  # of a tree beside the next smaller choice, until something is known of it


@dataclass(frozen=True)
class Choice:
    """What the next step drafts.

    Args:
        length: how deep chains or trees are.
        follows: whether the draft follows a step that has none.
        budget: drafted nodes of a tree; 0 is chains.
    """

    length: int
    follows: bool
    budget: int = 0

    @property
    def num_drafted(self) -> int:
        """Drafted nodes of a row."""
        return self.budget or self.length

    def __str__(self) -> str:
        """Name the choice as people do."""
        if self.budget:
            return f"trees of {self.budget} nodes"
        if self.length:
            return f"chains of {self.length}"
        return "no drafts, the draft follows" if self.follows else "no drafts"


REST = Choice(0, follows=False)


@dataclass(frozen=True)
class Considered:
    """Why a choice was made: what each would have given, in tokens a second, and by which chances."""

    chosen: Choice
    rates: Mapping[Choice, float]
    chances: Sequence[float]


class _Seen:
    """How many rows were drafted a token at each place after the one before was kept, and how many of them kept it."""

    def __init__(self, depth: int) -> None:
        self.offered, self.kept = [0.0] * depth, [0.0] * depth

    def fade(self, memory: float, depth: int) -> None:
        """Forget a little of the first places."""
        for place in range(min(depth, len(self.offered))):
            self.offered[place] *= memory
            self.kept[place] *= memory

    def add(self, length: int, count: int) -> None:
        """Take in a row that kept so many of its drafted tokens."""
        for place in range(min(length, count + 1)):
            self.offered[place] += 1
            self.kept[place] += place < count


@dataclass
class LengthController:
    """Learns what is kept of drafts, and weighs chains and trees.

    Args:
        lengths: of chains that steps are made ready for, in order; none is 0.
        trees: depth and budget of trees likewise, the smallest first.
    """

    lengths: Sequence[int]
    trees: Sequence[tuple[int, int]] = ()
    last: Considered | None = None
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        depth = max([*self.lengths, *(depth for depth, _ in self.trees)])
        self._seen = {budget: _Seen(depth) for budget in (0, *(budget for _, budget in self.trees))}

    @property
    def choices(self) -> list[Choice]:
        """All there are, from nothing to the most nodes."""
        chains = [Choice(length, follows=True) for length in self.lengths]
        return [REST, Choice(0, follows=True), *chains, *(Choice(depth, True, budget) for depth, budget in self.trees)]

    def choose(self, num_rows: int, num_drafting: int, seconds: Mapping[Choice, float]) -> Choice:
        """Return what the next step should be.

        Args:
            num_rows: rows that decode.
            num_drafting: those of them whose draft has followed their text.
            seconds: what a step of each choice takes; those it lacks are not considered.
        """
        if not num_drafting or not seconds:
            return REST
        chances = {budget: self.chances(budget) for budget in self._seen}
        rates = {
            choice: (num_rows + num_drafting * sum(chances[choice.budget][: choice.length])) / taken
            for choice, taken in seconds.items()
        }
        best = max(rates, key=lambda choice: rates[choice])
        before = None if self.last is None else self.last.chosen
        if before in rates and rates[best] < _CLEARLY * rates[before]:
            best = before
        larger = [choice for choice in rates if choice.num_drafted > best.num_drafted]
        looks, rest = divmod(self._steps, _LOOK_FURTHER)
        if best.length and larger and rest == _LOOK_FURTHER - 1:
            best = larger[looks % len(larger)]
        else:
            self.last = Considered(best, rates, chances[best.budget])
        return best

    def chances(self, budget: int = 0) -> list[float]:
        """Return the chance that so many drafted tokens are kept, for 1, 2 and so on, of chains or of a tree."""
        found, survives = [], 1.0
        for chance in self._after_each(budget):
            survives *= chance
            found.append(survives)
        return found

    def _after_each(self, budget: int) -> list[float]:
        """Return the chance that a token is kept where the one before was.

        Of a chain's places that nothing was drafted at lately, each token is as likely kept as at the place before.
        """
        seen, found, before = self._seen[budget], [], _HOPE
        smaller = [other for other in self._seen if other < budget]
        hopes = self._after_each(max(smaller)) if smaller else []
        for place, (offered, kept) in enumerate(zip(seen.offered, seen.kept, strict=True)):
            hope = 1 - _FEWER_FAILURES * (1 - hopes[place]) if hopes else before
            before = (kept + _HOPE_WEIGHT * hope) / (offered + _HOPE_WEIGHT)
            found.append(before)
        return found

    def learn(self, choice: Choice, kept: Sequence[int]) -> None:
        """Take in a step: how many drafted tokens of each row that drafted were kept."""
        self._steps += 1
        if not choice.length:
            for seen in self._seen.values():
                seen.fade(_FADING, len(seen.offered))
        elif choice.budget in self._seen:  # else a tree that was cut for want of room, which is not among the choices
            own = self._seen[choice.budget]
            own.fade(_MEMORY, choice.length)
            for count in kept:
                own.add(choice.length, count)
