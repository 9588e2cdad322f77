"""Several sources in one tree: what a draft proposes, and what the text itself would go on with after every node of it.

Each says something of the other's token. Where they name the same one it is kept unless both are wrong; where they
differ, the text is believed less than it says, as was measured. Nodes of all requests come one after another, the
likeliest first, as long as they are worth their rows. kernels/cpu/native/copies.h is the same for chains, in C++.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.kernels import CopiedRun, CopyText, Cut
from slipstream.speculation.tree import MAX_NODES


@dataclass(frozen=True)
class Drafted:
    """What a draft proposes: its nodes' tokens and parents, the root (token, -1) first, and their log-probabilities.

    Nodes that were not drafted after all have -inf.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True)
class CopyLimits:
    """How many nodes may be copied beside a draft's, and how long a path may be."""

    nodes: int
    depth: int


@dataclass(frozen=True)
class Grown:
    """A tree's tokens and parents, from its root on; the first nodes after it, `guessed` of them, are the draft's."""

    tokens: list[int]
    parents: list[int]
    guessed: int


@dataclass
class _Run:
    """What goes on after a node: tokens, each with its chance, and how far it has got."""

    after: int
    depth: int
    tokens: Sequence[int]
    chances: Sequence[float]
    step: int = 0


def grow(
    drafted: Sequence[Drafted], texts: Sequence[CopyText | None], limits: Sequence[CopyLimits], cut: Cut
) -> list[Grown]:
    """Let trees grow together out of what was drafted and what texts go on with."""
    trees = [_Growing(*each, cut) for each in zip(drafted, texts, limits, strict=True)]
    rows = len(trees)
    while trees:
        best = max(trees, key=lambda tree: tree.likeliest)
        if best.likeliest < 0 or best.likeliest < cut.price(rows):
            break
        best.take()
        rows += 1
    return [tree.grown() for tree in trees]


class _Growing:
    """One request's tree under way."""

    def __init__(self, drafted: Drafted, text: CopyText | None, limits: CopyLimits, cut: Cut) -> None:
        self._drafted, self._least = drafted, cut.least
        self._chances, self._runs = _chances(drafted, text, cut)
        self._left = min(limits.nodes, MAX_NODES - 1 - sum(chance >= 0 for chance in self._chances[1:]))
        self._most_depth = limits.depth
        self._taken = [0]  # the draft's nodes, the root first
        self._copied: list[tuple[int, int]] = []  # token and parent; a copied parent counts from behind the draft's
        self._find()

    def take(self) -> None:
        """Add the likeliest node."""
        if isinstance(self._best, int):
            self._taken.append(self._best)
        elif self._best is not None:
            run, size = self._best, len(self._drafted.tokens)
            self._copied.append((run.tokens[run.step], run.after))
            run.after, run.depth, run.step = size + len(self._copied) - 1, run.depth + 1, run.step + 1
        self._find()

    def grown(self) -> Grown:
        """Return the tree: the draft's nodes in their order, then what was copied."""
        kept, size = sorted(self._taken), len(self._drafted.tokens)
        place = {node: index for index, node in enumerate(kept)}
        place |= {size + index: len(kept) + index for index in range(len(self._copied))}
        tokens = [self._drafted.tokens[node] for node in kept] + [token for token, _ in self._copied]
        parents = [place.get(self._drafted.parents[node], -1) for node in kept]
        return Grown(tokens, parents + [place[parent] for _, parent in self._copied], len(kept) - 1)

    def _find(self) -> None:
        """Find the likeliest node that may come next, and its chance; -1 without any."""
        self._best: int | _Run | None = None
        self.likeliest, taken = -1.0, set(self._taken)
        for node in range(1, len(self._chances)):
            if node not in taken and self._drafted.parents[node] in taken and self._chances[node] > self.likeliest:
                self._best, self.likeliest = node, self._chances[node]
        for start, run in self._runs.items():
            if start not in taken or run.step == len(run.tokens) or run.depth >= self._most_depth:
                continue
            if self._least <= run.chances[run.step] > self.likeliest and len(self._copied) < self._left:
                self._best, self.likeliest = run, run.chances[run.step]


def _chances(drafted: Drafted, text: CopyText | None, cut: Cut) -> tuple[list[float], dict[int, _Run]]:
    """Return the chance of every drafted node, -1 where it is too low to come at all, and the runs beside them."""
    chances, runs = [1.0] + [-1.0] * (len(drafted.tokens) - 1), {}
    paths: list[list[int]] = [[] for _ in drafted.tokens]
    for node, path in enumerate(paths):
        if chances[node] < 0:
            continue
        run = CopiedRun([], []) if text is None else text.copy(path, MAX_NODES, 0.0)
        copy = run.chances[0] if run.tokens else 0.0
        shares = {
            child: math.exp(cut.trust * (score - drafted.scores[node]))
            for child, (parent, score) in enumerate(zip(drafted.parents, drafted.scores, strict=True))
            if parent == node and score > -math.inf
        }
        agreed = any(drafted.tokens[child] == run.tokens[0] for child in shares) if run.tokens else False
        if shares and not agreed:
            copy *= copy  # a text that the draft contradicts is right less often than it says
        together = min(sum(shares.values()), 1.0)
        for child, share in shares.items():
            if agreed:
                same = drafted.tokens[child] == run.tokens[0]
                chance = 1.0 - (1.0 - copy) * (1.0 - share) if same else share * (1.0 - copy)
            else:
                chance = share * (1.0 - copy) / (1.0 - copy * together)
            paths[child] = [*path, drafted.tokens[child]]
            if chances[node] * chance >= math.exp(cut.trust * cut.floor):
                chances[child] = chances[node] * chance
        if copy and not agreed:
            beside = chances[node] * copy * (1.0 - together) / (1.0 - copy * together)
            runs[node] = _Run(node, len(path), run.tokens, [beside * chance / run.chances[0] for chance in run.chances])
    return chances, runs
