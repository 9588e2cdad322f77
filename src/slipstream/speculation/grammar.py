"""What sampling asks of a grammar: which tokens may come next, along any path of a tree. No grammar package here.

Shape letters: M masks, W = ceil(V / 32) words of a mask, V vocabulary. Bit `t % 32` of word `t // 32` is token `t`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from slipstream.speculation.tree import Tree, TreeBatch, nodes_to


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


@runtime_checkable
class DraftingState(Protocol):
    """A state that also drafts: where only one text can follow, nobody has to guess it."""

    def draft(self, guess: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens to check after the answer so far; leaves the state as it was.

        They are the guess's as far as the grammar allows those, and the tokens of a text where no other can follow.
        """
        ...


def forced_text(state: object, most: int) -> list[int]:
    """Return the text that alone can follow an answer, as far as its grammar can say so: at most so many tokens."""
    if not _drafts(state):
        return []
    try:
        return state.draft((), most)
    except Exception:  # noqa: BLE001 (a request's own data: its masks fail as well, and end that request only)
        return []


def _drafts(state: object) -> TypeGuard[DraftingState]:
    """Tell whether a state drafts; asked of its class, since Python keeps that answer and looks at each object anew."""
    return issubclass(type(state), DraftingState)


def draft_along(trees: TreeBatch, states: Sequence[object], most: int) -> TreeBatch:
    """Return trees drafted anew by the grammars that can, with at most `most` tokens after their roots.

    What a grammar does not allow would be checked for nothing, and where it leaves one text only, that text belongs on
    the way: each of a tree's paths is drafted anew, the first ones first, and what they share is checked once.

    Args:
        states: where each answer stands; whatever does not draft keeps its tree, and so does an answer without a state.
    """
    if not any(map(_drafts, states)):
        return trees
    changed: dict[int, tuple[list[int], list[int]]] = {}
    for row, (tree, state) in enumerate(zip(trees.unpack(), states, strict=True)):
        found = tree_along(tree, state, most)
        if found is not None:
            changed[row] = found
    if not changed:
        return trees
    return trees.replace(list(changed), TreeBatch.pack(list(changed.values()), trees.tokens_RN.device))


def tree_along(tree: Tree, state: object, most: int, trunk: int = 0) -> tuple[list[int], list[int]] | None:
    """Return the tokens and parents of a tree, its paths as a grammar has them; None: it leaves them as they are.

    Args:
        most: drafted tokens.
        trunk: the node whose path comes first.
    """
    if not _drafts(state):
        return None
    tokens, parents = [tree.tokens[0]], [-1]
    children: dict[tuple[int, int], int] = {}
    others = set(range(len(tree.tokens))) - {*tree.parents, trunk}
    try:
        for end in (trunk, *sorted(others)):
            node = 0
            for token in state.draft(tree.path(end), most):
                known = children.get((node, token))
                if known is None:
                    if len(tokens) > most:
                        return tokens, parents
                    known = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = known
    except Exception:  # noqa: BLE001 (a request's own data: its masks fail as well, and end that request only)
        return None
    return tokens, parents


@dataclass(frozen=True)
class DraftedAnswer:
    """An answer, and the tree drafted for it.

    Args:
        tokens: of every node, parents before children; node 0 is the root, which the state has taken in.
        parents: of every node; the root's is not read.
    """

    state: GrammarState
    tokens: Sequence[int]
    parents: Sequence[int]

    def path(self, node: int) -> list[int]:
        """Return the drafted tokens from the root's child down to a node."""
        return [self.tokens[above] for above in nodes_to(self.parents, node)]


@dataclass
class FilledMasks:
    """Which mask belongs to which node; nodes are numbered through all answers, in their order.

    Args:
        rows: the mask of every node; -1 where any token may be chosen, since the path to the node breaks the grammar.
        failed: what went wrong at nodes whose mask could not be made; it concerns their own answer only.
    """

    rows: list[int] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)


@runtime_checkable
class BatchedState(Protocol):
    """A state whose kind makes the masks of many answers in one call."""

    @classmethod
    def fill_masks(cls, answers: Sequence[DraftedAnswer], words_MW: Tensor) -> FilledMasks:
        """Do what `fill_masks` of this module does, for answers whose states are all of this kind."""
        ...


def fill_masks(answers: Sequence[DraftedAnswer], words_MW: Tensor) -> FilledMasks:
    """Write the masks of all nodes of all answers; leaves the states as they were.

    Args:
        words_MW: int32, contiguous, on the CPU; a row for every node or more. Rows that no node has are undefined.
    """
    filled = FilledMasks()
    for kind, group in itertools.groupby(answers, lambda answer: type(answer.state)):
        batch, first = list(group), len(filled.rows)
        part_MW = words_MW[first : first + sum(len(answer.tokens) for answer in batch)]
        part = kind.fill_masks(batch, part_MW) if issubclass(kind, BatchedState) else fill_singly(batch, part_MW)
        filled.rows += [row + first if row >= 0 else row for row in part.rows]
        filled.failed.update({node + first: error for node, error in part.failed.items()})
    return filled


def fill_singly(answers: Sequence[DraftedAnswer], words_MW: Tensor) -> FilledMasks:
    """Do what `fill_masks` does with one call of `allowed` for each node."""
    filled = FilledMasks()
    for answer in answers:
        for node in range(len(answer.tokens)):
            row = len(filled.rows)
            filled.rows.append(-1)
            try:
                allowed_V = answer.state.allowed(answer.path(node))
            except Exception as error:  # noqa: BLE001 (a request's own data may fail that request only)
                filled.failed[row] = error
                continue
            if allowed_V is not None:
                words_MW[row] = _packed(allowed_V, words_MW.shape[1])
                filled.rows[row] = row
    return filled


def _packed(allowed_V: Tensor, num_words: int) -> Tensor:
    bits = np.zeros(32 * num_words, dtype=bool)
    bits[: len(allowed_V)] = allowed_V.numpy()
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
