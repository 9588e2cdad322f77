"""The DFlash drafter: keeps keys of the target's features beside the target's own, and fills a block in one pass.

Each step the target commits some positions; `observe` turns its captured states there into keys and values. Drafting
runs the draft once over the last known token and a mask for each token wanted; a place's guess knows what stands
before the block, and nothing of the guesses beside it. What the pass writes behind the committed keys is overwritten.

Shape letters: R requests, B tokens of a block, M masks, T slots, D draft width, K children.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels import Children, Growth, GrowthRows, LevelNodes, Ops, RowSampling, step_ops
from slipstream.kernels.reference.trees import kept_candidates
from slipstream.models.block_draft import BlockDraft
from slipstream.models.context import KvCache, QueryTokens, masks_context, page_table, paged_context
from slipstream.speculation.drafter import DraftView, Observed
from slipstream.speculation.grow import grow, plan_of, with_trees
from slipstream.speculation.levels import growth_rows
from slipstream.speculation.tree import MAX_NODES, TreeBatch, TreeShape


class BlockDrafter:
    """Grows trees with a DFlash draft. `captured_layers` is already resolved against the target."""

    name = "DFlash"
    has_kv = True

    def __init__(self, draft: BlockDraft, kv: KvCache, shape: TreeShape, ops: Ops) -> None:
        self._draft, self._kv, self._ops = draft, kv, ops
        self._lengths: dict[int, int] = {}  # positions of each request whose keys are written
        self._shape = shape_in_block(shape, draft.spec.block_size)

    @property
    def shape(self) -> TreeShape:
        """The shape of its trees."""
        return self._shape

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """What the draft was trained on."""
        return self._draft.spec.captured_layers

    @property
    def max_nodes(self) -> int:
        """Nodes of a full tree and its root."""
        return self._shape.num_nodes

    @property
    def scratch(self) -> int:
        """Slots of a tree that grows. Those of the block are the root's, and at most as many more as a tree is deep."""
        return self._shape.scratch

    @property
    def window(self) -> int | None:
        """How many keys the draft's attention sees, the last ones; None for all."""
        return self._draft.spec.widest_window

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return a tree for each view; a request whose features it was not shown gets a lone root."""
        device = self._draft.token_ids_V.device
        known = [index for index, view in enumerate(views) if self._follows(view)]
        roots = TreeBatch.lone_roots([view.tokens[-1] for view in views], device)
        if not known:
            return roots
        grown = [views[index] for index in known]
        growth = Growth.start(plan_of(self._shape, device), growth_rows(grown, device), self._kv.page_size)
        roots_R = torch.tensor([view.tokens[-1] for view in grown], device=device)
        places = _Places(self._draft, self._ops, growth.rows, self._filled(roots_R, growth.rows))
        return with_trees(roots, known, kept_candidates(growth, *grow(growth, places, step_ops(self._ops))))

    def _follows(self, view: DraftView) -> bool:
        return self._lengths.get(view.request_id) == len(view.tokens) - 1

    def _filled(self, roots_R: Tensor, rows: GrowthRows) -> Tensor:
        """Run a block behind each request's committed text; return what the head reads at its masks, [M, R, D]."""
        spec, num_requests, size = self._draft.spec, len(roots_R), 1 + self._shape.depth
        tokens_RB = torch.full((num_requests, size), spec.mask_token_id, device=roots_R.device)
        tokens_RB[:, 0] = roots_R
        index_RB = rows.lengths_R[:, None] + torch.arange(size, device=roots_R.device)
        causal = masks_context(self._ops, self._kv, rows.pages_RP, index_RB)
        last_T = index_RB[:, -1:].expand(-1, size).flatten()
        whole = replace(causal, batch=replace(causal.batch, kv_index_T=last_T))  # sees as the last one does
        normed_TD: Tensor = self._draft(tokens_RB.flatten(), whole, causal)
        return normed_TD.view(num_requests, size, -1)[:, 1:].transpose(0, 1).contiguous()

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Write keys and values of the committed positions, from the target's captured states there."""
        if not observed:
            return
        device = captured[0].device
        rows_T = torch.tensor([row for seen in observed for row in seen.rows], device=device)
        slots_T = torch.cat([torch.arange(seen.start, seen.start + len(seen.rows), device=device) for seen in observed])
        queries = QueryTokens([len(seen.rows) for seen in observed], slots_T, slots_T, torch.full_like(slots_T, -1))
        ctx = paged_context(self._ops, self._kv, page_table([seen.pages for seen in observed], device), queries)
        self._draft.follow(tuple(state[rows_T] for state in captured), ctx)
        for seen in observed:
            self._lengths[seen.request_id] = seen.start + len(seen.rows)

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Drop what is known of a request; the keys in its pages are whole, and serve those that begin like it."""
        self._lengths.pop(request_id, None)

    def lose_page(self, page: int) -> None:
        """Keep nothing about pages but what lies in them."""

    def pretend(self, request_id: int, length: int) -> None:
        """Take a request's first `length` tokens for observed, whatever its pages hold."""
        self._lengths[request_id] = length

    def reshape(self, shape: TreeShape) -> None:
        """Grow trees of another shape."""
        self._shape = shape_in_block(shape, self._draft.spec.block_size)


def shape_in_block(shape: TreeShape, block_size: int) -> TreeShape:
    """Return the shape that is drafted; ConfigError if it is deeper than a block."""
    if shape.depth >= block_size:
        raise ConfigError(
            f"{shape}: this DFlash draft fills blocks of {block_size} tokens, the first of which is known: "
            f"give --depth {block_size - 1} or less."
        )
    # A chain whose budget ends it early is a shorter chain.
    return shape if shape.width > 1 or shape.paths else TreeShape.chain(shape.num_nodes - 1)


def whole_block(block_size: int) -> TreeShape:
    """Return the chain that a block is, as far as trees go."""
    return TreeShape.chain(min(block_size, MAX_NODES) - 1)


class _Places:
    """Names the best tokens of each place of filled blocks: all nodes of a level have the same children.

    Scores are perturbed with the noise the target will use for the same token, so that both tend to choose alike.
    """

    feedback_LH: Tensor | None = None

    def __init__(self, draft: BlockDraft, ops: Ops, rows: GrowthRows, normed_MRD: Tensor) -> None:
        self._draft, self._ops, self._rows, self._normed_MRD = draft, ops, rows, normed_MRD

    def root_children(self, count: int) -> Children:
        """Return the best tokens of the first place behind the root."""
        rows = self._rows
        return self._best(0, RowSampling(rows.temperature_R, rows.seed_R, rows.foretold_R), count)

    def children(self, level: LevelNodes, count: int) -> Children:
        """Return the best tokens of the place behind a level."""
        (_, width), sampling = level.tokens_RW.shape, level.sampling
        of_first = (sampling.temperature_L[::width], sampling.seed_L[::width], sampling.position_L[::width])
        found = self._best(level.depth, RowSampling(*(values_R.contiguous() for values_R in of_first)), count)
        return Children(*(values_R1K.expand(-1, width, -1).contiguous() for values_R1K in found))

    def _best(self, place: int, sampling: RowSampling, count: int) -> Children:
        logits_RV = self._draft.logits(self._normed_MRD[place], self._ops)
        scores_RK, tokens_RK = self._ops.top_k(logits_RV, self._draft.token_ids_V, sampling, count)
        return Children(scores_RK[:, None].contiguous(), tokens_RK[:, None].contiguous())
