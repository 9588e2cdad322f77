"""Several sources in one tree: beside what a draft proposes, what the text itself would go on with.

After every node of a draft's tree the text may go on as it did before. All these runs grow together, the likeliest next
token of any first; tokens that the tree already has at their place cost nothing. kernels/cpu/native/copies.h is the
same for chains, in C++.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.kernels import CopyText
from slipstream.speculation.tree import MAX_NODES


@dataclass
class Guess:
    """A tree under way: its nodes' tokens and parents, the root (token, -1) first, and their log-probabilities."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node."""
        path = []
        while node > 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


@dataclass
class _Run:
    """What goes on after a node: tokens, each with its chance, and how far it has got."""

    node: int
    depth: int
    tokens: Sequence[int]
    chances: Sequence[float]
    step: int = 0


def add_copies(guess: Guess, text: CopyText, most: int, most_depth: int, least: float) -> None:
    """Add at most so many copied nodes, each with a chance of being kept no less than `least`, the likeliest first."""
    runs = []
    for node in range(len(guess.tokens)):
        path, before = guess.path(node), math.exp(guess.scores[node])
        if before >= least:
            tokens, chances = text.copy(path, MAX_NODES, least / before)
            if tokens:
                runs.append(_Run(node, len(path), tokens, [before * chance for chance in chances]))
    children = {(guess.parents[node], guess.tokens[node]): node for node in range(len(guess.tokens) - 1, 0, -1)}
    limit = min(len(guess.tokens) + most, MAX_NODES)
    while runs := [run for run in runs if run.step < len(run.tokens) and run.depth < most_depth]:
        best = max(runs, key=lambda run: run.chances[run.step])
        token = best.tokens[best.step]
        child = children.get((best.node, token))
        if child is None:
            if len(guess.tokens) == limit:
                return
            child = children[best.node, token] = len(guess.tokens)
            guess.tokens.append(token)
            guess.parents.append(best.node)
            guess.scores.append(math.log(best.chances[best.step]))
        best.node, best.step, best.depth = child, best.step + 1, best.depth + 1
