"""What the next step drafts: a chain or a tree that promises the most tokens a second over the whole batch, or nothing.

A step over n rows of which d draft gives n + d * (s_1 + ... + s_K) tokens, where s_k is the chance that the first k
drafted tokens are kept (`Chances`, those of chains and of each tree apart); what it takes is measured. Where nothing
promises more than no drafts, drafting rests for 16 steps and is then tried for one or two; a rest that proves right is
followed by one twice as long, up to 256 steps.

Plain values in, plain values out: no clock and no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.speculation.chances import Chances
from slipstream.speculation.tree import TreeShape

Choice = TreeShape | None
"""What a step drafts; None is nothing."""

_CLEARLY = 1.01  # by how much another choice must be better than the last, so that noise changes nothing
_SHORTEST_REST, _LONGEST_REST = 16, 256  # steps
_PROBE_ROWS, _PROBE_STEPS = 4, 2  # rows seen when drafting is tried again, in so many steps at the most
_OLD_WEIGHT = 4.0  # rows that what was seen before counts for then
_ALONE = 2  # rows up to which another text is a reason to try again at once


@dataclass(frozen=True)
class Considered:
    """Why a choice was made: what each would have given, in tokens a second, and by which chances."""

    chosen: Choice
    rates: Mapping[Choice, float]
    chances: Sequence[float]


class Rest:
    """Says for how long drafting rests where it does not pay."""

    def __init__(self) -> None:
        self._rested, self._rest_for, self._probes_left = 0, _SHORTEST_REST, 0

    def pays(self) -> None:
        """Take in that drafting pays just now."""
        self._rested, self._rest_for, self._probes_left = 0, _SHORTEST_REST, 0

    def tries(self, num_rows: int) -> bool:
        """Take in that it does not; return whether it is tried all the same, in this step of so many rows."""
        if self._probes_left:
            self._probes_left -= 1
            return True
        if self._rested < self._rest_for:
            self._rested += 1
            return False
        self._rested, self._rest_for = 0, min(2 * self._rest_for, _LONGEST_REST)
        self._probes_left = min(-(-_PROBE_ROWS // num_rows), _PROBE_STEPS) - 1
        return True

    @property
    def begins_trying(self) -> bool:
        """Whether the next step that does not pay tries."""
        return not self._probes_left and self._rested >= self._rest_for

    def end(self) -> None:
        """Try again in the next step."""
        self._rested = self._rest_for


class Controller:
    """Learns what is kept of drafts, and chooses.

    Args:
        shapes: chains and trees to choose among.
    """

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        self._chains = chains = Chances(max(shape.depth for shape in shapes))
        self._chances = {shape: chains if shape.is_chain else Chances(shape.depth, chains) for shape in shapes}
        self._rest = Rest()
        self.last: Considered | None = None

    @property
    def rests(self) -> bool:
        """Whether drafting does not pay just now."""
        return self.last is not None and self.last.chosen is None

    def choose(self, num_rows: int, num_drafting: int, seconds: Mapping[Choice, float]) -> Choice:
        """Return what the next step should draft.

        Args:
            num_rows: rows that decode.
            num_drafting: those of them that may draft.
            seconds: what a step of each choice takes, None among them; those it lacks are not considered.
        """
        by_place = {chances: chances.by_place() for chances in set(self._chances.values())}
        kept = {
            choice: sum(by_place[self._chances[choice]][: choice.depth]) if choice is not None else 0.0
            for choice in seconds
        }
        rates = {choice: (num_rows + num_drafting * kept[choice]) / taken for choice, taken in seconds.items()}
        best = max(rates, key=lambda choice: rates[choice])
        before = None if self.last is None else self.last.chosen
        if before in rates and rates[best] < _CLEARLY * rates[before]:
            best = before
        chosen: Choice = best
        if best is not None:
            self._rest.pays()
            if not any(chances.known for chances in self._chances.values()):  # a little tells what more would give
                chosen = min(rates, key=lambda choice: math.inf if choice is None else seconds[choice])
        elif len(rates) > 1:
            if self._rest.begins_trying:
                for chances in set(self._chances.values()):
                    chances.make_way(_OLD_WEIGHT)
            if self._rest.tries(num_rows):
                chosen = max(rates, key=lambda choice: -1.0 if choice is None else rates[choice])
        known = self._chances[chosen if chosen is not None else next(iter(self._chances))]
        self.last = Considered(best, rates, by_place[known])
        return chosen

    def learn(self, shape: TreeShape, counts: Sequence[int]) -> None:
        """Take in a step: how many drafted tokens of each row that drafted were kept."""
        own = self._chances.get(shape)
        for chances in set(self._chances.values()):
            if chances is self._chains and own is not None and own is not chances:
                chances.learn_from_tree(shape.depth, counts)
            else:
                chances.learn(shape.depth, counts if chances is own else ())

    def begin_text(self, num_rows: int) -> None:
        """Take in that another text begins; where few are written, drafting that rests is tried at once."""
        if num_rows <= _ALONE:
            self._rest.end()

    def explain(self) -> dict[str, object]:
        """Say what the last step drafted, and what each choice would have given."""
        if self.last is None:
            return {}
        return {
            "chosen": named(self.last.chosen),
            "tokens_a_second": {named(choice): round(rate, 1) for choice, rate in self.last.rates.items()},
            "chances": [round(chance, 3) for chance in self.last.chances],
        }


def named(choice: Choice) -> str:
    """Name a choice as people do."""
    return "no drafts" if choice is None else str(choice)
