"""What a forward pass is given beside its tokens: positions, attention and the kernels. No globals.

Serving passes a `PagedContext`; training passes its own context with the same attributes. The models cannot tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels import AttentionBatch, KvLayer, Ops


class ForwardContext(Protocol):
    """How a model reaches positions, kernels and attention."""

    @property
    def ops(self) -> Ops:
        """The kernels of this pass."""
        ...

    @property
    def positions_T(self) -> Tensor:
        """Rotary position of each token, int64."""
        ...

    def attend(
        self, layer_index: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Make this layer's keys and values visible to this and later passes, and attend."""
        ...


class KvCache:
    """Keys and values of every layer of one model, by slot."""

    def __init__(self, layers: list[KvLayer], page_size: int) -> None:
        self.layers = layers
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        """Pages there is room for."""
        return len(self.layers[0].keys_SGd) // self.page_size

    @staticmethod
    def allocate(
        shape: "KvShape", num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KvCache":
        """Reserve room for `num_pages` pages in every layer."""
        size = (num_pages * page_size, shape.num_kv_heads, shape.head_dim)
        return KvCache(
            [
                KvLayer(
                    torch.zeros(size, dtype=dtype, device=device),
                    torch.zeros(size, dtype=dtype, device=device),
                )
                for _ in range(shape.num_layers)
            ],
            page_size,
        )


@dataclass(frozen=True)
class KvShape:
    """What one token's keys and values take."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values one token needs in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class PagedContext:
    """A pass over pages: where each token's key goes, and what it sees."""

    ops: Ops
    positions_T: Tensor
    slots_T: Tensor
    batch: AttentionBatch
    kv: KvCache

    def attend(
        self, layer_index: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write keys and values into their slots, then attend over the pages."""
        layer = self.kv.layers[layer_index]
        self.ops.write_kv(layer, k_TGd, v_TGd, self.slots_T)
        return self.ops.attention(q_THd, layer, self.batch, scale, window)


@dataclass(frozen=True)
class QueryTokens:
    """The query tokens of R requests in order: how many each has, and three values for each token (int64 [T])."""

    counts: Sequence[int]
    kv_index_T: Tensor
    positions_T: Tensor
    ancestors_T: Tensor


def paged_context(ops: Ops, kv: KvCache, page_table_RP: Tensor, queries: QueryTokens) -> PagedContext:
    """Lay out a pass: slots from the page table, and the attention every layer shares."""
    device = page_table_RP.device
    counts_R = torch.tensor(queries.counts, dtype=torch.int64, device=device)
    starts_R1 = torch.zeros(len(queries.counts) + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts_R, 0, out=starts_R1[1:])
    row_T = torch.repeat_interleave(torch.arange(len(queries.counts), device=device), counts_R)
    index_T = queries.kv_index_T
    slots_T = page_table_RP[row_T, index_T // kv.page_size].long() * kv.page_size + index_T % kv.page_size
    batch = AttentionBatch(
        query_starts_R1=starts_R1.int(),
        kv_lens_R=(index_T[starts_R1[1:] - 1] + 1).int(),
        page_table_RP=page_table_RP,
        kv_index_T=index_T,
        ancestors_T=queries.ancestors_T,
        page_size=kv.page_size,
        max_queries=max(queries.counts, default=0),
        max_keys=page_table_RP.shape[1] * kv.page_size,
    )
    return PagedContext(ops, queries.positions_T, slots_T, batch, kv)


def page_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return page numbers as int32 [R, P], rows padded with page 0."""
    longest = max((len(row) for row in pages), default=0)
    rows = [list(row) + [0] * (longest - len(row)) for row in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), longest)
