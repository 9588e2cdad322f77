"""What a forward pass is given beside its tokens: positions, attention and the kernels. No globals.

Serving passes a `PagedContext`; training passes its own context with the same attributes. The models cannot tell.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.checkpoint.spec import MlaSpec
from slipstream.kernels import KV_FP8, AttentionBatch, Ending, KvLayer, Ops, Sight
from slipstream.models.latent import LatentUp, absorbed, expanded


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
        self, layer_index: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Make this layer's keys and values visible to this and later passes, and attend."""
        ...

    def attend_latent(self, layer_index: int, q_THd: Tensor, latent_TC: Tensor, up: LatentUp) -> Tensor:
        """Make this layer's latents visible to this and later passes, and attend; returns [T, H, value width]."""
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
        """Reserve room for `num_pages` pages in every layer; FP8 has room for its scales, too.

        Layers of one shape lie in one allocation, so that a kernel can reach all of them.
        """
        num_slots, shared = num_pages * page_size, shape.value_view is not None
        parts: dict[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] = {}
        for heads, count in Counter(shape.layers).items():
            keys_NSGd = torch.zeros(count, num_slots, *heads, dtype=dtype, device=device)
            values_NSGd = keys_NSGd[..., : shape.value_view] if shared else torch.zeros_like(keys_NSGd)
            parts[heads] = zip(keys_NSGd, values_NSGd, strict=True)

        def layer(num_kv_heads: int, head_dim: int) -> KvLayer:
            keys_SGd, values_SGd = next(parts[num_kv_heads, head_dim])
            if dtype != KV_FP8:
                return KvLayer(keys_SGd, values_SGd)
            # A GPU's programs take a head each, and copy its scales by TMA: they lie side by side there.
            by_head = (num_kv_heads, num_slots) if device.type != "cpu" else (num_slots, num_kv_heads)
            scales = [torch.zeros(by_head, dtype=torch.uint8, device=device) for _ in range(1 if shared else 2)]
            scales = [part.T for part in scales] if device.type != "cpu" else scales
            return KvLayer(keys_SGd, values_SGd, (scales[0], scales[-1]))

        return KvCache([layer(*heads) for heads in shape.layers], page_size)


@dataclass(frozen=True)
class KvShape:
    """What one token's keys and values take.

    Args:
        layers: each layer's number of key heads, and their width.
        value_view: where values are the first columns of keys, in the same memory, how many; None where they are apart.
    """

    layers: tuple[tuple[int, int], ...]
    value_view: int | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values one token needs in all layers; FP8 has a scale of one byte a head."""
        tensors = 2 if self.value_view is None else 1
        return tensors * sum(heads * (width * dtype.itemsize + (dtype == KV_FP8)) for heads, width in self.layers)


def latent_shape(mla: MlaSpec, num_layers: int) -> KvShape:
    """Return what the latents of a token take: they are its keys, and without their rotary part its values."""
    return KvShape(((1, mla.latent_dim),) * num_layers, mla.kv_rank)


@dataclass(frozen=True)
class PagedContext:
    """A pass over pages: where each token's key goes, and what it sees.

    Args:
        ending: the tokens whose outputs are wanted; None wants all.
        beside: what the tokens after those of `batch` see, where a pass is over two batches.
    """

    ops: Ops
    positions_T: Tensor
    slots_T: Tensor
    batch: AttentionBatch
    kv: KvCache
    prompt_rows: Sequence[bool] = ()
    ending: Ending | None = None
    beside: AttentionBatch | None = None

    def attend(
        self, layer_index: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Write keys and values into their slots, then attend over the pages."""
        layer = self.kv.layers[layer_index]
        self.ops.write_kv(layer, k_TGd, v_TGd, self.slots_T)
        if self.beside is None:
            return self.ops.attention(q_THd, layer, self.batch, scale, window)
        first = len(self.batch.kv_index_T)
        outputs = (
            self.ops.attention(q_THd[:first], layer, self.batch, scale, window),
            self.ops.attention(q_THd[first:], layer, self.beside, scale, window),
        )
        return torch.cat(outputs)

    def attend_latent(self, layer_index: int, q_THd: Tensor, latent_TC: Tensor, up: LatentUp) -> Tensor:
        """Write latents into their slots, then attend: tokens of prompts in the expanded form, others absorbed.

        The two round differently, so which one a token takes depends on nothing but the token: with and without a
        draft, whole or in chunks, its bits are the same where the kernels' are.
        """
        assert self.beside is None, "latents of prompts are attended to in a pass of their own"
        layer = self.kv.layers[layer_index]
        latent_T1C = latent_TC.unsqueeze(-2)
        self.ops.write_kv(layer, latent_T1C, latent_T1C[..., : up.spec.kv_rank], self.slots_T)
        prompt, rest = self._parts
        if prompt is None:
            return absorbed(q_THd, layer, self.batch, up, self.ops)
        if rest is None:
            return expanded(q_THd, layer, self.batch, up, self.ops)
        out_THv = q_THd.new_empty((*q_THd.shape[:-1], up.spec.value_dim))
        out_THv[prompt.rows_T] = expanded(q_THd[prompt.rows_T], layer, prompt.batch, up, self.ops)
        out_THv[rest.rows_T] = absorbed(q_THd[rest.rows_T], layer, rest.batch, up, self.ops)
        return out_THv

    @cached_property
    def _parts(self) -> "tuple[_Part | None, _Part | None]":
        """The pass's prompt tokens and its other tokens."""
        prompt = [row for row, is_prompt in enumerate(self.prompt_rows) if is_prompt]
        if not prompt:
            return None, None
        rest = [row for row, is_prompt in enumerate(self.prompt_rows) if not is_prompt]
        return _part(self.batch, prompt), _part(self.batch, rest) if rest else None


