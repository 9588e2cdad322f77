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
from slipstream.kernels import (
    Growth,
    GrowthRows,
    Sampled,
    SampleRows,
    TokenMasks,
    TreeNodes,
    TreeOutcome,
    TreePaths,
    step_ops,
)
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Hidden
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.levels import LevelsStart, levels_of
from slipstream.speculation.tree import Tree, relative_bits


class TreeStep:
    """The work of one kind of step with trees.

    `out_RE` is what the last one emitted: a count, the tokens, their nodes, and how many nodes each depth had.
    """

    def __init__(self, models: StepModels, buffers: StepBuffers, kind: StepKind) -> None:
        assert kind.tree is not None, "chains have steps of their own"
        device, num_nodes, depth = models.device, kind.num_drafted + 1, kind.tree.depth
        self._models, self._buffers, self.kind = models, buffers, kind
        self._books = step_ops(models.ops)
        self._rows = StepRows.of(buffers.state, kind.num_rows, -(-kind.max_keys // models.target_kv.page_size))
        self._passes = ChainPasses(models, self._rows, num_nodes)
        places, self._outcome = self._passes.places, TreeOutcome.allocate(kind.num_rows, depth, device)
        self._nodes = TreeNodes.allocate(places.chain_RN, places.slots_RN, depth)
        self._kept = ChainPasses(models, self._rows, depth + 1, self._outcome.chain)
        self._plan = plan_of(kind.tree, device)
        self._masks = TokenMasks(buffers.masks.words_MW, buffers.masks.row_L[: kind.num_rows * num_nodes])
        self._thresholds_K = buffers.thresholds_K[:depth]
        self.chain_RN, self.out_RE = places.chain_RN, self._outcome.out_RX
        self.hidden: Hidden | None = None
        self.sampled: Sampled | None = None

    @property
    def drafted(self) -> tuple[Tensor, ...]:
        """What the host needs to know of the nodes, for `tree`."""
        return self.chain_RN, self._nodes.parents_RN

    @staticmethod
    def tree(drafted: Sequence[Tensor], place: int) -> Tree:
        """Return the nodes of a row, once what was `drafted` has come down; nobody asks how deep they lie."""
        tokens, parents = (values[place].tolist() for values in drafted)
        return Tree(tokens, parents, [0] * len(tokens), [-1] * len(tokens))

    def draft(self) -> None:
        """Place the nodes and grow a tree behind the root of each row."""
        models, rows, places = self._models, self._rows.chains, self._passes.places
        page_size = models.target_kv.page_size
        assert models.draft is not None and models.draft_kv is not None, "trees are drafted by a draft"
        self._books.place_chains(rows, places, page_size)
        self._books.place_chains(rows, self._kept.places, page_size)
        grown_rows = GrowthRows(rows.pages_RP, rows.committed_R, places.position_NR[0], rows.temperature_R, rows.seed_R)
        start = LevelsStart(self._rows.feedback_RD, self._rows.logits_RV)
        depth = len(self._plan.widths) + 1
        levels = levels_of(models.draft, models.draft_kv, models.ops, grown_rows, start, depth)
        growth = Growth.start(self._plan, grown_rows, page_size)
        self._books.rerank_trees(growth, *grow(growth, levels, self._books), self._nodes)

    def verify(self) -> None:
        """Run the target over roots and trees."""
        models = self._models
        self.hidden = models.target(self.chain_RN.flatten(), self.context(models.target_kv), models.captured_layers)

    def choose(self) -> None:
        """Let the target choose at every node along its own path, keep the path that agrees, and move its keys."""
        models, sampling, rows, nodes = self._models, self._buffers.sampling, self._rows.chains, self._nodes
        assert self.hidden is not None, "the target ran"
        slot_L = self._rows.slot_R.repeat_interleave(nodes.tokens_RN.shape[1], output_size=nodes.tokens_RN.numel())
        at = SampleRows(slot_L, nodes.foretold_RN.flatten(), nodes.path_RND.flatten(0, 1))
        logits_LV = models.target.ranks.join(models.target.logits(self.hidden.last_TD, models.ops))
        self.sampled = models.ops.sample(logits_LV, at, sampling, self._masks)
        chosen_RN = self.sampled.tokens_L.view_as(nodes.tokens_RN)
        self._books.accept_trees(rows, nodes, chosen_RN, self._thresholds_K, self._outcome)
        models.ops.count(sampling, self._rows.slot_R, self._outcome.chain.emitted_RN, self.out_RE[:, 0])
        to_RD = self._kept.places.slots_RN[:, 1:]  # what is not kept stays where it is
        self._books.move_paths(models.target_kv.layers, self._outcome.from_RD, to_RD)

    def extend(self) -> None:
        """Run the draft over the path that was kept with the target's true states."""
        assert self.hidden is not None, "the target ran"
        self._kept.extend([state_TD.index_select(0, self._outcome.node_L) for state_TD in self.hidden.captured])

    def context(self, kv: KvCache) -> PagedContext:
        """Return the context of a pass of the target over every node of every row."""
        nodes, ops = self._nodes, self._models.ops
        position_L, slots_L = nodes.position_RN.flatten(), nodes.slots_RN.flatten()
        batch = self._passes.context(kv).batch
        if ops.places_matter:
            tree = TreePaths(nodes.root_R, nodes.slots_RND.flatten(0, 1))
            batch = replace(batch, kv_lens_R=self._kept.places.kv_lens_NR[-1], kv_index_T=position_L, tree=tree)
        else:
            batch = replace(batch, ancestors_T=relative_bits(self._sees_RNN()).flatten())
        return PagedContext(ops, position_L, slots_L, batch, kv)

    def _sees_RNN(self) -> Tensor:
        """Return which nodes each node sees: those of its path, the root and itself."""
        node_N = torch.arange(self.chain_RN.shape[1], device=self.chain_RN.device)
        return (self._nodes.nodes_RND[..., None] == node_N).any(2) | (node_N == 0)


def make_step(models: StepModels, buffers: StepBuffers, kind: StepKind) -> "Step | TreeStep":
    """Return the work of a kind of step."""
    return Step(models, buffers, kind) if kind.tree is None else TreeStep(models, buffers, kind)
