"""The bookkeeping of a step as operations on tensors: where nodes lie, what is drafted next, what is accepted.

Shape letters: R rows, N nodes of a row, V draft vocabulary, K drafted tokens, D drafted tokens on the longest path, H
draft width, L nodes of a level of all rows.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.ops import RowSampling
from slipstream.kernels.trees import Children, Growth, LevelNodes, TreeNodes, TreeOutcome


@runtime_checkable
class StepOps(Protocol):
    """A backend with kernels for a step's bookkeeping, which `reference.bookkeeping.TorchBookkeeping` specifies."""

    def place_chains(self, rows: ChainRows, places: ChainPlaces, page_size: int) -> None:
        """Write where the next nodes lie; a row not in use starts over, so that it never leaves its first page."""
        ...

    def propose(self, logits_RV: Tensor, token_ids_V: Tensor, sampling: RowSampling, out_R: Tensor) -> Tensor:
        """Return the token drafted for each row, int64 and contiguous, and write it to `out_R` too.

        It is the best entry of the perturbed logits, whose entry i is token `token_ids_V[i]`.
        """
        ...

    def accept_chains(
        self, rows: ChainRows, chain_RN: Tensor, chosen_RN: Tensor, thresholds_K: Tensor, outcome: ChainOutcome
    ) -> None:
        """Keep what agrees of each chain, write what came of it, and move roots and committed ends on.

        Drafted tokens are kept up to the first that is not the target's token before it. Where the target's token after
        the last one kept is below 0, nothing could be chosen: the row emits what was kept, and goes on from there; the
        outcome says -1 after it. Where thresholds are not negative (int64 [K], falling), as many are kept as a 32-bit
        number of the row's seed and position lies below, whatever the target says; a first one below 0 is the rule.
        """
        ...

    def expand_level(
        self, growth: Growth, above: LevelNodes | None, children: Children, feedback_LH: Tensor | None
    ) -> LevelNodes:
        """Note the children of a level's nodes as candidates, and return those that the draft is run on next.

        A child's cumulative score is its parent's and its own. So that none is above its parent's, an own score that
        rounding has put above 0 counts as 0, and what is no number as -inf.

        Args:
            above: the level's nodes; None is the root alone.
            feedback_LH: what the draft left for each of them; None where it is not run level by level.
        """
        ...

    def rerank_trees(self, growth: Growth, above: LevelNodes | None, children: Children, nodes: TreeNodes) -> None:
        """Keep what the plan says of all candidates, the last level's children among them, and write the nodes.

        Nodes are in the order of candidates. Where the best are kept, parents are: a child never scores above its
        parent, and equal scores go by that order.
        """
        ...

    def accept_trees(
        self, rows: ChainRows, nodes: TreeNodes, chosen_RN: Tensor, thresholds_K: Tensor, outcome: TreeOutcome
    ) -> None:
        """Keep of each tree the path that agrees with the target's tokens, as `accept_chains` keeps a chain.

        Where acceptance is simulated, first children are kept, as many as it says and there are.
        """
        ...

    def move_paths(self, layers: Sequence[KvLayer], from_RD: Tensor, to_RD: Tensor) -> None:
        """Copy slots to slots as `Ops.move_kv` does, in every layer; rows in use share no slot."""
        ...
