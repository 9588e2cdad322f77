"""Acceptance: walk each tree from its root along the tokens the target chose; keep what agrees.

Shape letters: R requests, N nodes, E emitted tokens at most (a tree's depth + 1).
"""

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


def accept(trees: TreeBatch, chosen_RN: Tensor) -> Accepted:
    """Return the emitted tokens of each request; there is always at least one."""
    num_requests, num_nodes = trees.tokens_RN.shape
    valid_RN = trees.valid_RN
    at_R = torch.zeros(num_requests, dtype=torch.int64, device=chosen_RN.device)
    alive_R = torch.ones_like(at_R, dtype=torch.bool)
    counts_R = torch.zeros_like(at_R)
    tokens, nodes = [], []
    for _ in range(num_nodes):
        token_R = chosen_RN.gather(1, at_R[:, None])[:, 0]
        tokens.append(token_R)
        nodes.append(at_R)
        counts_R = counts_R + alive_R
        match_RN = valid_RN & (trees.parents_RN == at_R[:, None]) & (trees.tokens_RN == token_R[:, None])
        alive_R = alive_R & match_RN.any(-1)
        if not bool(alive_R.any()):
            break
        at_R = torch.where(alive_R, match_RN.long().argmax(-1), at_R)
    return Accepted(torch.stack(tokens, 1), torch.stack(nodes, 1), counts_R)
