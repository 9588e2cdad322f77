"""Timing a drafter's rounds for the controller: when a round began, what was drafted, and what became of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.speculation.controller import ChainController, DraftedChain, DraftedPass, Reach


class Pace:
    """Follows one round after another: `start`, `drafted`, `checked`; the clock is passed in."""

    def __init__(self, controller: ChainController, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock
        self._num_requests = 0
        self._started: float | None = None
        self._previous: _Round | None = None
        self._drafted_at = 0.0
        self._chains: dict[int, tuple[Sequence[float], int]] = {}

    def start(self, num_requests: int, depth: int) -> Reach:
        """Begin a round of chains of at most `depth` tokens; return how far drafting them pays."""
        now = self._clock()
        if self._previous is not None:  # only now is it known how long the round before took as a whole
            self._controller.record(self._previous.whole(now))
        self._previous = None
        self._started = now
        self._num_requests = num_requests
        return self._controller.reach(num_requests, depth)

    def drafted(self, request_ids: Sequence[int], scores: Sequence[Sequence[float]], counts: Sequence[int]) -> None:
        """Note what was drafted for each request: cumulative scores, and how many nodes are to be checked."""
        self._drafted_at = self._clock()
        self._chains = dict(zip(request_ids, zip(scores, counts, strict=True), strict=True))

    def finished(self, chains: list[DraftedChain], seconds: tuple[float, float, float]) -> None:
        """Note a whole round that ran as one call, and what drafting, checking and following took."""
        started, self._started = self._started, None
        assert started is not None, "a round was begun"
        self._previous = _Round(started, chains, seconds)

    def checked(self, kept: Mapping[int, int]) -> None:
        """Note how many drafted nodes of each request were kept; a pass with a prompt in it tells nothing of costs."""
        started, chains = self._started, self._chains
        self._started, self._chains = None, {}
        if started is None:  # a prompt's pass came between: how long the round before took will not be known
            self._previous = None
        if started is None or len(kept) != self._num_requests or set(chains) != set(kept):
            self._controller.learn(_chains(chains, kept))
            return
        seconds = (self._drafted_at - started, self._clock() - self._drafted_at, 0.0)
        self._previous = _Round(started, _chains(chains, kept), seconds)


@dataclass(frozen=True)
class _Round:
    """A round whose end is not known yet: when it began, its chains, and what drafting, checking and following took."""

    began: float
    chains: list[DraftedChain]
    seconds: tuple[float, float, float]

    def whole(self, ended: float) -> DraftedPass:
        levels = max((_num_levels(chain.scores) for chain in self.chains if chain.scores), default=0)
        draft_s, check_s, follow_s = self.seconds
        return DraftedPass(self.chains, levels, draft_s, check_s, ended - self.began, follow_s)


def _num_levels(scores: Sequence[float]) -> int:
    return sum(score > -math.inf for score in scores)


def _chains(chains: Mapping[int, tuple[Sequence[float], int]], kept: Mapping[int, int]) -> list[DraftedChain]:
    return [
        DraftedChain(scores, count, kept[request_id])
        for request_id, (scores, count) in chains.items()
        if request_id in kept
    ]
