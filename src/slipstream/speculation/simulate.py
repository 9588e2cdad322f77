"""Simulated acceptance: keep drafted tokens by given rates instead of by what the target says.

For measuring what a draft of some quality would bring. The answers are then not the target's.

Shape letters: R requests, N nodes, E emitted tokens at most.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.reference.noise import scattered
from slipstream.speculation.accept import Accepted
from slipstream.speculation.tree import Tree


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
    uniform_R = scattered(seed_R, position_R)
    count_R = torch.zeros_like(uniform_R)
    for threshold in thresholds(rates):
        count_R = count_R + (uniform_R < threshold)
    return count_R


def thresholds(rates: Sequence[float]) -> list[int]:
    """Return what a pass's uniform number below 2^32 must lie below for each drafted token to be kept."""
    return [round(rate * 2**32) for rate in rates]


def simulate(trees: Sequence[Tree], chosen_RN: Tensor, counts: Sequence[int]) -> Accepted:
    """Keep up to `counts[r]` drafted tokens along each tree's first path, then the target's own token."""
    tokens, nodes = [], []
    for tree, row, count in zip(trees, chosen_RN.tolist(), counts, strict=True):
        path = [0]
        while len(path) <= count and path[-1] in tree.parents:
            path.append(tree.parents.index(path[-1]))
        tokens.append([*(tree.tokens[node] for node in path[1:]), row[path[-1]]])
        nodes.append(path)
    return Accepted.of(tokens, nodes, chosen_RN.device)
