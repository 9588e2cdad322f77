"""A pass's tensors as the library's structures: attention batches and layers of keys and values."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.cpu.library import FORMATS, NativeAttention, NativeBatch, NativeKv
from slipstream.kernels.ops import Layer, Ops, Sight, sight_of

_FORMATS = {
    torch.float32: FORMATS["f32"],
    torch.bfloat16: FORMATS["bf16"],
    torch.float16: FORMATS["f16"],
    torch.float8_e4m3fn: FORMATS["e4m3"],
}


@dataclass(frozen=True)
class DescribedBatch:
    """The structure and the tensors it points into, which live as long as it does."""

    native: NativeBatch
    tensors: tuple[Tensor | None, ...]


def describe_batch(batch: AttentionBatch, slots_T: Tensor | None, positions_T: Tensor | None) -> DescribedBatch:
    """Point at a batch; tensors of another type or layout are converted first."""
    tensors = (
        _plain(batch.query_starts_R1, torch.int32),
        _plain(batch.kv_lens_R, torch.int32),
        _plain(batch.page_table_RP, torch.int32),
        _plain(batch.kv_index_T, torch.int64),
        _plain(batch.ancestors_T, torch.int64),
        None if slots_T is None else _plain(slots_T, torch.int64),
        None if positions_T is None else _plain(positions_T, torch.int64),
    )
    native = NativeBatch(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        batch.page_table_RP.shape[1],
        batch.kv_lens_R.shape[0],
        batch.kv_index_T.shape[0],
        batch.page_size,
    )
    return DescribedBatch(native, tensors)


def kv_is_plain(layer: KvLayer) -> bool:
    """Tell whether the library can use these keys and values: float32, bfloat16, float16 or FP8, heads side by side."""
    keys_SGd, values_SGd = layer.keys_SGd, layer.values_SGd
    plain_strides = keys_SGd.stride()[1:] == (keys_SGd.shape[2], 1)
    return (
        keys_SGd.dtype == values_SGd.dtype
        and keys_SGd.dtype in _FORMATS
        and plain_strides
        and keys_SGd.stride() == values_SGd.stride()
        and (layer.scales is None or all(part.is_contiguous() for part in layer.scales))
    )


def describe_kv(layers: Sequence[KvLayer]) -> "ctypes.Array[NativeKv]":
    """Point at the keys and values of layers that are plain; the tensors must outlive the description."""
    return (NativeKv * len(layers))(
        *(
            NativeKv(
                layer.keys_SGd.data_ptr(),
                layer.values_SGd.data_ptr(),
                *((None, None) if layer.scales is None else (part.data_ptr() for part in layer.scales)),
                layer.keys_SGd.stride(0),
                layer.keys_SGd.shape[0],
                _FORMATS[layer.keys_SGd.dtype],
            )
            for layer in layers
        )
    )


def describe_attention(q_THd: Tensor, layer: KvLayer, scale: float, window: int | Sight | None) -> NativeAttention:
    """Describe one attention call; sinks stay referenced from the description."""
    sight = sight_of(window)
    sinks_H = None if sight.sinks_H is None else _plain(sight.sinks_H.detach(), torch.float32)
    native = NativeAttention(
        None if sinks_H is None else sinks_H.data_ptr(),
        q_THd.shape[1],
        layer.keys_SGd.shape[1],
        q_THd.shape[2],
        sight.window or 0,
        scale,
        sight.chunk or 0,
    )
    native.keep = sinks_H
    return native


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous()


def run_apart(
    ops: Ops,
    layers: Sequence[Layer],
    hidden_TD: Tensor,
    ctx: Any,  # a PagedContext, which lives above kernels
    captured_layers: Sequence[int],
    embedding_TD: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Apply blocks to one batch and then to the one beside it: the library reads one a call."""
    first = len(ctx.batch.kv_index_T)
    outputs, captured = [], []
    for rows, batch in ((slice(0, first), ctx.batch), (slice(first, None), ctx.beside)):
        own = replace(ctx, positions_T=ctx.positions_T[rows], slots_T=ctx.slots_T[rows], batch=batch, beside=None)
        embedding = None if embedding_TD is None else embedding_TD[rows]
        hidden, states = ops.run_layers(layers, hidden_TD[rows], own, captured_layers, embedding)
        outputs.append(hidden)
        captured.append(states)
    return torch.cat(outputs), [torch.cat(states) for states in zip(*captured, strict=True)]
