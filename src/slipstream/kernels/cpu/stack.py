"""Stacks of decoder blocks as the library's structures, worked out once per model and per cache of keys and values.

Modules lie a package higher than kernels. A block says what it is made of (`kind`) and what it has that others of its
kind do not (`unusual`); those that the library has are read by the attributes they share (see `slipstream.models`).
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.batch import describe_kv, kv_is_plain
from slipstream.kernels.cpu.library import NativeKv, NativeLayer, NativeLinear, NativeStack
from slipstream.kernels.cpu.weights import PANEL, SUFFIX, describe_linear, is_dense, weight_address
from slipstream.kernels.ops import PLAIN_BLOCK

MAX_GROUP = 256
"""Query heads that may share a key head (native/table.h)."""


class DescribedStack:
    """Blocks and caches in the library's terms, holding every tensor the structures point into."""

    def __init__(self, blocks: "DescribedBlocks", kv: "ctypes.Array[NativeKv]") -> None:
        self._blocks = blocks
        self._kv = kv

    def native(self, captured_layers: Sequence[int], captured: Sequence[Tensor] | None) -> NativeStack:
        """Return the structure of one call; the arrays stay referenced from it.

        Args:
            captured: where states go; None for a call that keeps them to itself.
        """
        counts = (ctypes.c_int32 * len(captured_layers))(*captured_layers)
        outs = (ctypes.c_void_p * len(captured_layers))(*(state.data_ptr() for state in captured or ()))
        native = NativeStack(
            ctypes.addressof(self._blocks.native),
            ctypes.addressof(self._kv),
            ctypes.addressof(counts),
            ctypes.addressof(outs),
            len(self._blocks.native),
            len(captured_layers),
            self._blocks.width,
        )
        native.keep = (counts, outs, self._blocks, self._kv)
        return native


class DescribedBlocks:
    """The blocks of one model."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._kept: list[object] = []
        self.witness = _witness(layers)
        self.width: int = layers[0].input_layernorm.weight.shape[0]
        self.native = (NativeLayer * len(layers))(*(self._layer(layer) for layer in layers))

    def _layer(self, layer: Any) -> NativeLayer:
        attention, shape = layer.self_attn, layer.self_attn.shape
        hidden_norm = getattr(layer, "hidden_norm", None)
        rotary = layer.rotary
        return NativeLayer(
            self._linear(attention.qkv_proj),
            self._linear(attention.o_proj),
            self._linear(layer.mlp.gate_up_proj),
            self._linear(layer.mlp.down_proj),
            self._floats(layer.input_layernorm.weight),
            None if hidden_norm is None else self._floats(hidden_norm.weight),
            self._floats(layer.post_attention_layernorm.weight),
            None if attention.q_norm is None else self._floats(attention.q_norm.weight),
            None if attention.k_norm is None else self._floats(attention.k_norm.weight),
            self._floats(rotary.cos_Pr),
            self._floats(rotary.sin_Pr),
            layer.input_layernorm.eps,
            shape.qk_norm_eps or 0.0,
            shape.softmax_scale,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            rotary.cos_Pr.shape[1],
            rotary.cos_Pr.shape[0],
            shape.window or 0,
            int(getattr(layer, "normed_residual", False)),
            layer.mlp.down_proj.in_features,
        )

    def _linear(self, linear: Any) -> NativeLinear:
        return describe_linear(linear, self._kept)

    def _floats(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().float().contiguous()).data_ptr()

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor


class StackCache:
    """Descriptions already made, by the first block and by the cache; both are forgotten with their owners."""

    def __init__(self) -> None:
        self._blocks: weakref.WeakKeyDictionary[Any, DescribedBlocks] = weakref.WeakKeyDictionary()
        self._stacks: weakref.WeakKeyDictionary[Any, tuple[DescribedBlocks, DescribedStack]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, layers: Sequence[Any], kv: Any | None) -> DescribedStack | str:
        """Return the description of these blocks over a cache, or why there is none."""
        if not layers or kv is None:
            return "the context keeps no pages"
        if other := next((layer for layer in layers if layer.kind != PLAIN_BLOCK), None):
            return f"the library has no blocks of {other.kind}"
        blocks = self._blocks.get(layers[0])
        if blocks is None or blocks.witness != _witness(layers):
            reason = _unfit(layers)
            if reason:
                return reason
            blocks = self._blocks[layers[0]] = DescribedBlocks(layers)
        known = self._stacks.get(kv)
        if known is None or known[0] is not blocks:
            unfit = next((layer for layer in kv.layers if not kv_is_plain(layer)), None)
            if unfit is not None or len(kv.layers) < len(layers):
                kept = kv.layers[0].keys_SGd.dtype
                return f"keys and values are {kept}, not contiguous float32, bfloat16, float16 or FP8"
            indices = [layer.self_attn.layer_index for layer in layers]
            described = DescribedStack(blocks, describe_kv([kv.layers[index] for index in indices]))
            known = self._stacks[kv] = (blocks, described)
        return known[1]


def _witness(layers: Sequence[Any]) -> tuple[object, ...]:
    """Return what changes when a model is repacked, moved or given other weights as a whole."""
    first, last = layers[0], layers[-1]
    return (
        len(layers),
        id(last),
        *map(weight_address, (first.self_attn.qkv_proj, first.mlp.down_proj, last.self_attn.o_proj)),
        first.input_layernorm.weight.data_ptr(),
    )


def _unfit(layers: Sequence[Any]) -> str:
    """Return why blocks cannot run in one call, or nothing."""
    shapes = {(layer.self_attn.shape.num_heads, layer.self_attn.shape.head_dim) for layer in layers}
    if len(shapes) > 1:
        return "the blocks have heads of different shapes"
    if any(layer.self_attn.o_proj.ranks.size > 1 for layer in layers):
        return "the blocks are split over ranks, which add up after each product"
    for index, layer in enumerate(layers):
        if layer.unusual:
            return f"block {index} {layer.unusual}"
        shape = layer.self_attn.shape
        if shape.norms_all_heads:
            return "queries and keys are normed over all heads"
        if shape.num_heads % shape.num_kv_heads:
            return f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} key heads evenly"
        if shape.num_heads > MAX_GROUP * shape.num_kv_heads:
            return f"more than {MAX_GROUP} query heads share a key head"
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if linear.weight is not None and not is_dense(linear.weight):
                return f"block {index} has weights of {linear.weight.dtype} with strides {linear.weight.stride()}"
            runs = () if linear.weight is not None else linear.packed.runs
            if unknown := next((run.format for run in runs if not run.format.endswith(SUFFIX)), None):
                return f"block {index} has weights of format {unknown}, not prepared for the CPU kernels"
            if any(run.out_features % PANEL for run in runs[:-1]):
                return f"block {index} has weights whose format changes within {PANEL} rows"
        if layer.input_layernorm.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"block {index} has norms of {layer.input_layernorm.weight.dtype}"
    return ""
