"""One decoding step with fixed shapes, in four parts that never ask the host: draft, verify, choose, extend.

Lengths, slots, acceptance and the next step's inputs are tensors that the parts read and write in place, so each can
be captured in a graph and launched again before anybody has seen what the last step emitted. Here every place of the
batch is drafted a chain of the same length, none at all is plain decoding; `tree_step` has trees. What differs between
rows (sampling, whether they draft, grammars) is in tensors. Places not in use compute on a page of their own and emit
nothing.

Shape letters: R places, K drafted tokens, N = K + 1 nodes, L = R * N nodes of all rows, E = N + 1 values handed out per
row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.passes import ChainPasses, StepRows
from slipstream.executors.cuda_graph.state import BatchState, StepModels
from slipstream.kernels import RowSampling, Sampled, SampleRows, SamplingState, TokenMasks, step_ops
from slipstream.kernels.sampling import num_words
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Hidden
from slipstream.speculation.tree import Tree, TreeShape

MOST_NODES = 512
"""Nodes of all trees of a step: beyond, a pass is bound by arithmetic, and a drafted node costs as much as a row."""
CHAIN_NODES = 16
"""Nodes of the longest chain that is drafted as one; a longer one is a tree."""


@dataclass(frozen=True)
class RowValues:
    """What a step handed out for a row.

    Args:
        tokens: those emitted, and then the target's at the node where the path ends, -1 where there was none.
        nodes: where each was chosen.
        by_depth: drafted nodes at each depth.
    """

    count: int
    tokens: Sequence[int]
    nodes: Sequence[int]
    by_depth: Sequence[int]


@dataclass(frozen=True)
class StepKind:
    """What makes one step's work different from another's, apart from the values in its tensors.

    Args:
        num_drafted: drafted nodes of a row.
        max_keys: no row has more keys by the end of the step.
        tree: how nodes hang together; None is a chain.
        notes: without drafts, whether the target's states are kept for a draft to follow later.
    """

    num_rows: int
    num_drafted: int
    max_keys: int
    tree: TreeShape | None = None
    notes: bool = False

    @property
    def has_states(self) -> bool:
        """Whether the target's pass keeps the states that the draft reads."""
        return self.num_drafted > 0 or self.notes

    def read(self, values: Sequence[int]) -> RowValues:
        """Return a row of what such a step handed out: of a tree, nodes and their numbers follow the tokens."""
        count, *rest = values
        if self.tree is None:
            return RowValues(count, rest, range(len(rest)), [1] * self.num_drafted)
        longest = self.tree.depth + 1
        return RowValues(count, rest[:longest], rest[longest : 2 * longest], rest[2 * longest :])


