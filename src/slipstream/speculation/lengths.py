"""How long the next step's chains are, where steps are made ready for a few lengths: as many tokens a second as can be.

A step of length K over n rows of which d draft gives n + d * (s_1 + ... + s_K) tokens, where s_k is the chance that the
first k drafted tokens are kept; what it takes was measured for each length, batch size and bound on keys when it was
made ready. Chances are learned from every row of every step that drafted. A step without drafts may let the draft
follow the text or not. If it does not, rows it decodes are *late*: they draft no more, and those that begin later do.
What was learned fades while nothing is drafted, so a draft that did not pay is tried again.

Plain values in, plain values out: no clock and no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HOPE, _HOPE_WEIGHT = 0.88, 8.0  # chance that a drafted token is kept after the one before, and rows that counts for
_MEMORY = 0.998  # of rows, per step that drafted
_FADING = 0.9995  # of rows, per step that did not
_CLEARLY = 1.01  # by how much another choice must be better than the last, so that noise changes nothing
_LOOK_FURTHER = 64  # steps after which a longer chain is tried once: of what is never drafted nothing is known


@dataclass(frozen=True)
class Choice:
    """The next step's chains: how many tokens, and whether the draft follows a step that has none."""

    length: int
    follows: bool

    def __str__(self) -> str:
        """Name the choice as people do."""
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


@dataclass
class LengthController:
    """Learns what is kept of drafts, and weighs lengths.

    Args:
        lengths: that steps are made ready for, in order; none is 0.
    """

    lengths: Sequence[int]
    last: Considered | None = None
    _offered: list[float] = field(default_factory=list)
    _kept: list[float] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._offered, self._kept = [0.0] * max(self.lengths), [0.0] * max(self.lengths)

    @property
    def choices(self) -> list[Choice]:
        """All there are."""
        return [REST, Choice(0, follows=True), *(Choice(length, follows=True) for length in self.lengths)]

    def choose(self, num_rows: int, num_drafting: int, seconds: Mapping[Choice, float]) -> Choice:
        """Return what the next step should be.

        Args:
            num_rows: rows that decode.
            num_drafting: those of them whose draft has followed their text.
            seconds: what a step of each choice takes; those it lacks are not considered.
        """
        if not num_drafting or not seconds:
            return REST
        chances = self.chances()
        rates = {
            choice: (num_rows + num_drafting * sum(chances[: choice.length])) / taken
            for choice, taken in seconds.items()
        }
        best = max(rates, key=lambda choice: rates[choice])
        before = None if self.last is None else self.last.chosen
        if before in rates and rates[best] < _CLEARLY * rates[before]:
            best = before
        longer = [choice for choice in rates if choice.length > best.length]
        if best.length and longer and self._steps % _LOOK_FURTHER == _LOOK_FURTHER - 1:
            best = min(longer, key=lambda choice: choice.length)
        else:
            self.last = Considered(best, rates, chances)
        return best

    def chances(self) -> list[float]:
        """Return the chance that so many drafted tokens are kept, for 1, 2 and so on.

        Of places nothing was drafted at lately, each token is as likely kept as at the place before.
        """
        found, survives, before = [], 1.0, _HOPE
        for offered, kept in zip(self._offered, self._kept, strict=True):
            before = (kept + _HOPE_WEIGHT * before) / (offered + _HOPE_WEIGHT)
            survives *= before
            found.append(survives)
        return found

    def learn(self, length: int, kept: Sequence[int]) -> None:
        """Take in a step: how many drafted tokens of each row that drafted were kept."""
        self._steps += 1
        memory = _MEMORY if length else _FADING
        for place in range(len(self._offered)):
            if not length or place < length:
                self._offered[place] *= memory
                self._kept[place] *= memory
        for count in kept:
            for place in range(min(length, count + 1)):
                self._offered[place] += 1
                self._kept[place] += place < count
