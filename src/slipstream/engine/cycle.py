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

from slipstream.kernels import AttentionBatch, Ops, RowSampling
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.simulate import simulated_counts


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


@dataclass(frozen=True)
class Places:
    """Where this cycle's nodes lie, the root at each row's committed end and the chain behind it.

    Args:
        context: that of a pass over every node of every row.
        index_NR: the nodes' places among their rows' keys, node by node, for the passes over one node of every row.
        position_NR: the position of the token each node foretells; also how many keys there are up to the node.
    """

    context: PagedContext
    index_NR: Tensor
    slots_NR: Tensor
    position_NR: Tensor
    kv_lens_NR: Tensor


class Cycle:
    """The work of one kind of cycle on one batch; `out_RE` is what its last run emitted: a count, then the tokens."""

    def __init__(self, models: CycleModels, state: CycleState, kind: CycleKind) -> None:
        device = state.root_R.device
        self._models = models
        num_columns = None if kind.max_keys is None else -(-kind.max_keys // models.target_kv.page_size)
        self._state = state.first(kind.num_rows, num_columns)
        self._kind = kind
        self._num_nodes = kind.num_drafted + 1
        self.out_RE = torch.zeros(kind.num_rows, self._num_nodes + 1, dtype=torch.int64, device=device)
        self._node_N = torch.arange(self._num_nodes, device=device)
        rows_R1 = torch.arange(kind.num_rows + 1, dtype=torch.int32, device=device)
        self._one_each_R1 = rows_R1
        self._starts_R1 = rows_R1 * self._num_nodes
        self._first_R = self._starts_R1[:-1].long()
        self._ones_T = torch.full((kind.num_rows * self._num_nodes,), -1, dtype=torch.int64, device=device)

    def run(self) -> None:
        """Advance every active row by the tokens its target pass accepts; `out_RE` says which."""
        state = self._state
        state.committed_R.mul_(state.active_R)  # an unused row starts over, so that it never leaves its one page
        places = self.place()
        chain_RN = self._draft_chain(places)
        captured, chosen_RN = self.verify(places, chain_RN)
        accepted_R, emitted_RN = self._accept(chain_RN, chosen_RN)
        if self._kind.num_drafted:
            self._extend(places, captured, emitted_RN, accepted_R)
        state.root_R.copy_(emitted_RN.gather(1, accepted_R[:, None])[:, 0])
        counts_R = (accepted_R + 1) * state.active_R
        state.committed_R.add_(counts_R)
        torch.cat([counts_R[:, None], emitted_RN], 1, out=self.out_RE)

    def place(self) -> Places:
        """Return where the nodes of the next pass lie."""
        kv, state = self._models.target_kv, self._state
        index_RN = state.committed_R[:, None] + self._node_N
        index_NR = state.committed_R + self._node_N[:, None]
        position_NR = index_NR + 1
        kv_lens_NR = position_NR.int()
        column_RN = index_RN // kv.page_size
        slots_RN = index_RN + (state.pages_RP.gather(1, column_RN) - column_RN) * kv.page_size
        index_T = index_RN.flatten()
        batch = AttentionBatch(
            query_starts_R1=self._starts_R1,
            kv_lens_R=kv_lens_NR[-1],
            page_table_RP=state.pages_RP,
            kv_index_T=index_T,
            ancestors_T=self._ones_T,
            page_size=kv.page_size,
            max_queries=self._num_nodes,
            max_keys=state.pages_RP.shape[1] * kv.page_size,
        )
        context = PagedContext(self._models.ops, index_T, slots_RN.flatten(), batch, kv)
        return Places(context, index_NR, slots_RN.t().contiguous(), position_NR, kv_lens_NR)

    def _draft_chain(self, places: Places) -> Tensor:
        """Return root and drafted tokens of each row; the draft's keys of imagined tokens go behind its true ones."""
        state, draft, draft_kv = self._state, self._models.draft, self._models.draft_kv
        tokens = [state.root_R]
        logits_RV, feedback_RD = state.logits_RV, state.feedback_RD
        for depth in range(self._kind.num_drafted):
            assert draft is not None and draft_kv is not None, "chains are drafted by a draft"
            if depth:
                hidden = draft(feedback_RD, tokens[-1], self._draft_context(places, depth - 1, draft_kv))
                logits_RV, feedback_RD = draft.logits(hidden.normed_TD, self._models.ops), hidden.feedback_TD
            sampling = RowSampling(state.temperature_R, state.seed_R, places.position_NR[depth])
            _, entries_R1 = self._models.ops.top_k(logits_RV, draft.token_ids_V, sampling, 1)
            tokens.append(draft.token_ids_V[entries_R1[:, 0]])
        return torch.stack(tokens, 1)

    def _draft_context(self, places: Places, node: int, draft_kv: KvCache) -> PagedContext:
        """Return the context of one imagined slot per row, in the place of `node`."""
        batch = replace(
            places.context.batch,
            query_starts_R1=self._one_each_R1,
            kv_lens_R=places.kv_lens_NR[node],
            kv_index_T=places.index_NR[node],
            ancestors_T=self._ones_T[: self._kind.num_rows],
            max_queries=1,
        )
        return PagedContext(self._models.ops, places.index_NR[node], places.slots_NR[node], batch, draft_kv)

    def verify(self, places: Places, chain_RN: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run the target over roots and chains; return its captured states and its token at every node."""
        models, state = self._models, self._state
        captured_layers = models.captured_layers if self._kind.num_drafted else ()
        hidden = models.target(chain_RN.flatten(), places.context, captured_layers)
        logits_TV = models.target.logits(hidden.last_TD, models.ops)
        chosen_T = models.ops.choose(
            logits_TV,
            state.temperature_R[:, None].expand_as(chain_RN).flatten(),
            state.seed_R[:, None].expand_as(chain_RN).flatten(),
            places.context.positions_T + 1,
        )
        return hidden.captured, chosen_T.view_as(chain_RN)

    def _accept(self, chain_RN: Tensor, chosen_RN: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafted tokens each row keeps, and the tokens it emits (those past the last mean nothing)."""
        state, rates = self._state, self._kind.simulated
        if not self._kind.num_drafted:
            return torch.zeros_like(state.root_R), chosen_RN
        drafted_RK = chain_RN[:, 1:]
        if rates:
            accepted_R = simulated_counts(rates, state.seed_R, state.committed_R + 1).clamp(max=self._kind.num_drafted)
        else:
            accepted_R = (chosen_RN[:, :-1] == drafted_RK).long().cumprod(1).sum(1)
        accepted_R = accepted_R * (state.committed_R < state.drafts_until_R)
        if not rates:
            return accepted_R, chosen_RN
        kept_RN = self._node_N < accepted_R[:, None]
        return accepted_R, torch.where(kept_RN, torch.cat([drafted_RK, chosen_RN[:, -1:]], 1), chosen_RN)

    def _extend(self, places: Places, captured: tuple[Tensor, ...], emitted_RN: Tensor, accepted_R: Tensor) -> None:
        """Run the draft over the nodes with the target's true states, and keep what it left at the last accepted one.

        The nodes behind that one are run too, to keep shapes fixed: their keys lie where the next cycle writes.
        """
        models, state = self._models, self._state
        assert models.draft is not None and models.draft_kv is not None, "only drafts are extended"
        fused_TD = models.draft.fuse(captured, models.ops)
        hidden = models.draft(fused_TD, emitted_RN.flatten(), replace(places.context, kv=models.draft_kv))
        last_R = self._first_R + accepted_R
        state.feedback_RD.copy_(hidden.feedback_TD[last_R])
        state.logits_RV.copy_(models.draft.logits(hidden.normed_TD[last_R], models.ops))


def _empty_draft_output(models: CycleModels) -> tuple[Tensor, Tensor]:
    """Return feedback and logits of no meaning in the draft's shapes and types, one row of each."""
    table = models.target.embed_tokens
    if models.draft is None:
        nothing = torch.zeros(1, 0, dtype=table.dtype, device=table.device)
        return nothing, nothing
    feedback_1D = torch.zeros(1, models.draft.spec.hidden_size, dtype=table.dtype, device=table.device)
    return feedback_1D, models.draft.logits(feedback_1D, models.ops)