@dataclass(frozen=True)
class StepBuffers:
    """What all kinds of steps read and write besides the batch.

    Args:
        masks: what grammars leave, for as many nodes as there can be; row -1 where a node has none.
        thresholds_K: those of simulated acceptance; -1 where the target decides.
    """

    state: BatchState
    sampling: SamplingState
    masks: TokenMasks
    thresholds_K: Tensor

    @staticmethod
    def allocate(models: StepModels, sampling: SamplingState, max_context: int, most_nodes: int) -> "StepBuffers":
        """Return the buffers of steps with up to so many nodes a row; the sampler's last slot is nobody's."""
        num_places, device = len(sampling.records_SC), models.device
        max_keys = max_context + 2 * most_nodes  # a step in flight may go on past an end that was not read yet
        state = BatchState(models, num_places, -(-max_keys // models.target_kv.page_size))
        most = max((num_places - 1) * min(most_nodes, CHAIN_NODES), MOST_NODES)
        words_MW = torch.zeros(most + 1, num_words(sampling.vocab_size), dtype=torch.int32, device=device)
        row_L = torch.full((most,), -1, dtype=torch.int64, device=device)
        thresholds_K = torch.full((most_nodes - 1,), -1, dtype=torch.int64, device=device)
        return StepBuffers(state, sampling, TokenMasks(words_MW, row_L), thresholds_K)


class Step:
    """The work of one kind of step; `out_RE` is what the last one emitted: a count, then the tokens."""

    def __init__(self, models: StepModels, buffers: StepBuffers, kind: StepKind) -> None:
        device, num_nodes = models.device, kind.num_drafted + 1
        self._models, self._buffers, self.kind = models, buffers, kind
        self._chains = step_ops(models.ops)
        self._rows = StepRows.of(buffers.state, kind.num_rows, -(-kind.max_keys // models.target_kv.page_size))
        self._passes = ChainPasses(models, self._rows, num_nodes)
        self._masks = TokenMasks(buffers.masks.words_MW, buffers.masks.row_L[: kind.num_rows * num_nodes])
        self.out_RE, self.chain_RN = self._passes.outcome.out_RE, self._passes.places.chain_RN
        self._thresholds_K = buffers.thresholds_K[: kind.num_drafted]
        masked = models.draft is not None and models.draft.mask_features_C is not None and kind.num_drafted > 1
        self._masks_behind = ChainPasses(models, self._rows, kind.num_drafted - 1) if masked else None
        depth_K = torch.arange(kind.num_drafted, device=device)
        self._on_path_NK = torch.arange(num_nodes, device=device)[:, None] > depth_K
        self.hidden: Hidden | None = None
        self.sampled: Sampled | None = None

    @property
    def drafted(self) -> tuple[Tensor, ...]:
        """What the host needs to know of the nodes, for `tree`."""
        return (self.chain_RN,)

    @staticmethod
    def tree(drafted: Sequence[Tensor], place: int) -> Tree:
        """Return the nodes of a row, once what was `drafted` has come down."""
        tokens = drafted[0][place].tolist()
        nodes = list(range(len(tokens)))
        return Tree(tokens, [node - 1 for node in nodes], nodes, [-1] * len(nodes))

    def place(self) -> None:
        """Place the nodes behind what each row has committed."""
        self._chains.place_chains(self._rows.chains, self._passes.places, self._models.target_kv.page_size)

    def draft(self) -> None:
        """Place the nodes and draft behind the root of each row; keys of imagined tokens go behind the true ones."""
        places, draft, draft_kv = self._passes.places, self._models.draft, self._models.draft_kv
        rows = self._rows.chains
        self.place()
        token_R, logits_RV, feedback_RD = rows.root_R, self._rows.logits_RV, self._rows.feedback_RD
        foretold_KRV = self._masked_logits()
        for depth in range(self.kind.num_drafted):
            assert draft is not None and draft_kv is not None, "chains are drafted by a draft"
            if depth and foretold_KRV is not None:
                logits_RV = foretold_KRV[depth - 1]
            elif depth:
                hidden = draft(feedback_RD, token_R, self._passes.lone_node(depth - 1, draft_kv))
                logits_RV, feedback_RD = draft.logits(hidden.normed_TD, self._models.ops), hidden.feedback_TD
            sampling = RowSampling(rows.temperature_R, rows.seed_R, places.position_NR[depth])
            token_R = self._chains.propose(logits_RV, draft.token_ids_V, sampling, places.chain_RN[:, depth + 1])

    def _masked_logits(self) -> Tensor | None:
        """Return what a P-EAGLE draft foretells behind each row's first drafted token, in one pass; None for others."""
        models, masks = self._models, self._masks_behind
        if masks is None:
            return None
        assert models.draft is not None and models.draft_kv is not None, "it has masks"
        self._chains.place_chains(self._rows.chains, masks.places, models.target_kv.page_size)
        num_rows, num_masks = masks.places.chain_RN.shape
        hidden = models.draft.run_masks(num_rows, num_masks, masks.context(models.draft_kv))
        logits_LV = models.draft.logits(hidden.normed_TD, models.ops)
        return logits_LV.view(num_rows, num_masks, -1).transpose(0, 1).contiguous()

    def verify(self) -> None:
        """Run the target over roots and chains; without drafts, roots are placed here."""
        models = self._models
        if not self.kind.num_drafted:
            self.place()
        captured_layers = models.captured_layers if self.kind.has_states else ()
        self.hidden = models.target(self.chain_RN.flatten(), self.context(models.target_kv), captured_layers)

    def choose(self) -> None:
        """Let the target choose at every node by each row's own settings, and keep what agrees.

        Without drafts the target's states are kept here, where that is asked for.
        """
        models, places, sampling = self._models, self._passes.places, self._buffers.sampling
        assert self.hidden is not None, "the target ran"
        num_nodes, outcome = self.kind.num_drafted + 1, self._passes.outcome
        path_RNK = torch.where(self._on_path_NK, places.chain_RN[:, None, 1:], -1)
        slot_L = self._rows.slot_R.repeat_interleave(num_nodes, output_size=places.chain_RN.numel())
        rows = SampleRows(slot_L, places.position_RN.flatten(), path_RNK.reshape(len(slot_L), self.kind.num_drafted))
        logits_LV = models.target.ranks.join(models.target.logits(self.hidden.last_TD, models.ops))
        self.sampled = models.ops.sample(logits_LV, rows, sampling, self._masks)
        chosen_RN = self.sampled.tokens_L.view_as(places.chain_RN)
        self._chains.accept_chains(self._rows.chains, places.chain_RN, chosen_RN, self._thresholds_K, outcome)
        models.ops.count(sampling, self._rows.slot_R, outcome.emitted_RN, self.out_RE[:, 0])
        if self.kind.notes:
            self._buffers.state.note_late(self.kind.num_rows, outcome.emitted_RN[:, 0], self.hidden.captured)

    def extend(self) -> None:
        """Run the draft over the nodes with the target's true states."""
        assert self.hidden is not None, "the target ran"
        self._passes.extend(self.hidden.captured)

    def context(self, kv: KvCache) -> PagedContext:
        """Return the context of a pass over every node of every row."""
        return self._passes.context(kv)
