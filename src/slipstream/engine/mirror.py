"""One engine over several ranks: the first announces each call on its model before making it, the others make it too.

Requests, scheduling, sampling settings and text live on the first rank only. The others hold weights and keys, and
run what they are told. A draft that is not split lives on the first rank alone: the others would only repeat it.

Shape letters: L rows of logits, W of them brought together whole, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.channel import Follower, Leader
from slipstream.engine.runner import Runner
from slipstream.errors import RankLostError
from slipstream.kernels import Ops, RowSampling
from slipstream.models.parallel import Ranks
from slipstream.models.target import Hidden
from slipstream.speculation.choose import Chosen, Row, choose
from slipstream.speculation.drafter import Drafter, DraftView, Observed
from slipstream.speculation.tree import TreeBatch, TreeShape


class Call(Protocol):
    """Something every rank runs at the same time."""

    def run(self, held: "Held") -> Any:
        """Run it on what this rank holds; what comes back is the call's own, and only the first rank looks at it."""
        ...


@dataclass
class Held:
    """What a rank holds: its part of the target, of the draft if that is split, and the last pass over the target."""

    runner: Runner
    drafter: Drafter | None
    ranks: Ranks
    ops: Ops
    hidden: Hidden | None = None


def follow(channel: Follower, held: Held) -> None:
    """Run what the first rank announces until it is done."""
    with torch.inference_mode():
        while (call := channel.receive()) is not None:
            call.run(held)


@dataclass(frozen=True)
class _Forward:
    batch: Batch
    pages: list[list[int]]

    def run(self, held: Held) -> Hidden:
        held.hidden = held.runner.forward(self.batch.to(held.runner.device), self.pages)
        return held.hidden


@dataclass(frozen=True)
class _Choose:
    """Choose by the one rule; bring the rows of `whole` together for whoever must see all of them."""

    rows: list[int]
    temperatures: list[float]
    seeds: list[int]
    positions: list[int]
    whole: list[int]

    def run(self, held: Held) -> tuple[Tensor, Tensor]:
        assert held.hidden is not None, "a pass comes first"
        logits_LW = held.runner.logits(held.hidden, self.rows)
        device = logits_LW.device
        sampling = RowSampling(
            torch.tensor(self.temperatures, dtype=torch.float32, device=device),
            torch.tensor(self.seeds, dtype=torch.int64, device=device),
            torch.tensor(self.positions, dtype=torch.int64, device=device),
        )
        tokens_L = held.ranks.best(logits_LW, sampling, held.ops)
        return tokens_L, held.ranks.join(logits_LW[self.whole]) if self.whole else logits_LW[:0]


@dataclass(frozen=True)
class _Logits:
    rows: list[int]

    def run(self, held: Held) -> Tensor:
        assert held.hidden is not None, "a pass comes first"
        return held.ranks.join(held.runner.logits(held.hidden, self.rows))


@dataclass(frozen=True)
class _Keep:
    pages: list[int]
    root: int
    nodes: list[int]

    def run(self, held: Held) -> None:
        held.runner.keep(self.pages, self.root, self.nodes)


@dataclass(frozen=True)
class _Propose:
    views: list[DraftView]

    def run(self, held: Held) -> TreeBatch:
        assert held.drafter is not None, "the draft is split"
        return held.drafter.propose(self.views)


@dataclass(frozen=True)
class _Observe:
    observed: list[Observed]

    def run(self, held: Held) -> None:
        assert held.drafter is not None and held.hidden is not None, "the draft is split, and a pass comes first"
        held.drafter.observe(self.observed, held.hidden.captured)


@dataclass(frozen=True)
class _Forget:
    request_id: int
    num_reusable: int

    def run(self, held: Held) -> None:
        assert held.drafter is not None, "the draft is split"
        held.drafter.forget(self.request_id, self.num_reusable)


@dataclass(frozen=True)
class _Reshape:
    shape: TreeShape

    def run(self, held: Held) -> None:
        assert held.drafter is not None, "the draft is split"
        held.drafter.reshape(self.shape)