@dataclass(frozen=True)
class _Part:
    """Some tokens of a pass, as a pass of their own."""

    rows_T: Tensor
    batch: AttentionBatch


def _part(batch: AttentionBatch, rows: list[int]) -> _Part:
    device = batch.kv_index_T.device
    rows_T = torch.tensor(rows, device=device)
    request_T = torch.bucketize(rows_T, batch.query_starts_R1[1:].to(rows_T.dtype), right=True)
    requests, counts = torch.unique_consecutive(request_T, return_counts=True)
    starts_R1 = torch.zeros(len(requests) + 1, dtype=torch.int32, device=device)
    starts_R1[1:] = counts.cumsum(0)
    return _Part(
        rows_T,
        AttentionBatch(
            starts_R1,
            batch.kv_lens_R[requests],
            batch.page_table_RP[requests],
            batch.kv_index_T[rows_T],
            batch.ancestors_T[rows_T],
            batch.page_size,
        ),
    )


@dataclass(frozen=True)
class PathTokens:
    """Query tokens, one after another, that go on from each other: a request's own, or a path of its draft tree.

    Args:
        count: how many.
        moved: where a key they see does not lie at its position on their path: position, and index among the request's
            keys.
    """

    request: int
    count: int
    moved: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class QueryTokens:
    """The query tokens of R requests in order: how many each has, and three values for each token (int64 [T]).

    A value that all tokens share may be one number seen T times; kernels are given T numbers (`paged_context`).

    Args:
        prompt_rows: for each token, whether it belongs to its request's prompt; empty if none does.
        paths: all tokens again, path by path, where a tree has siblings and each path is to be a request of its own.
    """

    counts: Sequence[int]
    kv_index_T: Tensor
    positions_T: Tensor
    ancestors_T: Tensor
    prompt_rows: Sequence[bool] = ()
    paths: Sequence[PathTokens] = ()


