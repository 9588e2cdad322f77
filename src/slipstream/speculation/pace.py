"""Timing a drafter's rounds for the controller: when a round began, what was drafted, and what became of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.speculation.controller import ChainController, Reach
from slipstream.speculation.outcomes import DraftedChain, DraftedPass

Seconds = tuple[float, float, float]
"""What drafting, checking and following took."""


class Pace:
    """Follows one round after another: `start`, `drafted`, `checked`; the clock is passed in."""

    def __init__(self, controller: ChainController, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock
        self._num_requests = 0
        self._started: float | None = None
        self._previous: _Rounds | None = None
        self._drafted_at = 0.0
        self._chains: dict[int, tuple[Sequence[float], int]] = {}

    def start(self, num_requests: int, depth: int) -> Reach:
        """Begin a round of chains of at most `depth` tokens; return how far drafting them pays."""
        now = self._clock()
        if self._previous is not None:  # only now is it known how long the round before took as a whole
            for seen in self._previous.whole(now):
                self._controller.record(seen)
        self._previous = None
        self._started = now
        self._num_requests = num_requests
        return self._controller.reach(num_requests, depth)

    def explain(self) -> dict[str, object]:
        """Say what the controller knows of the size of batch that ran last."""
        return self._controller.explain(max(self._num_requests, 1))

    def drafted(self, request_ids: Sequence[int], scores: Sequence[Sequence[float]], counts: Sequence[int]) -> None:
        """Note what was drafted for each request: cumulative scores, and how many nodes are to be checked."""
        self._drafted_at = self._clock()
        self._chains = dict(zip(request_ids, zip(scores, counts, strict=True), strict=True))

    def finished(self, rounds: Sequence[tuple[list[DraftedChain], Seconds]]) -> None:
        """Note whole rounds that ran as one call, and what drafting, checking and following took in each."""
        started, self._started = self._started, None
        assert started is not None, "a round was begun"
        self._previous = _Rounds(started, rounds)

    def checked(self, kept: Mapping[int, int], alone: bool = True) -> None:
        """Note how many drafted nodes of each request were kept.

        A pass tells nothing of costs if it had a prompt in it, or tokens that others drafted (it was not `alone`).
        """
        started, chains = self._started, self._chains
        self._started, self._chains = None, {}
        if started is None:  # a prompt's pass came between: how long the round before took will not be known
            self._previous = None
            self._controller.begin_text()
        if started is None or not alone or len(kept) != self._num_requests or set(chains) != set(kept):
            self._controller.learn(_chains(chains, kept))
            return
        seconds = (self._drafted_at - started, self._clock() - self._drafted_at, 0.0)
        self._previous = _Rounds(started, [(_chains(chains, kept), seconds)])


@dataclass(frozen=True)
class _Rounds:
    """Rounds whose end is not known yet: when the first began, and each one's chains and times of its parts."""

    began: float
    rounds: Sequence[tuple[list[DraftedChain], Seconds]]

    def whole(self, ended: float) -> Iterator[DraftedPass]:
        """Give each round with its time as a whole: that of its parts, and its share of what came between them."""
        parts_s = sum(sum(seconds) for _, seconds in self.rounds)
        other_s = (ended - self.began - parts_s) / len(self.rounds)
        for chains, seconds in self.rounds:
            levels = max((_num_levels(chain.scores) for chain in chains if chain.scores), default=0)
            draft_s, check_s, follow_s = seconds
            yield DraftedPass(chains, levels, draft_s, check_s, sum(seconds) + other_s, follow_s)


def _num_levels(scores: Sequence[float]) -> int:
    return sum(score > -math.inf for score in scores)


def _chains(chains: Mapping[int, tuple[Sequence[float], int]], kept: Mapping[int, int]) -> list[DraftedChain]:
    return [
        DraftedChain(scores, count, min(count, kept[request_id]))
        for request_id, (scores, count) in chains.items()
        if request_id in kept
    ]
