"""What the engine asks of a drafter, and the two that need no training: none, and n-gram lookup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.speculation.copying import Copier
from slipstream.speculation.tree import MAX_NODES, TreeBatch, TreeShape


@dataclass(frozen=True)
class DraftView:
    """A request as a drafter sees it when a tree is wanted.

    Args:
        tokens: everything known, the last of which is the tree's root; all but the root are committed.
        pages: the request's pages, with room for the drafter's own scratch keys after the committed ones.
        wanted: tokens the request may still be given.
    """

    request_id: int
    tokens: Sequence[int]
    pages: Sequence[int]
    temperature: float
    seed: int
    wanted: int


@dataclass(frozen=True)
class Observed:
    """Positions of a request the target has just committed.

    Args:
        start: the first of them.
        next_tokens: for each, the token that follows it.
        rows: for each, its row in the captured states of the pass.
    """

    request_id: int
    start: int
    next_tokens: Sequence[int]
    rows: Sequence[int]
    pages: Sequence[int]


class Drafter(Protocol):
    """Proposes trees; may learn from the target's captured states."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target states this drafter wants to see (k = blocks applied)."""
        ...

    @property
    def shape(self) -> TreeShape | None:
        """The shape of its trees; None if it drafts nothing."""
        ...

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest tree, the root included."""
        ...

    @property
    def scratch(self) -> int:
        """Slots past the committed ones that it writes while drafting."""
        ...

    @property
    def has_kv(self) -> bool:
        """Whether it keeps keys of its own in the request's pages (slot t then depends on token t + 1)."""
        ...

    @property
    def window(self) -> int | None:
        """How many of its own keys it reads, the last ones; None for all."""
        ...

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return a tree for each view, in order."""
        ...

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Take in what the target committed in this step."""
        ...

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Drop what is kept for a request (it ended, or starts over), before its pages go back.

        Args:
            num_reusable: keys of so many positions, the first ones, may serve other requests from now on.
        """
        ...

    def lose_page(self, page: int) -> None:
        """Drop what is kept about a page's content: it is given to somebody else."""
        ...

    def pretend(self, request_id: int, length: int) -> None:
        """Take a request's first `length` tokens for observed (measurements)."""
        ...

    def reshape(self, shape: TreeShape) -> None:
        """Propose trees of another shape from now on; ConfigError if that is not a shape this drafter can grow."""
        ...


class NoDrafter:
    """Drafts nothing: every tree is a lone root."""

    name = "none"
    shape: TreeShape | None = None
    captured_layers: tuple[int, ...] = ()
    max_nodes = 1
    scratch = 0
    has_kv = False
    window = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return lone roots."""
        return TreeBatch.lone_roots([view.tokens[-1] for view in views], self._device)

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Learn nothing."""

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Keep nothing."""

    def lose_page(self, page: int) -> None:
        """Keep nothing."""

    def pretend(self, request_id: int, length: int) -> None:
        """Need nothing."""

    def reshape(self, shape: TreeShape) -> None:
        """Refuse: there is nothing to shape."""
        raise ConfigError(f"{shape}: there is no draft to grow it. Start with a draft (or draft ngram).")


class CopyDrafter:
    """Copies alone (n-gram lookup): chains of what followed an earlier occurrence of the text's ending; no training."""

    name = "n-gram"
    captured_layers: tuple[int, ...] = ()
    scratch = 0
    has_kv = False
    window = None
    least = 0.1
    """Chance below which a run ends: of what it goes on with, next to nothing would be kept."""

    def __init__(self, copier: Copier, device: torch.device) -> None:
        _check_length(copier.most)
        self.copier = copier
        self._device = device

    @property
    def shape(self) -> TreeShape | None:
        """A chain."""
        return TreeShape.chain(self.copier.most)

    @property
    def max_nodes(self) -> int:
        """Nodes of a full chain and its root."""
        return self.copier.most + 1

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return chains; a request whose ending is new gets a lone root."""
        chains = []
        for view in views:
            text = self.copier.see(view.request_id, view.tokens)
            most = min(self.copier.most, view.wanted - 1)
            chains.append([view.tokens[-1], *text.copy((), most, self.least).tokens])
        return TreeBatch.chains(chains, self._device)

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Learn nothing: the text itself is the index."""

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Drop the request's text."""
        self.copier.forget(request_id)

    def lose_page(self, page: int) -> None:
        """Keep nothing of pages."""

    def pretend(self, request_id: int, length: int) -> None:
        """Need nothing: the text itself is the index."""

    def reshape(self, shape: TreeShape) -> None:
        """Draft chains of another length."""
        if shape.width > 1 or shape.num_nodes != shape.depth + 1:
            raise ConfigError(f"{shape}: n-gram lookup drafts chains only; give width 1.")
        _check_length(shape.depth)
        self.copier.most = shape.depth


def _check_length(length: int) -> None:
    if not 1 <= length < MAX_NODES:
        raise ConfigError(f"An n-gram draft of {length} tokens is impossible; it lies between 1 and {MAX_NODES - 1}.")
