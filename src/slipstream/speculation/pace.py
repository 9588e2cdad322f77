"""Timing a drafter's rounds for the controller: when a round began, what was drafted, and what became of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from slipstream.speculation.controller import ChainController, DraftedChain, DraftedPass, Reach


class Pace:
    """Follows one round after another: `start`, `drafted`, `checked`; the clock is passed in."""

    def __init__(self, controller: ChainController, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock
        self._num_requests = 0
        self._started: float | None = None
        self._previous: tuple[float, DraftedPass] | None = None
        self._drafted_at = 0.0
        self._chains: dict[int, tuple[Sequence[float], int]] = {}

    def start(self, num_requests: int, depth: int) -> Reach:
        """Begin a round of chains of at most `depth` tokens; return how far drafting them pays."""
        now = self._clock()
        if self._previous is not None:  # only now is it known how long the round before took as a whole
            began, seen = self._previous
            self._controller.record(_with_cycle(seen, now - began))
        self._previous = None
        self._started = now
        self._num_requests = num_requests
        return self._controller.reach(num_requests, depth)

    def drafted(self, request_ids: Sequence[int], scores: Sequence[Sequence[float]], counts: Sequence[int]) -> None:
        """Note what was drafted for each request: cumulative scores, and how many nodes are to be checked."""
        self._drafted_at = self._clock()
        self._chains = dict(zip(request_ids, zip(scores, counts, strict=True), strict=True))

    def finished(
        self,
        chains: Mapping[int, tuple[Sequence[float], int]],
        kept: Mapping[int, int],
        seconds: tuple[float, float, float],
    ) -> None:
        """Note a whole round that ran as one call.

        Args:
            chains: scores of each request's drafted nodes, and how many of them were checked.
            kept: how many of those were kept.
            seconds: what drafting, checking and following took.
        """
        started, self._started = self._started, None
        assert started is not None, "a round was begun"
        self._previous = (started, _drafted_pass(chains, kept, seconds))

    def checked(self, kept: Mapping[int, int]) -> None:
        """Note how many drafted nodes of each request were kept; a pass with a prompt in it tells nothing of costs."""
        started, chains = self._started, self._chains
        self._started, self._chains = None, {}
        if started is None:  # a prompt's pass came between: how long the round before took will not be known
            self._previous = None
        if started is None or len(kept) != self._num_requests or set(chains) != set(kept):
            self._controller.learn(_chains(chains, kept))
            return
        seen = _drafted_pass(chains, kept, (self._drafted_at - started, self._clock() - self._drafted_at, 0.0))
        self._previous = (started, seen)


def _chains(chains: Mapping[int, tuple[Sequence[float], int]], kept: Mapping[int, int]) -> list[DraftedChain]:
    return [
        DraftedChain(scores, count, kept[request_id])
        for request_id, (scores, count) in chains.items()
        if request_id in kept
    ]


def _drafted_pass(
    chains: Mapping[int, tuple[Sequence[float], int]], kept: Mapping[int, int], seconds: tuple[float, float, float]
) -> DraftedPass:
    return DraftedPass(
        chains=_chains(chains, kept),
        levels=max(sum(score > -float("inf") for score in scores) for scores, _ in chains.values()),
        draft_s=seconds[0],
        check_s=seconds[1],
        cycle_s=0.0,
        follow_s=seconds[2],
    )


def _with_cycle(seen: DraftedPass, cycle_s: float) -> DraftedPass:
    return dataclasses.replace(seen, cycle_s=cycle_s)
