"""What sampling asks of a grammar: which tokens may come next, along any path of a tree. No grammar package here."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class GrammarState(Protocol):
    """Where one answer stands in its grammar."""

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        ...

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return which tokens (bool [V]) may follow the answer so far and then `path`; leaves the state as it was.

        None means that the path itself breaks the grammar. The target never chooses along such a path, so what it
        would choose at its end does not matter.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar; answers share it."""

    def start(self) -> GrammarState:
        """Return the state of an answer that has not begun."""
        ...
