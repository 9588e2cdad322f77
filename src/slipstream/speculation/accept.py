"""Acceptance: walk each tree from its root along the tokens the target chose; keep what agrees.

Shape letters: R requests, N nodes, E emitted tokens at most (a tree's depth + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.speculation.tree import TreeBatch


@dataclass(frozen=True)
class Accepted:
    """What a step emits: `tokens_RE[:count]`, each the target's own choice at node `nodes_RE`.

    The first `count - 1` were drafted; the last is the target's token where the draft ended or was wrong.
    """

    tokens_RE: Tensor
    nodes_RE: Tensor
    counts_R: Tensor

    @staticmethod
    def of(emitted: Sequence[Sequence[int]], paths: Sequence[Sequence[int]], device: torch.device) -> "Accepted":
        """Return what requests emit, and where each token was chosen."""
        longest = max(map(len, paths), default=1)

        def padded(rows: Sequence[Sequence[int]]) -> Tensor:
            rows = [[*row, *[0] * (longest - len(row))] for row in rows]
            return torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, longest)

        counts_R = torch.tensor([len(path) for path in paths], dtype=torch.int64, device=device)
        return Accepted(padded(emitted), padded(paths), counts_R)


def accept(trees: TreeBatch, chosen_RN: Tensor) -> Accepted:
    """Return the emitted tokens of each request; there is always at least one."""
    columns = (values.tolist() for values in (trees.sizes_R, trees.tokens_RN, trees.parents_RN, chosen_RN))
    emitted, paths = [], []
    for size, tokens, parents, chosen in zip(*columns, strict=True):
        # From last to first, so that of equal children the first is found.
        children = {(parents[node], tokens[node]): node for node in range(size - 1, 0, -1)}
        node: int | None = 0
        path = []
        while node is not None:
            path.append(node)
            node = children.get((node, chosen[node]))
        emitted.append([chosen[node] for node in path])
        paths.append(path)
    return Accepted.of(emitted, paths, chosen_RN.device)
