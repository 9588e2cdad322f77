"""One executor on every rank: the first announces each step before running it, the others run it too.

Requests, scheduling and text live on the first rank only. Every rank is told the same changes, has the same rows, and
chooses the same tokens, so nothing comes back. What only the first rank has is told to the others when it is needed:
trees of a draft that is not split, what grammars allow, and which rows failed with one as they joined.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from slipstream.errors import RankLostError
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import Joined, StepInput
from slipstream.executors.runner import Runner
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


class LeadingExecutor(EagerExecutor):
    """The first rank's executor: it announces a call before it runs it. One that fails anywhere ends the group."""

    def __init__(self, runner: Runner, drafter: Drafter, num_rows: int, shared: "Told", leader: Leader) -> None:
        super().__init__(runner, drafter, num_rows, shared)
        self._leader, self._told = leader, shared

    def submit(self, step: StepInput) -> None:
        """Run the step on every rank."""
        with self._announced(_Step(_without_grammars(step))):
            super().submit(step)

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape on every rank that drafts; one that is refused here is not announced.

        Nothing of it is exchanged between ranks, so the first need not wait for the others.
        """
        starts_over = super().reshape(shape)
        if self._told.draft_is_split:
            self._leader.send(_Reshape(shape))
        return starts_over

    def reset(self) -> None:
        """Do nothing: a step that fails ends the group."""

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank is lost."""
        self._leader.when_lost(callback)

    @contextmanager
    def _announced(self, call: Call) -> Iterator[None]:
        """Have the other ranks run a call while this one does."""
        self._leader.send(call)
        try:
            yield
        except Exception as error:
            raise self._leader.failure(error) from error


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
