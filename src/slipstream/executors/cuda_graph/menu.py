"""Which kind of step comes next: the drafter's own shape, as far as there is room for it, or whatever pays.

Where nobody asked for a shape, a step drafts one of a few chains or a tree, or nothing, as a `Controller` chooses by
what each takes. Every choice is captured for every batch size it may be made for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.step import CHAIN_NODES, MOST_NODES, StepKind
from slipstream.speculation.choosing import Choice, Controller
from slipstream.speculation.tree import TreeShape

_USUAL_NODES = 4
"""Nodes of a row, its root included, that batches of every size may have; larger shapes are for small batches."""
_MANY_NODES = {True: 128, False: 16}
"""Nodes of all rows of such a step, of chains and of trees: every kind of step takes graphs, memory and start-up."""
_JOINED_DEPTH = 3
"""How long chains are in steps that prompts join: one length, since each size of prompts is captured with it."""
_SMOOTHING, _MOST_OFF = 0.1, 1.25  # of how far steps are off what was measured; at once, beside those before


@dataclass(frozen=True)
class Decoders:
    """The rows of a step: how many, how many of them may draft, and the mean length of their texts."""

    count: int
    drafting: int
    num_keys: float


class StepTimes:
    """What kinds of steps take: as it was measured at the start, set right by those that ran since.

    Clocks fall under load, texts wake other experts than random tokens do. Kinds that have not run are taken to be off
    by as much as others of as many rows.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._off: dict[StepKind, float] = {}

    def seconds(self, kind: StepKind, num_keys: float) -> float | None:
        """Return what a step takes over rows of so many keys; None where nothing was measured."""
        measured = self._prepared.seconds(kind, num_keys)
        if measured is None:
            return None
        off = self._off.get(kind)
        if off is None:
            alike = [off for other, off in self._off.items() if other.num_rows == kind.num_rows]
            off = sum(alike) / len(alike) if alike else 1.0
        return measured * off

    def learn(self, kind: StepKind, num_keys: float, taken: float) -> None:
        """Take in what a step has taken; one that somebody else held up says nothing."""
        measured = self._prepared.seconds(kind, num_keys)
        if measured is not None:
            before = self._off.get(kind, 1.0)
            off = min(max(taken / measured, before / _MOST_OFF), before * _MOST_OFF)
            self._off[kind] = before + _SMOOTHING * (off - before) if kind in self._off else off


class StepMenu:
    """Names the kinds of steps there are, and chooses the next.

    Args:
        shapes: what rows may be drafted; none without a draft, and one where somebody asked for it.
    """

    def __init__(self, shapes: Sequence[TreeShape], prepared: Prepared) -> None:
        self._shapes, self._prepared, self._times = tuple(shapes), prepared, StepTimes(prepared)
        self._usual = min(self._shapes, key=lambda shape: abs(shape.num_nodes - 1 - _JOINED_DEPTH), default=None)
        self.controller = Controller(self._shapes) if len(self._shapes) > 1 else None
        self._made: dict[StepKind, dict[Choice, StepKind]] = {}

    def kinds(self, num_rows: int, max_keys: int) -> dict[StepKind, bool]:
        """Return the kinds of steps that so many rows may take, and whether prompts may join each."""
        kinds = self._kinds(self.plain(num_rows, max_keys))
        return {kind: choice == self._usual for choice, kind in kinds.items()}

    def plain(self, num_rows: int, max_keys: int) -> StepKind:
        """Return the step that drafts nothing."""
        return StepKind(num_rows, 0, max_keys, notes=bool(self._shapes))

    def usual(self, plain: StepKind) -> StepKind:
        """Return the step that prompts join, and that is taken where nothing chooses."""
        return self._kinds(plain).get(self._usual, plain)

    def beside_prompts(self, plain: StepKind) -> StepKind:
        """Return a step that drafts nothing with as many places as those have that prompts join."""
        if not self._prepared.mixes(self.usual(plain)):
            return plain
        return replace(plain, num_rows=self._prepared.joined_rows(plain.num_rows))

    def next(self, plain: StepKind, rows: Decoders, *, joined: bool) -> StepKind:
        """Return the next step; `plain` drafts nothing.

        Args:
            joined: prompts are to be computed in the same pass.
        """
        if not rows.drafting:
            return plain
        usual = self.usual(plain)
        if self.controller is None or (joined and self._prepared.mixes(usual)):
            return usual
        kinds = self._kinds(plain)
        taken = {choice: self._times.seconds(kind, rows.num_keys) for choice, kind in kinds.items()}
        seconds = {choice: value for choice, value in taken.items() if value is not None}
        if None not in seconds:  # nothing is measured where nothing is captured
            return usual
        return kinds[self.controller.choose(rows.count, rows.drafting, seconds)]

    def joins(self, kind: StepKind) -> bool:
        """Tell whether prompts are computed in the pass of such a step."""
        return (kind.num_drafted > 0 or self._usual is None) and self._prepared.mixes(kind)

    def learn(self, kind: StepKind, counts: Sequence[int]) -> None:
        """Take in how many drafted tokens were kept of each row that drafted."""
        if self.controller is not None and kind.num_drafted:
            self.controller.learn(kind.tree or TreeShape.chain(kind.num_drafted), counts)

    def learn_seconds(self, kind: StepKind, num_keys: float, taken: float) -> None:
        """Take in what a step over rows of so many keys has taken."""
        if self.controller is not None:
            self._times.learn(kind, num_keys, taken)

    def _kinds(self, plain: StepKind) -> dict[Choice, StepKind]:
        """Return the step of each choice that has room."""
        if plain not in self._made:
            made = {choice: self._kind(plain, choice) for choice in self._shapes}
            self._made[plain] = {None: plain, **{choice: kind for choice, kind in made.items() if kind is not None}}
        return self._made[plain]

    def _kind(self, plain: StepKind, choice: TreeShape) -> StepKind | None:
        """Return the step that drafts a shape; None if it has no room, for one among others."""
        shape: TreeShape | None = choice
        if len(self._shapes) > 1:
            most = MOST_NODES if choice.num_nodes <= _USUAL_NODES else _MANY_NODES[is_chain(choice)]
            shape = choice if plain.num_rows * choice.num_nodes <= most else None
        elif not is_chain(choice):
            shape = choice.within(MOST_NODES // plain.num_rows - 1) or None
        if shape is None:
            return None
        tree = None if is_chain(shape) else shape
        return replace(plain, num_drafted=shape.num_nodes - 1, tree=tree, notes=False)


def is_chain(shape: TreeShape) -> bool:
    """Tell whether a shape is drafted as a chain; a tree may happen to be one, and a very long chain is a tree."""
    return shape.width == 1 and not shape.paths and shape.is_chain and shape.num_nodes <= CHAIN_NODES