def paged_context(ops: Ops, kv: KvCache, page_table_RP: Tensor, queries: QueryTokens) -> PagedContext:
    """Lay out a pass: slots from the page table, and the attention every layer shares."""
    device = page_table_RP.device
    counts_R = torch.tensor(queries.counts, dtype=torch.int64, device=device)
    starts_R1 = torch.zeros(len(queries.counts) + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts_R, 0, out=starts_R1[1:])
    row_T = torch.repeat_interleave(torch.arange(len(queries.counts), device=device), counts_R)
    index_T, ancestors_T = queries.kv_index_T.contiguous(), queries.ancestors_T.contiguous()
    slots_T = page_table_RP[row_T, index_T // kv.page_size].long() * kv.page_size + index_T % kv.page_size
    if queries.paths:
        batch = _batch_by_path(page_table_RP, queries, kv.page_size)
        return PagedContext(ops, queries.positions_T.contiguous(), slots_T, batch, kv, queries.prompt_rows)
    batch = AttentionBatch(
        query_starts_R1=starts_R1.int(),
        kv_lens_R=(index_T[starts_R1[1:] - 1] + 1).int(),
        page_table_RP=page_table_RP,
        kv_index_T=index_T,
        ancestors_T=ancestors_T,
        page_size=kv.page_size,
        max_queries=max(queries.counts, default=0),
        max_keys=page_table_RP.shape[1] * kv.page_size,
    )
    return PagedContext(ops, queries.positions_T.contiguous(), slots_T, batch, kv, queries.prompt_rows)


def masks_context(ops: Ops, kv: KvCache, page_table_RP: Tensor, index_RM: Tensor) -> PagedContext:
    """Lay out a pass over as many tokens of every request, each of which sees all before it, with no look at values."""
    (num_requests, count), page_size = index_RM.shape, kv.page_size
    slots_RM = page_table_RP.gather(1, index_RM // page_size).long() * page_size + index_RM % page_size
    index_T = index_RM.flatten()
    batch = AttentionBatch(
        query_starts_R1=torch.arange(num_requests + 1, dtype=torch.int32, device=index_T.device) * count,
        kv_lens_R=(index_RM[:, -1] + 1).int(),
        page_table_RP=page_table_RP,
        kv_index_T=index_T,
        ancestors_T=torch.full_like(index_T, -1),
        page_size=page_size,
        max_queries=count,
        max_keys=page_table_RP.shape[1] * page_size,
    )
    return PagedContext(ops, index_T, slots_RM.flatten(), batch, kv)


def _batch_by_path(page_table_RP: Tensor, queries: QueryTokens, page_size: int) -> AttentionBatch:
    """Return attention in which every path of a tree is a request of its own, its keys found slot by slot.

    A sum's bits depend on where in it each key comes. Paths share all slots but those of their nodes, so nothing is
    copied: a page of one slot can lie anywhere.
    """
    device, paths = page_table_RP.device, queries.paths
    offset_O = torch.arange(page_size, dtype=torch.int32, device=device)
    slots_RK = (page_table_RP[:, :, None] * page_size + offset_O).flatten(1)
    table_PK = slots_RK[torch.tensor([path.request for path in paths], device=device)]
    moved = [(place, path.request, *move) for place, path in enumerate(paths) for move in path.moved]
    place_M, request_M, position_M, index_M = torch.tensor(moved, device=device).T
    table_PK[place_M, position_M] = slots_RK[request_M, index_M]
    counts_P = torch.tensor([path.count for path in paths], dtype=torch.int32, device=device)
    starts_P1 = torch.nn.functional.pad(counts_P.cumsum(0, dtype=torch.int32), (1, 0))
    position_T = queries.positions_T.contiguous()
    return AttentionBatch(
        query_starts_R1=starts_P1,
        kv_lens_R=(position_T[starts_P1[1:].long() - 1] + 1).int(),
        page_table_RP=table_PK,
        kv_index_T=position_T,
        ancestors_T=torch.full_like(position_T, -1),
        page_size=1,
        max_queries=max(path.count for path in paths),
        max_keys=table_PK.shape[1],
    )


def page_table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return page numbers as int32 [R, P], rows padded with page 0."""
    longest = max((len(row) for row in pages), default=0)
    rows = [list(row) + [0] * (longest - len(row)) for row in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), longest)
