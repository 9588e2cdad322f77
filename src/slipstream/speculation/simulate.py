"""Simulated acceptance: keep drafted tokens by given rates instead of by what the target says.

For measuring what a draft of some quality would bring. The answers are then not the target's.

Shape letters: R requests, N nodes, E emitted tokens at most.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.speculation.accept import Accepted
from slipstream.speculation.tree import Tree

_SEED_STEP = 0x9E3779B97F4A7C15 - 2**64
_POSITION_STEP = 0xD1B54A32D192ED03 - 2**64
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def check_rates(rates: Sequence[float]) -> None:
    """Raise unless the rates can be shares of passes: between 0 and 1, and no later one above an earlier."""
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"simulated acceptance rates {list(rates)}: each lies between 0 and 1.")
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            f"simulated acceptance rates {list(rates)}: a token is only kept if the one before it was, so no rate can "
            "be above the one before."
        )


def simulated_counts(rates: Sequence[float], seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return how many drafted tokens each pass keeps, int64; over many passes, position p is kept with rate p.

    One uniform number decides the whole pass. It comes from the request's seed and the text's position, so the same
    request sees the same counts in every run and on every device.
    """
    uniform_R = (_mixed(seed_R * _SEED_STEP + position_R * _POSITION_STEP) >> 32) & (2**32 - 1)
    count_R = torch.zeros_like(uniform_R)
    for rate in rates:
        count_R = count_R + (uniform_R < round(rate * 2**32))
    return count_R


def simulate(trees: Sequence[Tree], chosen_RN: Tensor, counts: Sequence[int]) -> Accepted:
    """Keep up to `counts[r]` drafted tokens along each tree's first path, then the target's own token."""
    tokens, nodes = [], []
    for tree, row, count in zip(trees, chosen_RN.tolist(), counts, strict=True):
        path = [0]
        while len(path) <= count and path[-1] in tree.parents:
            path.append(tree.parents.index(path[-1]))
        tokens.append([*(tree.tokens[node] for node in path[1:]), row[path[-1]]])
        nodes.append(path)
    longest = max(map(len, nodes))

    def padded(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=chosen_RN.device)

    return Accepted(padded(tokens), padded(nodes), torch.tensor([len(path) for path in nodes], device=chosen_RN.device))


def _mixed(x: Tensor) -> Tensor:
    """Scatter the bits of int64 values (the finalizer of splitmix64; products wrap, which is what it wants)."""
    for shift, multiplier in _MIXERS:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    return x ^ ((x >> 31) & (2**33 - 1))
