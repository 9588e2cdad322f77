"""Passes over chains of nodes behind each row's committed end, as captured steps run them.

Shape letters: R places, N nodes, P pages of a row, L = R * N nodes of all rows, D draft width, V draft vocabulary, W
late positions, F the target's captured states of one position side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.executors.cuda_graph.state import MOST_LATE, BatchState, StepModels
from slipstream.kernels import AttentionBatch, ChainOutcome, ChainPlaces, ChainRows, Ending, step_ops
from slipstream.models.context import KvCache, PagedContext


@dataclass(frozen=True)
class StepRows:
    """The first places of the batch, as far as one kind of step goes; views of its state."""

    chains: ChainRows
    slot_R: Tensor
    feedback_RD: Tensor
    logits_RV: Tensor

    @staticmethod
    def of(state: BatchState, num_rows: int, num_columns: int) -> "StepRows":
        """Return so many places, with so many of their pages."""
        values = {name: getattr(state.rows, name)[:num_rows] for name in ChainRows.__dataclass_fields__}
        chains = ChainRows(**{**values, "pages_RP": state.rows.pages_RP[:num_rows, :num_columns]})
        return StepRows(chains, state.slot_R[:num_rows], state.feedback_RD[:num_rows], state.logits_RV[:num_rows])


class ChainPasses:
    """Contexts of passes over chains of one length; what they come to goes to `outcome`, if that is given."""

    def __init__(self, models: StepModels, rows: StepRows, num_nodes: int, outcome: ChainOutcome | None = None) -> None:
        device, num_rows = models.device, len(rows.slot_R)
        self._models, self._rows = models, rows
        self.places = ChainPlaces.allocate(num_rows, num_nodes, device)
        self.outcome = outcome or ChainOutcome.allocate(num_rows, num_nodes, device)
        rows_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.one_each_R1, self.starts_R1 = rows_R1, rows_R1 * num_nodes
        self.ones_L = torch.full((num_rows * num_nodes,), -1, dtype=torch.int64, device=device)

    def context(self, kv: KvCache) -> PagedContext:
        """Return the context of a pass over every node of every row."""
        places, index_L = self.places, self.places.index_RN.flatten()
        pages_RP = self._rows.chains.pages_RP
        batch = AttentionBatch(
            query_starts_R1=self.starts_R1,
            kv_lens_R=places.kv_lens_NR[-1],
            page_table_RP=pages_RP,
            kv_index_T=index_L,
            ancestors_T=self.ones_L,
            page_size=kv.page_size,
            max_queries=places.chain_RN.shape[1],
            max_keys=pages_RP.shape[1] * kv.page_size,
        )
        return PagedContext(self._models.ops, index_L, places.slots_RN.flatten(), batch, kv)

    def lone_node(self, node: int, kv: KvCache) -> PagedContext:
        """Return the context of one node per row."""
        places = self.places
        batch = self._lone_nodes(self.context(kv).batch, places.kv_lens_NR[node], places.index_NR[node])
        return PagedContext(self._models.ops, places.index_NR[node], places.slots_NR[node], batch, kv)

    def extend(self, captured: Sequence[Tensor]) -> None:
        """Run the draft over what was emitted, with the target's true states, and keep what it left at the last node.

        The nodes before that one matter for their keys alone, and those behind it are run too, to keep shapes fixed:
        their keys lie where the next step writes.

        Args:
            captured: the target's states at the nodes, [L, width] each.
        """
        models, outcome = self._models, self.outcome
        assert models.draft is not None and models.draft_kv is not None, "only drafts are extended"
        fused_LD = models.draft.fuse(tuple(captured), models.ops)
        ctx = self.context(models.draft_kv)
        last = self._lone_nodes(ctx.batch, outcome.last_keys_R, outcome.last_index_R)
        ctx = replace(ctx, ending=Ending(outcome.last_R, last))
        hidden = models.draft(fused_LD, outcome.emitted_RN.flatten(), ctx)
        self._rows.feedback_RD.copy_(hidden.feedback_TD)
        self._rows.logits_RV.copy_(models.draft.logits(hidden.normed_TD, models.ops))

    def _lone_nodes(self, batch: AttentionBatch, keys_R: Tensor, index_R: Tensor) -> AttentionBatch:
        """Return a batch of one node per row: how many keys it sees, and where it lies among them."""
        return replace(
            batch,
            query_starts_R1=self.one_each_R1,
            kv_lens_R=keys_R,
            kv_index_T=index_R,
            ancestors_T=self.ones_L[: len(index_R)],
            max_queries=1,
        )


class CatchUp:
    """Lets the draft follow what rows were decoded without it, up to `MOST_LATE` positions each, in one pass.

    Rows that are less late compute positions that are not theirs yet; the next step writes there.
    """

    def __init__(self, models: StepModels, state: BatchState, num_rows: int, num_columns: int) -> None:
        rows = StepRows.of(state, num_rows, num_columns)
        self._models, self._state, self._rows = models, state, rows
        self._begins = replace(rows.chains, committed_R=torch.zeros_like(rows.chains.committed_R))
        self._passes = ChainPasses(models, replace(rows, chains=self._begins), MOST_LATE)

    def run(self) -> None:
        """Run the pass; nobody is late then."""
        models, state, rows, outcome = self._models, self._state, self._rows, self._passes.outcome
        num_rows = len(rows.slot_R)
        late_R = state.late_R[:num_rows]
        self._begins.committed_R.copy_(rows.chains.committed_R - late_R)
        step_ops(models.ops).place_chains(self._begins, self._passes.places, models.target_kv.page_size)
        last_R = (late_R - 1).clamp(min=0)
        outcome.emitted_RN.copy_(state.late_tokens_RW[:num_rows, :MOST_LATE])
        outcome.last_R.copy_(torch.arange(num_rows, device=late_R.device) * MOST_LATE + last_R)
        outcome.last_index_R.copy_(self._begins.committed_R + last_R)
        outcome.last_keys_R.copy_(self._begins.committed_R + last_R + 1)
        before_RD, before_RV = rows.feedback_RD.clone(), rows.logits_RV.clone()
        states_LF = state.late_states_RWF[:num_rows, :MOST_LATE].flatten(0, 1)
        self._passes.extend([part.contiguous() for part in states_LF.chunk(len(models.captured_layers), dim=-1)])
        was_late_R1 = late_R[:, None] > 0
        rows.feedback_RD.copy_(torch.where(was_late_R1, rows.feedback_RD, before_RD))
        rows.logits_RV.copy_(torch.where(was_late_R1, rows.logits_RV, before_RV))
        late_R.zero_()
