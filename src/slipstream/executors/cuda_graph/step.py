"""One decoding step with fixed shapes, in four parts that never ask the host: draft, verify, choose, extend.

Lengths, slots, acceptance and the next step's inputs are tensors that the parts read and write in place, so each can
be captured in a graph and launched again before anybody has seen what the last step emitted. Every place of the batch
is drafted a chain of the same length; none at all is plain decoding. What differs between rows (sampling, whether they
draft, grammars) is in tensors. Places not in use compute on a page of their own and emit nothing.

Shape letters: R places, K drafted tokens, N = K + 1 nodes, P pages of a row, E = N + 1 values handed out per row,
D draft width, V draft vocabulary, L = R * N nodes of all rows, W words of a mask.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.state import BatchState, StepModels
from slipstream.kernels import (
    AttentionBatch,
    ChainOutcome,
    ChainPlaces,
    ChainRows,
    Ending,
    RowSampling,
    Sampled,
    SampleRows,
    SamplingState,
    TokenMasks,
    step_ops,
)
from slipstream.kernels.sampling import num_words
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Hidden


@dataclass(frozen=True)
class StepKind:
    """What makes one step's work different from another's, apart from the values in its tensors.

    Args:
        max_keys: no row has more keys by the end of the step.
        follows: the draft is run over what a step without drafts emits, too.
    """

    num_rows: int
    num_drafted: int
    max_keys: int
    follows: bool = False

    @property
    def extends(self) -> bool:
        """Whether the draft is run over what the step emits."""
        return self.num_drafted > 0 or self.follows


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
        most = (num_places - 1) * most_nodes
        words_MW = torch.zeros(most + 1, num_words(sampling.vocab_size), dtype=torch.int32, device=device)
        row_L = torch.full((most,), -1, dtype=torch.int64, device=device)
        thresholds_K = torch.full((most_nodes - 1,), -1, dtype=torch.int64, device=device)
        return StepBuffers(state, sampling, TokenMasks(words_MW, row_L), thresholds_K)


class Step:
    """The work of one kind of step; `out_RE` is what the last one emitted: a count, then the tokens."""

    def __init__(self, models: StepModels, buffers: StepBuffers, kind: StepKind) -> None:
        device, state = models.device, buffers.state
        self._models, self._buffers, self.kind = models, buffers, kind
        self._chains = step_ops(models.ops)
        num_rows, num_nodes = kind.num_rows, kind.num_drafted + 1
        num_columns = -(-kind.max_keys // models.target_kv.page_size)
        values = {name: getattr(state.rows, name)[:num_rows] for name in ChainRows.__dataclass_fields__}
        self._rows = ChainRows(**{**values, "pages_RP": state.rows.pages_RP[:num_rows, :num_columns]})
        self._slot_R = state.slot_R[:num_rows]
        self._feedback_RD, self._logits_RV = state.feedback_RD[:num_rows], state.logits_RV[:num_rows]
        self._masks = TokenMasks(buffers.masks.words_MW, buffers.masks.row_L[: num_rows * num_nodes])
        self._places = ChainPlaces.allocate(num_rows, num_nodes, device)
        self._outcome = ChainOutcome.allocate(num_rows, num_nodes, device)
        self.out_RE, self.chain_RN = self._outcome.out_RE, self._places.chain_RN
        self._thresholds_K = buffers.thresholds_K[: kind.num_drafted]
        rows_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._one_each_R1, self._starts_R1 = rows_R1, rows_R1 * num_nodes
        self._ones_L = torch.full((num_rows * num_nodes,), -1, dtype=torch.int64, device=device)
        depth_K = torch.arange(kind.num_drafted, device=device)
        self._on_path_NK = torch.arange(num_nodes, device=device)[:, None] > depth_K
        self.hidden: Hidden | None = None
        self.sampled: Sampled | None = None

    def draft(self) -> None:
        """Place the nodes and draft behind the root of each row; keys of imagined tokens go behind the true ones."""
        places, draft, draft_kv = self._places, self._models.draft, self._models.draft_kv
        self._chains.place_chains(self._rows, places, self._models.target_kv.page_size)
        token_R, logits_RV, feedback_RD = self._rows.root_R, self._logits_RV, self._feedback_RD
        for depth in range(self.kind.num_drafted):
            assert draft is not None and draft_kv is not None, "chains are drafted by a draft"
            if depth:
                hidden = draft(feedback_RD, token_R, self._draft_context(depth - 1, draft_kv))
                logits_RV, feedback_RD = draft.logits(hidden.normed_TD, self._models.ops), hidden.feedback_TD
            sampling = RowSampling(self._rows.temperature_R, self._rows.seed_R, places.position_NR[depth])
            token_R = self._chains.propose(logits_RV, draft.token_ids_V, sampling, places.chain_RN[:, depth + 1])

    def verify(self) -> None:
        """Run the target over roots and chains."""
        models = self._models
        captured_layers = models.captured_layers if self.kind.extends else ()
        ctx = self.context(models.target_kv)
        self.hidden = models.target(self._places.chain_RN.flatten(), ctx, captured_layers)

    def choose(self) -> None:
        """Let the target choose at every node by each row's own settings, and keep what agrees."""
        models, places, sampling = self._models, self._places, self._buffers.sampling
        assert self.hidden is not None, "the target ran"
        num_nodes = self.kind.num_drafted + 1
        path_RNK = torch.where(self._on_path_NK, places.chain_RN[:, None, 1:], -1)
        slot_L = self._slot_R.repeat_interleave(num_nodes, output_size=len(self._ones_L))
        rows = SampleRows(slot_L, places.position_RN.flatten(), path_RNK.reshape(len(slot_L), self.kind.num_drafted))
        logits_LV = models.target.ranks.join(models.target.logits(self.hidden.last_TD, models.ops))
        self.sampled = models.ops.sample(logits_LV, rows, sampling, self._masks)
        chosen_RN = self.sampled.tokens_L.view_as(places.chain_RN)
        self._chains.accept_chains(self._rows, places.chain_RN, chosen_RN, self._thresholds_K, self._outcome)
        models.ops.count(sampling, self._slot_R, self._outcome.emitted_RN, self.out_RE[:, 0])

    def extend(self) -> None:
        """Run the draft over the nodes with the target's true states, and keep what it left at the last accepted one.

        The nodes before that one matter for their keys alone, and those behind it are run too, to keep shapes fixed:
        their keys lie where the next step writes.
        """
        models, outcome = self._models, self._outcome
        assert models.draft is not None and models.draft_kv is not None, "only drafts are extended"
        assert self.hidden is not None, "the target ran"
        fused_LD = models.draft.fuse(self.hidden.captured, models.ops)
        ctx = self.context(models.draft_kv)
        last = self._lone_nodes(ctx.batch, outcome.last_keys_R, outcome.last_index_R)
        ctx = replace(ctx, ending=Ending(outcome.last_R, last))
        hidden = models.draft(fused_LD, outcome.emitted_RN.flatten(), ctx)
        self._feedback_RD.copy_(hidden.feedback_TD)
        self._logits_RV.copy_(models.draft.logits(hidden.normed_TD, models.ops))

    def context(self, kv: KvCache) -> PagedContext:
        """Return the context of a pass over every node of every row."""
        places, index_L = self._places, self._places.index_RN.flatten()
        batch = AttentionBatch(
            query_starts_R1=self._starts_R1,
            kv_lens_R=places.kv_lens_NR[-1],
            page_table_RP=self._rows.pages_RP,
            kv_index_T=index_L,
            ancestors_T=self._ones_L,
            page_size=kv.page_size,
            max_queries=self.kind.num_drafted + 1,
            max_keys=self._rows.pages_RP.shape[1] * kv.page_size,
        )
        return PagedContext(self._models.ops, index_L, places.slots_RN.flatten(), batch, kv)

    def _draft_context(self, node: int, draft_kv: KvCache) -> PagedContext:
        """Return the context of one imagined slot per row, in the place of `node`."""
        places = self._places
        batch = self._lone_nodes(self.context(draft_kv).batch, places.kv_lens_NR[node], places.index_NR[node])
        return PagedContext(self._models.ops, places.index_NR[node], places.slots_NR[node], batch, draft_kv)

    def _lone_nodes(self, batch: AttentionBatch, keys_R: Tensor, index_R: Tensor) -> AttentionBatch:
        """Return a batch of one node per row: how many keys it sees, and where it lies among them."""
        return replace(
            batch,
            query_starts_R1=self._one_each_R1,
            kv_lens_R=keys_R,
            kv_index_T=index_R,
            ancestors_T=self._ones_L[: self.kind.num_rows],
            max_queries=1,
        )
