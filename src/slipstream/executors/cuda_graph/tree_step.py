"""One decoding step with fixed shapes whose rows are drafted trees; see `step` for its four parts.

Trees are grown on the device, level by level (EAGLE-2: expand the best, then keep a budget; or a static shape). Node i
of a tree lies i places behind the root in the order of keys, and attends to its own path as plain decoding would; of
the path that is kept, keys are then moved to where plain decoding has them.

Shape letters: R places, N nodes, D drafted tokens on the longest path, E = D + 1, L = R * N nodes of all rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.passes import ChainPasses, StepRows
from slipstream.executors.cuda_graph.state import StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers, StepKind
from slipstream.kernels import Sampled, SampleRows, TokenMasks, TreePaths, step_ops
from slipstream.kernels.reference.trees import kept_path, node_paths, simulated_lengths
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Hidden
from slipstream.speculation.grow import growth
from slipstream.speculation.levels import LevelRows, LevelsStart, levels_of
from slipstream.speculation.tree import Tree, relative_bits


class TreeStep:
    """The work of one kind of step with trees.

    `out_RE` is what the last one emitted: a count, the tokens, their nodes, and how many nodes each depth had.
    """

    def __init__(self, models: StepModels, buffers: StepBuffers, kind: StepKind) -> None:
        assert kind.tree is not None, "chains have steps of their own"
        device, num_nodes = models.device, kind.num_drafted + 1
        self._models, self._buffers, self.kind, self._shape = models, buffers, kind, kind.tree
        self._chains = step_ops(models.ops)
        self._rows = StepRows.of(buffers.state, kind.num_rows, -(-kind.max_keys // models.target_kv.page_size))
        self._nodes = ChainPasses(models, self._rows, num_nodes)
        self._kept = ChainPasses(models, self._rows, kind.tree.depth + 1)
        self._grow = growth(kind.tree, device)
        self._masks = TokenMasks(buffers.masks.words_MW, buffers.masks.row_L[: kind.num_rows * num_nodes])
        self._thresholds_K = buffers.thresholds_K[: kind.tree.depth]
        self._nothing_simulated_D = torch.full((kind.tree.depth,), -1, dtype=torch.int64, device=device)
        self.chain_RN = self._nodes.places.chain_RN
        self.parents_RN = torch.full_like(self.chain_RN, -1)
        self._paths = node_paths(self.parents_RN, kind.tree.depth)
        num_out = 1 + 2 * (kind.tree.depth + 1) + kind.tree.depth
        self.out_RE = torch.zeros(kind.num_rows, num_out, dtype=torch.int64, device=device)
        self._node_RE = torch.zeros(kind.num_rows, kind.tree.depth + 1, dtype=torch.int64, device=device)
        self.hidden: Hidden | None = None
        self.sampled: Sampled | None = None

    @property
    def drafted(self) -> tuple[Tensor, ...]:
        """What the host needs to know of the nodes, for `tree`."""
        return self.chain_RN, self.parents_RN

    @staticmethod
    def tree(drafted: Sequence[Tensor], place: int) -> Tree:
        """Return the nodes of a row, once what was `drafted` has come down; nobody asks how deep they lie."""
        tokens, parents = (values[place].tolist() for values in drafted)
        return Tree(tokens, parents, [0] * len(tokens), [-1] * len(tokens))

    def draft(self) -> None:
        """Place the nodes and grow a tree behind the root of each row."""
        models, rows, page_size = self._models, self._rows.chains, self._models.target_kv.page_size
        assert models.draft is not None and models.draft_kv is not None, "trees are drafted by a draft"
        self._chains.place_chains(rows, self._nodes.places, page_size)
        self._chains.place_chains(rows, self._kept.places, page_size)
        level_rows = LevelRows(rows.pages_RP, rows.committed_R, rows.temperature_R, rows.seed_R)
        start = LevelsStart(self._rows.feedback_RD, self._rows.logits_RV)
        depth = self._shape.depth
        grown = self._grow(levels_of(models.draft, models.draft_kv, models.ops, level_rows, start, depth))
        self.chain_RN[:, 1:] = grown.tokens_RC
        self.parents_RN[:, 1:] = grown.parents_RC + 1
        for kept, found in zip(self._paths, node_paths(self.parents_RN, self._shape.depth), strict=True):
            kept.copy_(found)

    def verify(self) -> None:
        """Run the target over roots and trees."""
        models = self._models
        self.hidden = models.target(self.chain_RN.flatten(), self.context(models.target_kv), models.captured_layers)

    def choose(self) -> None:
        """Let the target choose at every node along its own path, keep the path that agrees, and move its keys."""
        models, sampling, rows, paths = self._models, self._buffers.sampling, self._rows.chains, self._paths
        assert self.hidden is not None, "the target ran"
        tokens_RN, outcome = self.chain_RN, self._kept.outcome
        path_LD = torch.where(paths.on_path_RND, _along(tokens_RN, paths.nodes_RND), -1).flatten(0, 1)
        slot_L = self._rows.slot_R.repeat_interleave(tokens_RN.shape[1], output_size=tokens_RN.numel())
        at = SampleRows(slot_L, (rows.committed_R[:, None] + 1 + paths.depth_RN).flatten(), path_LD)
        logits_LV = models.target.ranks.join(models.target.logits(self.hidden.last_TD, models.ops))
        self.sampled = models.ops.sample(logits_LV, at, sampling, self._masks)
        chosen_RN = self.sampled.tokens_L.view_as(tokens_RN)
        simulated_R = simulated_lengths(rows.seed_R, rows.committed_R, self._thresholds_K)
        simulated_R = torch.where(rows.committed_R < rows.drafts_until_R, simulated_R, 0)
        kept = kept_path(tokens_RN, self.parents_RN, paths, chosen_RN, simulated_R)
        self._node_RE.copy_(kept.nodes_RE)
        chosen_RE, none_D = kept.chosen_RE, self._nothing_simulated_D
        self._chains.accept_chains(rows, kept.chain_RE, chosen_RE, none_D, outcome)
        models.ops.count(sampling, self._rows.slot_R, outcome.emitted_RN, outcome.out_RE[:, 0])
        self._move_keys()
        level_D = torch.arange(1, self._shape.depth + 1, device=tokens_RN.device)
        by_depth_RD = (paths.depth_RN[..., None] == level_D).sum(1)
        self.out_RE.copy_(torch.cat([outcome.out_RE, kept.nodes_RE, by_depth_RD], 1))

    def extend(self) -> None:
        """Run the draft over the path that was kept with the target's true states."""
        assert self.hidden is not None, "the target ran"
        first_R1 = torch.arange(0, self.chain_RN.numel(), self.chain_RN.shape[1], device=self.chain_RN.device)[:, None]
        node_L = (first_R1 + self._node_RE).flatten()
        self._kept.extend([state_TD.index_select(0, node_L) for state_TD in self.hidden.captured])

    def context(self, kv: KvCache) -> PagedContext:
        """Return the context of a pass of the target over every node of every row."""
        rows, places, paths, ops = self._rows.chains, self._nodes.places, self._paths, self._models.ops
        position_L = (rows.committed_R[:, None] + paths.depth_RN).flatten()
        batch = self._nodes.context(kv).batch
        if ops.places_matter:
            slots_LD = _along(places.slots_RN, paths.nodes_RND).flatten(0, 1).int()
            tree = TreePaths(rows.committed_R.int(), slots_LD)
            batch = replace(batch, kv_lens_R=self._kept.places.kv_lens_NR[-1], kv_index_T=position_L, tree=tree)
        else:
            batch = replace(batch, ancestors_T=relative_bits(self._sees_RNN()).flatten())
        return PagedContext(ops, position_L, places.slots_RN.flatten(), batch, kv)

    def _sees_RNN(self) -> Tensor:
        """Return which nodes each node sees: those of its path, the root and itself."""
        node_N = torch.arange(self.chain_RN.shape[1], device=self.chain_RN.device)
        return (self._paths.nodes_RND[..., None] == node_N).any(2) | (node_N == 0)

    def _move_keys(self) -> None:
        """Move the keys of the path that is kept next to the root's; what is not kept stays where it is."""
        models, slots_RN = self._models, self._nodes.places.slots_RN
        node_RD = self._node_RE[:, 1:]
        level_D = torch.arange(1, node_RD.shape[1] + 1, device=node_RD.device)
        from_RD = slots_RN.gather(1, torch.where(node_RD > 0, node_RD, level_D))
        to_RD = self._kept.places.slots_RN[:, 1:]
        for layer in models.target_kv.layers:
            self._chains.move_paths(layer, from_RD, to_RD)


def _along(values_RN: Tensor, nodes_RND: Tensor) -> Tensor:
    """Return what the nodes on each node's path have, [R, N, D]."""
    return values_RN[:, None].expand(-1, values_RN.shape[1], -1).gather(2, nodes_RND)


def make_step(models: StepModels, buffers: StepBuffers, kind: StepKind) -> "Step | TreeStep":
    """Return the work of a kind of step."""
    return Step(models, buffers, kind) if kind.tree is None else TreeStep(models, buffers, kind)
