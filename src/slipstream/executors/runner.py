"""Runs the target: one pass over a batch, logits for the rows that need them, and keys moved to where they stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.executors.batch import Batch
from slipstream.kernels import Ops
from slipstream.models.context import KvCache, page_table, paged_context
from slipstream.models.target import Hidden, Target


@dataclass(eq=False)
class Runner:
    """The target, its KV cache and its kernels.

    Args:
        captured_layers: the states each pass keeps for the drafter (k = blocks applied).
    """

    model: Target
    kv: KvCache
    ops: Ops
    captured_layers: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.kv.layers[0].keys_SGd.device

    def forward(self, batch: Batch, pages: Sequence[Sequence[int]]) -> Hidden:
        """Run the target over a batch, writing its keys."""
        table_RP = page_table(pages, batch.token_ids_T.device)
        queries = batch.queries if self.ops.places_matter else replace(batch.queries, paths=())
        ctx = paged_context(self.ops, self.kv, table_RP, queries)
        hidden: Hidden = self.model(batch.token_ids_T, ctx, self.captured_layers)
        return hidden

    def logits(self, hidden: Hidden, rows: Tensor | Sequence[int]) -> Tensor:
        """Return logits of some rows of the pass, in float32, over the whole vocabulary; every rank has them."""
        return self.model.ranks.join(self.model.logits(hidden.last_TD[rows], self.ops)).float()

    def keep(self, pages: Sequence[int], root: int, nodes: Sequence[int]) -> None:
        """Move the keys of accepted nodes next to the root's, in path order.

        Args:
            root: the root's index among the request's keys.
            nodes: accepted nodes, the first of them a child of the root.
        """
        moves = [(root + node, root + depth) for depth, node in enumerate(nodes, start=1) if node != depth]
        if not moves:
            return
        size = self.kv.page_size
        slots = torch.tensor([[pages[i // size] * size + i % size for i in move] for move in moves])
        slots = slots.to(self.device)
        for layer in self.kv.layers:
            self.ops.move_kv(layer, slots[:, 0], slots[:, 1])