class Everywhere:
    """Runs calls on every rank. A call that fails anywhere ends the group: the ranks may be out of step."""

    def __init__(self, leader: Leader, held: Held) -> None:
        self._leader = leader
        self.held = held

    def run(self, call: Call) -> Any:
        """Announce a call, make it, and return what it gives here (the call's own type)."""
        self._leader.send(call)
        try:
            return call.run(self.held)
        except Exception as error:
            raise self._leader.failure(error) from error

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank is lost."""
        self._leader.when_lost(callback)


class LeadingRunner:
    """The target of all ranks, as the engine sees it."""

    def __init__(self, everywhere: Everywhere) -> None:
        self._everywhere = everywhere

    @property
    def device(self) -> torch.device:
        """Where this rank's part lives."""
        return self._everywhere.held.runner.device

    @property
    def ops(self) -> Ops:
        """The kernels of this rank."""
        return self._everywhere.held.ops

    @property
    def two_forms(self) -> bool:
        """Whether the tokens of prompts are computed in another form than those of answers."""
        return self._everywhere.held.runner.two_forms

    def forward(self, batch: Batch, pages: Sequence[Sequence[int]]) -> Hidden:
        """Run every rank's part of the target over a batch."""
        hidden: Hidden = self._everywhere.run(_Forward(batch, [list(row) for row in pages]))
        return hidden

    def choose(self, hidden: Hidden, rows_L: Tensor, rows: Sequence[Row]) -> Chosen:
        """Return the target's token at each row; only rows that must be seen whole are brought together."""
        assert hidden is self._everywhere.held.hidden, "the ranks keep their last pass only"
        if not rows:  # a step that only computes parts of prompts
            return Chosen(rows_L, {})
        whole = [i for i, row in enumerate(rows) if row.params.shapes_logits or row.params.logprobs is not None]
        call = _Choose(
            rows_L.tolist(),
            [row.params.temperature for row in rows],
            [row.seed for row in rows],
            [row.position for row in rows],
            whole,
        )
        tokens_L, whole_WV = self._everywhere.run(call)
        if not whole:
            return Chosen(tokens_L, {})
        seen = choose(whole_WV, [rows[i] for i in whole], self._everywhere.held.ops)
        tokens_L[whole] = seen.tokens_L
        return Chosen(
            tokens_L,
            {whole[i]: logits_V for i, logits_V in seen.logits.items()},
            {whole[i]: error for i, error in seen.failed.items()},
        )

    def logits(self, hidden: Hidden, rows: Sequence[int]) -> Tensor:
        """Return whole logits of some rows of the last pass."""
        assert hidden is self._everywhere.held.hidden, "the ranks keep their last pass only"
        logits_LV: Tensor = self._everywhere.run(_Logits(list(rows)))
        return logits_LV

    def keep(self, pages: Sequence[int], root: int, nodes: Sequence[int]) -> None:
        """Move the keys of accepted nodes next to the root's, on every rank; nothing is said where nothing moves."""
        if list(nodes) != list(range(1, len(nodes) + 1)):
            self._everywhere.run(_Keep(list(pages), root, list(nodes)))

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank is lost."""
        self._everywhere.when_lost(callback)


class LeadingDrafter:
    """A split draft of all ranks, as the engine sees it."""

    def __init__(self, everywhere: Everywhere) -> None:
        self._everywhere = everywhere

    @property
    def _own(self) -> Drafter:
        drafter = self._everywhere.held.drafter
        assert drafter is not None, "the draft is split"
        return drafter

    @property
    def name(self) -> str:
        """What people call it."""
        return self._own.name

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target states it wants."""
        return self._own.captured_layers

    @property
    def shape(self) -> TreeShape | None:
        """The shape of its trees."""
        return self._own.shape

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest tree."""
        return self._own.max_nodes

    @property
    def scratch(self) -> int:
        """Slots it writes while drafting."""
        return self._own.scratch

    @property
    def has_kv(self) -> bool:
        """Whether it keeps keys."""
        return self._own.has_kv

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return a tree for each view."""
        short = [replace(view, tokens=_Ending(len(view.tokens), view.tokens[-1])) for view in views]
        trees: TreeBatch = self._everywhere.run(_Propose(short))
        return trees

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Show every rank what was committed; each has its own captured states, the same everywhere."""
        self._everywhere.run(_Observe(list(observed)))

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Drop what is kept for a request."""
        self._everywhere.run(_Forget(request_id, num_reusable))

    def reshape(self, shape: TreeShape) -> None:
        """Grow trees of another shape."""
        self._everywhere.run(_Reshape(shape))


@dataclass(frozen=True)
class _Ending(Sequence[int]):
    """All a draft reads of a text: how long it is and how it ends."""

    length: int
    last: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        assert index == -1, "only the ending is known"
        return self.last
