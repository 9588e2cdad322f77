"""One decoding step with fixed shapes: draft a chain, check it, keep what agrees; all of it on the device.

A cycle does for a batch of decoding requests what an ordinary step does, without ever asking the host: lengths, slots,
acceptance and the next cycle's inputs are tensors it reads and writes in place, so it can be captured in a graph and
launched again before anybody has seen what it emitted. It drafts every row of the batch a chain of the same length;
none at all is plain decoding. Rows that are not in use compute on a page of their own and emit nothing.

Shape letters: R rows, K drafted tokens, N = K + 1 nodes, P pages of a row, E = N + 1 values handed out per row,
D draft width, V draft vocabulary, T = R * N query tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels import AttentionBatch, ChainOutcome, ChainPlaces, ChainRows, Ending, Ops, RowSampling, cycle_ops
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.simulate import thresholds


@dataclass(frozen=True)
class CycleModels:
    """What a cycle runs: the target, the draft if there is one, their caches and the kernels."""

    ops: Ops
    target: Target
    target_kv: KvCache
    captured_layers: tuple[int, ...] = ()
    draft: Eagle3Draft | None = None
    draft_kv: KvCache | None = None


@dataclass(frozen=True)
class CycleKind:
    """What makes one cycle's work different from another's, apart from the values in its tensors.

    Args:
        max_keys: no row has more keys by the end of the cycle; None bounds them by the page table alone.
    """

    num_rows: int
    num_drafted: int
    simulated: tuple[float, ...] = ()
    max_keys: int | None = None


@dataclass(frozen=True)
class CycleState:
    """The batch on the device, a row for each request; a cycle updates it in place.

    Args:
        committed_R: int64, keys in the cache: the index of the root, whose own key is still to be computed.
        root_R: int64, the last token emitted.
        active_R: int64, 1 for rows in use and 0 for the others.
        drafts_until_R: int64, root index from which a drafted token could not be emitted any more (0 = never drafts).
        feedback_RD: what the draft left at each row's last slot; [R, 0] without a draft.
        logits_RV: the draft's logits there, which decide the first drafted token; [R, 0] without a draft.
    """

    committed_R: Tensor
    root_R: Tensor
    active_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    drafts_until_R: Tensor
    pages_RP: Tensor
    feedback_RD: Tensor
    logits_RV: Tensor

    @staticmethod
    @torch.no_grad()
    def allocate(models: CycleModels, num_rows: int, num_pages: int) -> "CycleState":
        """Return a batch without requests, for up to `num_pages` pages a row."""
        device = models.target.embed_tokens.device
        feedback_1D, logits_1V = _empty_draft_output(models)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        return CycleState(
            committed_R=zeros(torch.int64),
            root_R=zeros(torch.int64),
            active_R=zeros(torch.int64),
            temperature_R=zeros(torch.float32),
            seed_R=zeros(torch.int64),
            drafts_until_R=zeros(torch.int64),
            pages_RP=zeros(torch.int32, num_pages),
            feedback_RD=zeros(feedback_1D.dtype, feedback_1D.shape[1]),
            logits_RV=zeros(logits_1V.dtype, logits_1V.shape[1]),
        )

    def first(self, num_rows: int, num_columns: int | None = None) -> "CycleState":
        """Return the first rows, as views, with the first columns of their page tables."""
        rows = {name: getattr(self, name)[:num_rows] for name in self.__dataclass_fields__}
        return CycleState(**{**rows, "pages_RP": self.pages_RP[:num_rows, :num_columns]})


class Cycle:
    """The work of one kind of cycle on one batch; `out_RE` is what its last run emitted: a count, then the tokens."""

    def __init__(self, models: CycleModels, state: CycleState, kind: CycleKind) -> None:
        device = state.root_R.device
        self._models = models
        self._chains = cycle_ops(models.ops)
        num_columns = None if kind.max_keys is None else -(-kind.max_keys // models.target_kv.page_size)
        self._state = state = state.first(kind.num_rows, num_columns)
        self._kind = kind
        self._num_nodes = kind.num_drafted + 1
        self._rows = ChainRows(
            committed_R=state.committed_R,
            root_R=state.root_R,
            active_R=state.active_R,
            temperature_R=state.temperature_R,
            seed_R=state.seed_R,
            drafts_until_R=state.drafts_until_R,
            pages_RP=state.pages_RP,
        )
        self._places = ChainPlaces.allocate(kind.num_rows, self._num_nodes, device)
        self._outcome = ChainOutcome.allocate(kind.num_rows, self._num_nodes, device)
        self.out_RE = self._outcome.out_RE
        rates = kind.simulated[: kind.num_drafted]
        self._thresholds_K = torch.tensor(thresholds(rates), dtype=torch.int64, device=device)
        rows_R1 = torch.arange(kind.num_rows + 1, dtype=torch.int32, device=device)
        self._one_each_R1 = rows_R1
        self._starts_R1 = rows_R1 * self._num_nodes
        self._ones_T = torch.full((kind.num_rows * self._num_nodes,), -1, dtype=torch.int64, device=device)

    def run(self) -> None:
        """Advance every active row by the tokens its target pass accepts; `out_RE` says which."""
        places = self.place()
        self._draft_chain(places)
        chain_RN = places.chain_RN
        captured, chosen_RN = self.verify(places, chain_RN)
        self._chains.accept_chains(self._rows, chain_RN, chosen_RN, self._thresholds_K, self._outcome)
        if self._kind.num_drafted:
            self._extend(places, captured)

    def place(self) -> ChainPlaces:
        """Return where the nodes of the next pass lie; the next call overwrites it."""
        self._chains.place_chains(self._rows, self._places, self._models.target_kv.page_size)
        return self._places

    def _draft_chain(self, places: ChainPlaces) -> None:
        """Draft behind the root of each row; the draft's keys of imagined tokens go behind its true ones."""
        state, draft, draft_kv = self._state, self._models.draft, self._models.draft_kv
        token_R = state.root_R
        logits_RV, feedback_RD = state.logits_RV, state.feedback_RD
        for depth in range(self._kind.num_drafted):
            assert draft is not None and draft_kv is not None, "chains are drafted by a draft"
            if depth:
                hidden = draft(feedback_RD, token_R, self._draft_context(places, depth - 1, draft_kv))
                logits_RV, feedback_RD = draft.logits(hidden.normed_TD, self._models.ops), hidden.feedback_TD
            sampling = RowSampling(state.temperature_R, state.seed_R, places.position_NR[depth])
            token_R = self._chains.propose(logits_RV, draft.token_ids_V, sampling, places.chain_RN[:, depth + 1])

    def _context(self, places: ChainPlaces, kv: KvCache) -> PagedContext:
        """Return the context of a pass over every node of every row."""
        state, index_T = self._state, places.index_RN.flatten()
        batch = AttentionBatch(
            query_starts_R1=self._starts_R1,
            kv_lens_R=places.kv_lens_NR[-1],
            page_table_RP=state.pages_RP,
            kv_index_T=index_T,
            ancestors_T=self._ones_T,
            page_size=kv.page_size,
            max_queries=self._num_nodes,
            max_keys=state.pages_RP.shape[1] * kv.page_size,
        )
        return PagedContext(self._models.ops, index_T, places.slots_RN.flatten(), batch, kv)

    def _draft_context(self, places: ChainPlaces, node: int, draft_kv: KvCache) -> PagedContext:
        """Return the context of one imagined slot per row, in the place of `node`."""
        every = self._context(places, draft_kv).batch
        batch = self._lone_nodes(every, places.kv_lens_NR[node], places.index_NR[node])
        return PagedContext(self._models.ops, places.index_NR[node], places.slots_NR[node], batch, draft_kv)

    def _lone_nodes(self, batch: AttentionBatch, keys_R: Tensor, index_R: Tensor) -> AttentionBatch:
        """Return a batch of one node per row: how many keys it sees, and where it lies among them."""
        return replace(
            batch,
            query_starts_R1=self._one_each_R1,
            kv_lens_R=keys_R,
            kv_index_T=index_R,
            ancestors_T=self._ones_T[: self._kind.num_rows],
            max_queries=1,
        )

    def verify(self, places: ChainPlaces, chain_RN: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run the target over roots and chains; return its captured states and its token at every node."""
        models = self._models
        captured_layers = models.captured_layers if self._kind.num_drafted else ()
        hidden = models.target(chain_RN.flatten(), self._context(places, models.target_kv), captured_layers)
        chosen_T = models.ops.choose(
            models.target.logits(hidden.last_TD, models.ops),
            places.temperature_RN.flatten(),
            places.seed_RN.flatten(),
            places.position_RN.flatten(),
        )
        return hidden.captured, chosen_T.view_as(chain_RN)

    def _extend(self, places: ChainPlaces, captured: tuple[Tensor, ...]) -> None:
        """Run the draft over the nodes with the target's true states, and keep what it left at the last accepted one.

        The nodes before that one matter for their keys alone, and those behind it are run too, to keep shapes fixed:
        their keys lie where the next cycle writes.
        """
        models, state, outcome = self._models, self._state, self._outcome
        assert models.draft is not None and models.draft_kv is not None, "only drafts are extended"
        fused_TD = models.draft.fuse(captured, models.ops)
        ctx = self._context(places, models.draft_kv)
        last = self._lone_nodes(ctx.batch, outcome.last_keys_R, outcome.last_index_R)
        ctx = replace(ctx, ending=Ending(outcome.last_R, last))
        hidden = models.draft(fused_TD, outcome.emitted_RN.flatten(), ctx)
        state.feedback_RD.copy_(hidden.feedback_TD)
        state.logits_RV.copy_(models.draft.logits(hidden.normed_TD, models.ops))


def _empty_draft_output(models: CycleModels) -> tuple[Tensor, Tensor]:
    """Return feedback and logits of no meaning in the draft's shapes and types, one row of each."""
    table = models.target.embed_tokens
    if models.draft is None:
        nothing = torch.zeros(1, 0, dtype=table.dtype, device=table.device)
        return nothing, nothing
    feedback_1D = torch.zeros(1, models.draft.spec.hidden_size, dtype=table.dtype, device=table.device)
    return feedback_1D, models.draft.logits(feedback_1D, models.ops)
