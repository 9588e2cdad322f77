"""How likely drafted tokens are kept, place by place, learned from every row that drafted.

Plain values in, plain values out: no clock and no torch.
"""

import itertools
import operator
from collections.abc import Sequence

_HOPE, _HOPE_WEIGHT = 0.75, 1.5  # chance that a drafted token is kept after the one before, and rows that counts for
_MEMORY = 0.985  # of what was seen, per step that drafted: places not drafted lately are hoped for again
_FEWER_FAILURES = 0.6  # of a tree beside chains, until something is known of it
_TREE_WEIGHT = 0.25  # of a row that was drafted a tree, for what is known of chains


class Chances:
    """Learns how often a token is kept where the one before it was.

    Of a place where nothing was drafted lately, a token is as likely kept as at the place before; of a tree, it fails
    more rarely than in `chains`.
    """

    def __init__(self, depth: int, chains: "Chances | None" = None) -> None:
        self._offered, self._kept = [0.0] * depth, [0.0] * depth
        self._chains = chains

    @property
    def known(self) -> bool:
        """Whether anything was seen yet."""
        return self._offered[0] > 0

    def by_place(self) -> list[float]:
        """Return the chance that the first drafted token is kept, the first two, and so on."""
        return list(itertools.accumulate((chance for _, chance in self._after_each()), operator.mul))

    def _after_each(self) -> list[tuple[float, float]]:
        """Return what is hoped of each place, where the one before was kept, and the chance by what was seen."""
        found, hope = [], _HOPE
        hopes = None if self._chains is None else [chance for _, chance in self._chains._after_each()]
        for place, (offered, kept) in enumerate(zip(self._offered, self._kept, strict=True)):
            if hopes is not None:
                hope = 1 - _FEWER_FAILURES * (1 - hopes[place])
            chance = min(max((kept + _HOPE_WEIGHT * hope) / (offered + _HOPE_WEIGHT), 0.0), 1.0)
            found.append((hope, chance))
            hope = chance
        return found

    def learn(self, depth: int, counts: Sequence[int]) -> None:
        """Take in a step: of so many drafted tokens, how many of each row were kept; no rows if others drafted."""
        self._take_in([1.0] * depth, 1.0, counts)

    def learn_from_tree(self, depth: int, counts: Sequence[int]) -> None:
        """Take in a step that drafted trees: where one kept a token, a chain likely would have, too."""
        failing = [1 - chance for _, chance in self._after_each()[:depth]]
        shares = [(1 - each) / max(1 - _FEWER_FAILURES * each, 1e-9) for each in failing]
        self._take_in(shares, _TREE_WEIGHT, counts)

    def _take_in(self, shares: Sequence[float], weight: float, counts: Sequence[int]) -> None:
        """Take in rows: `shares` are the chances, by place, that a token would be kept where one was."""
        self._offered = [_MEMORY * offered for offered in self._offered]
        self._kept = [_MEMORY * kept for kept in self._kept]
        for count in counts:
            for place, share in enumerate(shares[: count + 1]):
                self._offered[place] += weight
                self._kept[place] += weight * share * (place < count)

    def make_way(self, weight: float) -> None:
        """Let what was seen so far count for no more than so many rows; chances stay as they are until more is."""
        for place, (hope, chance) in enumerate(self._after_each()):
            self._offered[place] = min(self._offered[place], weight)
            self._kept[place] = chance * (self._offered[place] + _HOPE_WEIGHT) - _HOPE_WEIGHT * hope
