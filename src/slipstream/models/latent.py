"""Two ways to the same latent attention: over the latents themselves, or over the heads they stand for.

Absorbed: the up-projection is folded into the query and taken out of the result, so the cache is read as it is, once
for all heads; right for few queries. Expanded: the latents a request sees are turned into keys and values by head
first; right for the many queries of a prompt.

Shape letters beyond the kernels': c width of a latent without its rotary part, n and v widths of a head's key (without
positions) and value, J keys of a pass.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.checkpoint.spec import MlaSpec
from slipstream.kernels import AttentionBatch, KvLayer, Ops, Sight, keys_and_values

EXPANDED_BYTES = 1 << 28
"""The keys and values that are expanded at once, by heads: enough to fill a GPU, little beside its cache."""


@dataclass(frozen=True)
class LatentUp:
    """The up-projection of one layer: rows [H, n + v, c], and the shape they belong to."""

    weight_HNc: Tensor
    spec: MlaSpec

    def expand(self, latent_JC: Tensor, ops: Ops, heads: slice = slice(None)) -> KvLayer:
        """Return the keys and values of some heads; values are padded with zeros to the width of keys."""
        spec = self.spec
        latent_Jc, rotary_Jr = latent_JC[..., : spec.kv_rank], latent_JC[..., spec.kv_rank :]
        weight_HNc = self.weight_HNc[heads]
        up = ops.linear(latent_Jc, weight_HNc.flatten(0, 1))
        up_JHN = up.view(*up.shape[:-1], len(weight_HNc), -1)
        keys_JHn, values_JHv = up_JHN[..., : spec.nope_dim], up_JHN[..., spec.nope_dim :]
        rotary_JHr = rotary_Jr.unsqueeze(-2).expand(*keys_JHn.shape[:-1], -1)
        padding = (0, spec.head_dim - spec.value_dim)
        return KvLayer(torch.cat([keys_JHn, rotary_JHr], dim=-1), torch.nn.functional.pad(values_JHv, padding))


def absorbed(q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, up: LatentUp, ops: Ops) -> Tensor:
    """Attend over the cache of latents; returns [T, H, v]."""
    spec = up.spec
    q_THn, q_THr = q_THd[..., : spec.nope_dim], q_THd[..., spec.nope_dim :]
    key_HcN = up.weight_HNc[:, : spec.nope_dim].transpose(1, 2)
    q_THC = torch.cat([ops.head_linear(q_THn, key_HcN), q_THr], dim=-1)
    out_THc = ops.latent_attention(q_THC, layer, batch, spec.scale, spec.kv_rank)
    return ops.head_linear(out_THc, up.weight_HNc[:, spec.nope_dim :])


def expanded(q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, up: LatentUp, ops: Ops) -> Tensor:
    """Attend over keys and values by head, made for this pass from the latents of its requests; returns [T, H, v]."""
    slots_J, packed = _gather(batch)
    latent_JC = keys_and_values(layer, slots_J, q_THd.dtype)[0][:, 0]
    num_heads, head_dim = q_THd.shape[1:]
    heads_at_once = max(EXPANDED_BYTES // (2 * len(latent_JC) * head_dim * latent_JC.itemsize), 1)
    out_THv = q_THd.new_empty((*q_THd.shape[:-1], up.spec.value_dim))
    for start in range(0, num_heads, heads_at_once):
        heads = slice(start, min(start + heads_at_once, num_heads))
        by_head = up.expand(latent_JC, ops, heads)
        out_THd = ops.attention(q_THd[:, heads].contiguous(), by_head, packed, up.spec.scale, None)
        out_THv[:, heads] = out_THd[..., : up.spec.value_dim]
    return out_THv


class HeadsContext(Protocol):
    """A context that keeps the heads apart."""

    @property
    def ops(self) -> Ops:
        """The kernels of this pass."""
        ...

    def attend(
        self, layer_index: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Keep keys and values, and attend."""
        ...


def attend_by_head(ctx: HeadsContext, layer_index: int, q_THd: Tensor, latent_TC: Tensor, up: LatentUp) -> Tensor:
    """Attend in a context that knows no latents: it keeps the keys and values of every head."""
    by_head = up.expand(latent_TC, ctx.ops)
    out_THd = ctx.attend(layer_index, q_THd, by_head.keys_SGd, by_head.values_SGd, up.spec.scale, None)
    return out_THd[..., : up.spec.value_dim]


def _gather(batch: AttentionBatch) -> tuple[Tensor, AttentionBatch]:
    """Return the slots of the pages a pass sees, page by page, and the pass over pages in just that order."""
    device = batch.page_table_RP.device
    counts = [-(-kv_len // batch.page_size) for kv_len in batch.kv_lens_R.tolist()]
    pages = torch.cat([batch.page_table_RP[row, :count] for row, count in enumerate(counts)]).long()
    slots_JO = pages[:, None] * batch.page_size + torch.arange(batch.page_size, device=device)
    table_RP = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(counts):
        table_RP[row, :count] = torch.arange(first, first + count, device=device)
        first += count
    packed = AttentionBatch(
        batch.query_starts_R1, batch.kv_lens_R, table_RP, batch.kv_index_T, batch.ancestors_T, batch.page_size
    )
    return slots_JO.flatten(), packed
