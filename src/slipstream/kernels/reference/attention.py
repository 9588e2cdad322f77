"""Paged attention over a tree of query tokens, one request at a time."""

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.ops import Sight, sight_of
from slipstream.kernels.reference.kv_fp8 import keys_and_values


def attention(q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | Sight | None) -> Tensor:
    """Attend over the pages of each request, in the queries' type; see `AttentionBatch` for what a token may see."""
    sight = sight_of(window)
    batch = batch if batch.tree is None else batch.by_node
    out_THd = torch.empty_like(q_THd)
    starts = batch.query_starts_R1.tolist()
    kv_lens = batch.kv_lens_R.tolist()
    for row, kv_len in enumerate(kv_lens):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        slots_K = _slots(batch, row, kv_len)
        visible_QK = _visible(batch.kv_index_T[tokens], batch.ancestors_T[tokens], kv_len, sight)
        k_KGd, v_KGd = keys_and_values(layer, slots_K, q_THd.dtype)
        if sight.sinks_H is not None:
            kept = KvLayer(k_KGd, v_KGd)
            out_THd[tokens] = sink_attention(q_THd[tokens], kept, visible_QK, scale, sight.sinks_H)
            continue
        out_THd[tokens] = torch.nn.functional.scaled_dot_product_attention(
            q_THd[tokens].transpose(0, 1).unsqueeze(0),
            k_KGd.transpose(0, 1).unsqueeze(0),
            v_KGd.transpose(0, 1).unsqueeze(0),
            attn_mask=visible_QK,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out_THd


def sink_attention(q_QHd: Tensor, kv: KvLayer, visible_QK: Tensor, scale: float, sinks_H: Tensor) -> Tensor:
    """Attend with a score for no key in each head's softmax; leading dimensions of queries and keys are shared.

    The softmax is in float32, whatever the queries' type.
    """
    groups = q_QHd.shape[-2] // kv.keys_SGd.shape[-2]
    q_HQd = q_QHd.transpose(-2, -3)
    k_HKd, v_HKd = (
        x.to(q_QHd.dtype).transpose(-2, -3).repeat_interleave(groups, dim=-3) for x in (kv.keys_SGd, kv.values_SGd)
    )
    scores_HQK = ((q_HQd @ k_HKd.transpose(-1, -2)).float() * scale).masked_fill(~visible_QK.unsqueeze(-3), -torch.inf)
    sinks_HQ1 = sinks_H.float()[:, None, None].expand(*scores_HQK.shape[:-1], 1)
    weights_HQK = torch.cat([scores_HQK, sinks_HQ1], dim=-1).softmax(-1)[..., :-1]
    return (weights_HQK.to(q_QHd.dtype) @ v_HKd).transpose(-2, -3)


def latent_attention(q_THC: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, value_width: int) -> Tensor:
    """Attend over one latent per key, one token at a time, so that nothing depends on the other tokens."""
    batch = batch if batch.tree is None else batch.by_node
    out_THc = q_THC.new_empty((*q_THC.shape[:-1], value_width))
    starts = batch.query_starts_R1.tolist()
    for row, kv_len in enumerate(batch.kv_lens_R.tolist()):
        slots_K = _slots(batch, row, kv_len)
        tokens = slice(starts[row], starts[row + 1])
        visible_QK = _visible(batch.kv_index_T[tokens], batch.ancestors_T[tokens], kv_len, Sight())
        for token, visible_K in zip(range(tokens.start, tokens.stop), visible_QK, strict=True):
            latent_KC = keys_and_values(layer, slots_K[visible_K], torch.float32)[0][:, 0]
            scores_HK = q_THC[token].float() @ latent_KC.t() * scale
            out_THc[token] = (scores_HK.softmax(-1) @ latent_KC[:, :value_width]).to(q_THC.dtype)
    return out_THc


def as_kept(rows_TGd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in the type they are kept in; what half precision cannot say becomes its largest number.

    A key of infinite size would turn all that attends to it into no number at all; one of 65504 is merely too small.
    """
    if dtype == torch.float16 and rows_TGd.dtype != torch.float16:
        largest = torch.finfo(torch.float16).max
        rows_TGd = rows_TGd.clamp(-largest, largest)
    return rows_TGd.to(dtype)


def _slots(batch: AttentionBatch, row: int, kv_len: int) -> Tensor:
    num_pages = -(-kv_len // batch.page_size)
    pages_P = batch.page_table_RP[row, :num_pages].long()
    offsets_O = torch.arange(batch.page_size, device=pages_P.device)
    return (pages_P[:, None] * batch.page_size + offsets_O).reshape(-1)[:kv_len]


def _visible(kv_index_Q: Tensor, ancestors_Q: Tensor, kv_len: int, sight: Sight) -> Tensor:
    key_K = torch.arange(kv_len, device=kv_index_Q.device)
    distance_QK = kv_index_Q[:, None] - key_K
    bit_QK = (ancestors_Q[:, None] >> distance_QK.clamp(0, 63)) & 1
    visible_QK = (distance_QK >= 0) & ((distance_QK > 63) | (bit_QK == 1))
    # Windows and chunks count positions; a key's is how many keys are seen before it, of a tree those of its path.
    position_QK = visible_QK.cumsum(1) - 1
    own_Q1 = position_QK[:, -1:]
    if sight.window is not None:
        visible_QK = visible_QK & (own_Q1 - position_QK < sight.window)
    if sight.chunk is not None:
        visible_QK = visible_QK & (position_QK >= own_Q1 // sight.chunk * sight.chunk)
    return visible_QK
