"""A cache of fixed shape for generation in large batches, and the two forward contexts that use it.

Shape letters beyond the kernels': B rows of the batch, n rows being filled, P prompt length, S cache length, R query
heads per key head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import KvLayer, Ops
from slipstream.models.context import KvShape
from slipstream.models.latent import LatentUp, attend_by_head

DecodeAttention = Callable[[Tensor, KvLayer, Tensor, float, int | None], Tensor]
"""q_BHd, a layer [B, G, S, d], keys per row, scale, window -> out_BHd."""


class StaticCache:
    """Keys and values of every layer, [rows, heads, length, width]; a row belongs to one request at a time."""

    def __init__(self, shape: KvShape, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (rows, shape.num_kv_heads, length, shape.head_dim)
        self.length = length
        self.layers = [
            KvLayer(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
            for _ in range(shape.num_layers)
        ]


@dataclass(frozen=True)
class FillContext:
    """A pass over whole prompts, padded on the right: causality keeps the padding out of what comes before it."""

    ops: Ops
    positions_T: Tensor
    rows_n: Tensor
    cache: StaticCache

    def attend(
        self, layer_index: int, q_nPHd: Tensor, k_nPGd: Tensor, v_nPGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write the prompts' keys and values to the start of their rows, and attend causally."""
        layer = self.cache.layers[layer_index]
        q, k, v = q_nPHd.transpose(1, 2), k_nPGd.transpose(1, 2), v_nPGd.transpose(1, 2)
        layer.keys_SGd[self.rows_n, :, : k.shape[2]] = k
        layer.values_SGd[self.rows_n, :, : v.shape[2]] = v
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mask = None if window is None else _banded(q.shape[2], window, q.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return out.transpose(1, 2)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


@dataclass(frozen=True)
class DecodeContext:
    """A pass over one token of every row; `positions_T` is also where its key goes."""

    ops: Ops
    positions_T: Tensor
    cache: StaticCache
    attention: DecodeAttention

    def attend(
        self, layer_index: int, q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write each row's key and value at its position, and attend to the row so far."""
        layer = self.cache.layers[layer_index]
        rows_B = torch.arange(k_BGd.shape[0], device=k_BGd.device)
        layer.keys_SGd[rows_B, :, self.positions_T] = k_BGd
        layer.values_SGd[rows_B, :, self.positions_T] = v_BGd
        return self.attention(q_BHd, layer, self.positions_T + 1, scale, window)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


def decode_attention(q_BHd: Tensor, layer: KvLayer, lengths_B: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend one query per row to the first `lengths_B` keys of its row, in plain torch."""
    num_rows, num_heads, width = q_BHd.shape
    keys, values = layer.keys_SGd, layer.values_SGd
    q_BGRd = q_BHd.view(num_rows, keys.shape[1], -1, width)
    scores_BGRS = (q_BGRd @ keys.transpose(-1, -2)).float() * scale
    index_S = torch.arange(keys.shape[2], device=q_BHd.device)
    hidden_BS = index_S >= lengths_B[:, None]
    if window is not None:
        hidden_BS = hidden_BS | (index_S < lengths_B[:, None] - window)
    weights_BGRS = scores_BGRS.masked_fill(hidden_BS[:, None, None, :], -torch.inf).softmax(-1)
    return (weights_BGRS.to(values.dtype) @ values).view(num_rows, num_heads, width)


def _banded(length: int, window: int, device: torch.device) -> Tensor:
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)
