"""A step's bookkeeping with torch alone: the specification of `slipstream.kernels.bookkeeping.StepOps`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.ops import Ops, RowSampling
from slipstream.kernels.reference.noise import scattered
from slipstream.kernels.reference.trees import NodePaths, expand_level, kept_path, rerank_trees, simulated_lengths
from slipstream.kernels.trees import Children, Growth, LevelNodes, TreeNodes, TreeOutcome


class TorchBookkeeping:
    """Does the bookkeeping one small operation at a time, beside any backend."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def place_chains(self, rows: ChainRows, places: ChainPlaces, page_size: int) -> None:
        """Write where the next nodes lie."""
        rows.committed_R.mul_(rows.active_R)
        node_N = torch.arange(places.chain_RN.shape[1], device=rows.committed_R.device)
        index_RN = rows.committed_R[:, None] + node_N
        column_RN = index_RN // page_size
        slots_RN = index_RN + (rows.pages_RP.gather(1, column_RN) - column_RN) * page_size
        places.chain_RN[:, 0] = rows.root_R
        places.index_RN.copy_(index_RN)
        places.slots_RN.copy_(slots_RN)
        places.position_RN.copy_(index_RN + 1)
        places.index_NR.copy_(index_RN.t())
        places.slots_NR.copy_(slots_RN.t())
        places.position_NR.copy_(index_RN.t() + 1)
        places.kv_lens_NR.copy_(index_RN.t() + 1)

    def propose(self, logits_RV: Tensor, token_ids_V: Tensor, sampling: RowSampling, out_R: Tensor) -> Tensor:
        """Return the token drafted for each row, and write it to `out_R` too."""
        token_R = self._ops.top_k(logits_RV, token_ids_V, sampling, 1)[1][:, 0]
        out_R.copy_(token_R)
        return token_R

    def accept_chains(
        self, rows: ChainRows, chain_RN: Tensor, chosen_RN: Tensor, thresholds_K: Tensor, outcome: ChainOutcome
    ) -> None:
        """Keep what agrees of each chain, write what came of it, and move roots and committed ends on."""
        num_rows, num_nodes = chain_RN.shape
        drafted_RK = chain_RN[:, 1:]
        word_R = scattered(rows.seed_R, rows.committed_R + 1)
        simulated_R = (word_R[:, None] < thresholds_K).sum(1)
        agreeing_R = (chosen_RN[:, :-1] == drafted_RK).long().cumprod(1).sum(1)
        accepted_R = torch.where((thresholds_K >= 0).any(), simulated_R, agreeing_R)
        accepted_R = accepted_R * (rows.committed_R < rows.drafts_until_R)
        node_N = torch.arange(num_nodes, device=chain_RN.device)
        kept_RN = node_N < accepted_R[:, None]
        emitted_RN = torch.where(kept_RN, torch.cat([drafted_RK, chosen_RN[:, -1:]], 1), chosen_RN)
        last_R = emitted_RN.gather(1, accepted_R[:, None])[:, 0]
        chosen_R = last_R >= 0
        counts_R = (accepted_R + chosen_R) * rows.active_R
        kept_R = emitted_RN.gather(1, (accepted_R[:, None] - 1).clamp(min=0))[:, 0]
        before_R = torch.where(accepted_R > 0, kept_R, rows.root_R)
        rows.root_R.copy_(torch.where(chosen_R, last_R, before_R))
        outcome.last_index_R.copy_(rows.committed_R + accepted_R)
        outcome.last_keys_R.copy_(rows.committed_R + accepted_R + 1)
        rows.committed_R.add_(counts_R)
        outcome.emitted_RN.copy_(emitted_RN.clamp(min=0))
        outcome.last_R.copy_(torch.arange(num_rows, device=chain_RN.device) * num_nodes + accepted_R)
        outcome.out_RE[:, 0] = counts_R
        outcome.out_RE[:, 1:] = emitted_RN

    def expand_level(
        self, growth: Growth, above: LevelNodes | None, children: Children, feedback_LH: Tensor | None
    ) -> LevelNodes:
        """Note a level's candidates, and return those that the draft is run on next."""
        return expand_level(growth, above, children, feedback_LH)

    def rerank_trees(self, growth: Growth, above: LevelNodes | None, children: Children, nodes: TreeNodes) -> None:
        """Keep what the plan says, and write the nodes."""
        rerank_trees(growth, above, children, nodes)

    def accept_trees(
        self, rows: ChainRows, nodes: TreeNodes, chosen_RN: Tensor, thresholds_K: Tensor, outcome: TreeOutcome
    ) -> None:
        """Keep of each tree the path that agrees, write what came of it, and move roots and committed ends on."""
        tokens_RN, (num_rows, depth), device = nodes.tokens_RN, outcome.from_RD.shape, chosen_RN.device
        level_D = torch.arange(1, depth + 1, device=device)
        paths = NodePaths(nodes.depth_RN, nodes.nodes_RND, nodes.depth_RN[..., None] >= level_D)
        simulated_R = simulated_lengths(rows.seed_R, rows.committed_R, thresholds_K)
        simulated_R = torch.where(rows.committed_R < rows.drafts_until_R, simulated_R, 0)
        kept = kept_path(tokens_RN, nodes.parents_RN, paths, chosen_RN, simulated_R)
        self.accept_chains(rows, kept.chain_RE, kept.chosen_RE, torch.full_like(level_D, -1), outcome.chain)
        by_depth_RD = (nodes.depth_RN[..., None] == level_D).sum(1)
        outcome.out_RX[:, 2 + depth :] = torch.cat([kept.nodes_RE, by_depth_RD], 1)
        first_R1 = torch.arange(num_rows, device=device)[:, None] * tokens_RN.shape[1]
        outcome.node_L.copy_((first_R1 + kept.nodes_RE).flatten())
        node_RD = kept.nodes_RE[:, 1:]
        outcome.from_RD.copy_(nodes.slots_RN.gather(1, torch.where(node_RD > 0, node_RD, level_D)))

    def move_paths(self, layers: Sequence[KvLayer], from_RD: Tensor, to_RD: Tensor) -> None:
        """Copy slots to slots in every layer."""
        for layer in layers:
            self._ops.move_kv(layer, from_RD.flatten(), to_RD.flatten())
