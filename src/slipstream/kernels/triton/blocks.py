"""Decoder blocks as eight kernels each: norm, qkv, rope and write, attention, o, norm, gate and up, down.

Modules lie a package higher than kernels, so blocks are read by the attributes they share (see `slipstream.models`).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.kernels.triton import norm_rope
from slipstream.kernels.triton.attention import AttentionLaunch, attention
from slipstream.kernels.triton.linear import Epilogue
from slipstream.kernels.triton.norm_rope import Norm, Rope
from slipstream.kernels.triton.products import Products, Rows, Weight


class Blocks:
    """Runs the blocks of Llama-class targets and EAGLE-3 drafts over pages."""

    def __init__(self, products: Products, launch: AttentionLaunch) -> None:
        self._products = products
        self._launch = launch

    def unfit(self, layers: Sequence[Any], ctx: Any) -> str:
        """Return why these blocks cannot run here, or nothing; `ctx` is any forward context."""
        if not layers or getattr(ctx, "kv", None) is None:
            return "the context keeps no pages"
        for index, layer in enumerate(layers):
            attention_layer, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
            linears = [getattr(attention_layer, name, None) for name in ("qkv_proj", "o_proj")]
            linears += [getattr(mlp, name, None) for name in ("gate_up_proj", "down_proj")]
            if any(linear is None or type(linear).__name__ != "Linear" for linear in linears):
                return f"block {index} is not made of plain attention and a gated feed-forward"
            if any(getattr(getattr(linear, "ranks", None), "size", 1) > 1 for linear in linears):
                return f"block {index} is split over ranks, which add up after each product"
            unknown = next((linear for linear in linears if not self._products.knows(_weight(linear))), None)
            if unknown is not None:
                return f"block {index} has weights of {_described(unknown)}, which the Triton kernels do not multiply"
        return ""

    def run(
        self, layers: Sequence[Any], hidden_TD: Tensor, ctx: Any, captured_layers: Sequence[int],
        embedding_TD: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Apply blocks in order; also return the hidden states captured."""
        seen = {0: hidden_TD}
        for applied, layer in enumerate(layers, start=1):
            hidden_TD = self._block(layer, hidden_TD, ctx, embedding_TD)
            if applied in captured_layers:
                seen[applied] = hidden_TD
        return hidden_TD, [seen[k] for k in captured_layers]

    def _block(self, layer: Any, hidden_TD: Tensor, ctx: Any, embedding_TD: Tensor | None) -> Tensor:
        qkv_weight = _weight(layer.self_attn.qkv_proj)
        if getattr(layer, "hidden_norm", None) is not None:
            norms = (_norm(layer.input_layernorm), _norm(layer.hidden_norm))
            assert embedding_TD is not None, "a draft's first block is given embeddings"
            both = norm_rope.norm_both(embedding_TD, hidden_TD, norms, self._products.dependent)
            rows = self._products.rows_for(qkv_weight, both)
            residual = both[:, hidden_TD.shape[1] :] if layer.normed_residual else hidden_TD
        else:
            rows, residual = self._normed(hidden_TD, _norm(layer.input_layernorm), qkv_weight), hidden_TD
        attended = self._attend(layer, rows, ctx)
        hidden_TD = self._project(layer.self_attn.o_proj, attended, residual)
        gate_up = layer.mlp.gate_up_proj
        rows = self._normed(hidden_TD, _norm(layer.post_attention_layernorm), _weight(gate_up))
        inner = self._products.multiply(rows, _weight(gate_up), Epilogue(gate_up.bias, None, silu=True))
        return self._project(layer.mlp.down_proj, inner, hidden_TD)

    def _attend(self, layer: Any, rows: Rows, ctx: Any) -> Tensor:
        own, shape = layer.self_attn, layer.self_attn.shape
        qkv = self._products.multiply(rows, _weight(own.qkv_proj), Epilogue(own.qkv_proj.bias))
        kv = ctx.kv.layers[own.layer_index]
        rope = Rope(ctx.slots_T, ctx.positions_T, layer.rotary.cos_Pr, layer.rotary.sin_Pr)
        qk_norm = None if own.q_norm is None else (_norm(own.q_norm), _norm(own.k_norm))
        heads = (shape.num_heads, shape.num_kv_heads)
        q = norm_rope.rope_and_write(qkv, heads, rope, kv, qk_norm, self._products.dependent)
        out = attention(q, kv, ctx.batch, shape.head_dim**-0.5, shape.window, self._launch)
        return out.flatten(1)

    def _normed(self, x_TD: Tensor, norm: Norm, weight: Weight) -> Rows:
        codes = self._products.wants(weight)
        if codes is None:
            return self._products.rows_for(weight, norm_rope.rms_norm(x_TD, norm, self._products.dependent))
        return Rows(*norm_rope.norm_codes(x_TD, norm, codes, self._products.dependent), x_TD.dtype)

    def _project(self, linear: Any, x_TD: Tensor, residual_TN: Tensor) -> Tensor:
        weight = _weight(linear)
        rows = self._products.rows_for(weight, x_TD)
        return self._products.multiply(rows, weight, Epilogue(linear.bias, residual_TN))


def _weight(linear: Any) -> Weight:
    weight: Weight = linear.weight if linear.weight is not None else linear.packed
    return weight


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


def _described(linear: Any) -> str:
    return str(linear.weight.dtype) if linear.weight is not None else f"format {linear.packed.format}"
