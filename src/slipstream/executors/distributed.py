"""One executor on every rank: the first announces each step before running it, the others run it too.

Requests, scheduling and text live on the first rank only. Every rank is told the same changes, has the same rows, and
chooses the same tokens, so nothing comes back. What only the first rank has is told to the others when it is needed:
trees of a draft that is not split, and what grammars allow.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from slipstream.errors import RankLostError
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import Joined, StepCosts, StepInput, StepOutput
from slipstream.ranks.channel import Follower, Leader
from slipstream.speculation.drafter import Drafter
from slipstream.speculation.tree import TreeShape

T = TypeVar("T")


class Call(Protocol):
    """Something every rank runs at the same time."""

    def run(self, executor: EagerExecutor) -> Any:
        """Run it on what this rank holds; what comes back is the call's own, and only the first rank looks at it."""
        ...


@dataclasses.dataclass(frozen=True)
class _Step:
    step: StepInput

    def run(self, executor: EagerExecutor) -> None:
        executor.submit(self.step)


@dataclasses.dataclass(frozen=True)
class _Reshape:
    shape: TreeShape

    def run(self, executor: EagerExecutor) -> bool:
        return executor.reshape(self.shape)


def follow(channel: Follower, executor: EagerExecutor) -> None:
    """Run what the first rank announces until it is done; what comes of steps is the same everywhere."""
    while (call := channel.receive()) is not None:
        call.run(executor)
        while executor.in_flight:
            executor.collect()


class LeadingExecutor:
    """The executors of all ranks, as the engine sees them. A call that fails anywhere ends the group."""

    def __init__(self, executor: EagerExecutor, leader: Leader) -> None:
        self._own = executor
        self._leader = leader

    @property
    def device(self) -> torch.device:
        """Where this rank's part of the target lives."""
        return self._own.device

    @property
    def drafter(self) -> Drafter:
        """What drafts."""
        return self._own.drafter

    @property
    def lookahead(self) -> int:
        """How far this rank's executor runs ahead."""
        return self._own.lookahead

    @property
    def in_flight(self) -> int:
        """Steps not collected yet."""
        return self._own.in_flight

    def run(self, call: Call, announced: Call | None = None) -> Any:
        """Announce a call, make it, and return what it gives here (the call's own type)."""
        self._leader.send(announced or call)
        try:
            return call.run(self._own)
        except Exception as error:
            raise self._leader.failure(error) from error

    def submit(self, step: StepInput) -> None:
        """Run the step on every rank."""
        self.run(_Step(step), _Step(_without_grammars(step)))

    def collect(self) -> StepOutput:
        """Return what came of it here."""
        return self._own.collect()

    def ahead(self, patience_s: float) -> int:
        """Return 0: every step is announced."""
        return 0

    def costs(self, num_decoding: int) -> StepCosts | None:
        """Return what this rank's executor knows."""
        return self._own.costs(num_decoding)

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape."""
        starts_over: bool = self.run(_Reshape(shape))
        return starts_over

    def reset(self) -> None:
        """Do nothing: a step that fails ends the group."""

    def warm_up(self) -> list[str]:
        """Make nothing ready."""
        return []

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank is lost."""
        self._leader.when_lost(callback)

    def explain(self) -> dict[str, object]:
        """Say what decides how far is drafted."""
        return self._own.explain()

    def rest(self) -> StepOutput:
        """Wait for this rank's device, and tell what was not told yet."""
        return self._own.rest()

    def hurry(self) -> None:
        """Do nothing: a call runs one step."""


class Told:
    """What ranks share: the first makes it and tells the others, who are waiting for it."""

    def __init__(self, channel: Leader | Follower, draft_is_split: bool) -> None:
        self._channel = channel
        self.draft_is_split = draft_is_split

    def told(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes, on every rank."""
        if isinstance(self._channel, Leader):
            made = make()
            self._channel.send(made)
            return made
        told: Any = self._channel.receive()  # what the first rank made: a T
        return cast("T", told)


@dataclasses.dataclass(frozen=True)
class _Elsewhere:
    """A grammar that the first rank follows; the others are told what it allows."""

    finished = False

    def start(self) -> "_Elsewhere":
        return self

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        raise AssertionError("the first rank tells what is allowed")

    def advance(self, tokens: Sequence[int]) -> None:
        return


def _without_grammars(step: StepInput) -> StepInput:
    """Return the step as the other ranks are told it: compiled grammars stay where they are."""

    def told(joined: Joined) -> Joined:
        if joined.params.grammar is None:
            return joined
        return dataclasses.replace(joined, params=dataclasses.replace(joined.params, grammar=_Elsewhere()))

    return dataclasses.replace(step, joined=[told(joined) for joined in step.joined])
