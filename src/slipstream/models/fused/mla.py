"""Decoder blocks of latent attention and experts as twelve kernels each, fifteen with many rows, ten if dense.

Norm, squeeze, query and latent, absorb, attend, merge and values, output; norm, scores and shared expert, choice and
INT8 rows, gate and up, down and sum. Many rows are first listed by expert; activation and sum are then on their own.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.kernels.triton import norm as norms
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.mla.attention import attend_pieces
from slipstream.kernels.triton.mla.heads import HEAD_TILE, heads_linear, query_and_write
from slipstream.kernels.triton.mla.merge import merge_values
from slipstream.kernels.triton.moe import router
from slipstream.kernels.triton.moe.dispatch import ExpertOptions, experts, row_codes
from slipstream.kernels.triton.moe.tiles import expert_tiles
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.ops import FusedKernels
from slipstream.kernels.triton.rope import Rope
from slipstream.models.layers import MLP


class MlaBlocks:
    """Runs the blocks of DeepSeek-V3 and Kimi-K2 over pages, for tokens that are no prompt's."""

    def __init__(self, kernels: FusedKernels) -> None:
        self._products = kernels.products
        self._architecture = kernels.architecture
        self._options = kernels.moe

    def unfit(self, layers: Sequence[Any], ctx: Any) -> str:
        """Return why these blocks cannot run here, or nothing; `ctx` is any forward context."""
        if not layers or getattr(ctx, "kv", None) is None:
            return "the context keeps no pages"
        if any(ctx.prompt_rows):
            return "the pass holds tokens of prompts, which attend in the expanded form"
        for index, layer in enumerate(layers):
            own = layer.self_attn
            if getattr(own, "q_b_proj", None) is None:
                return f"block {index} has no latent attention with squeezed queries"
            if own.spec.kv_rank % HEAD_TILE:
                return f"block {index} has latents of {own.spec.kv_rank} numbers, no multiple of {HEAD_TILE}"
            if own.o_proj.ranks.size > 1:
                return f"block {index} is split over ranks, whose parts must be summed"
            linears = [own.qkv_a_proj, own.q_b_proj, own.o_proj, *_feed_forward(layer)]
            if any(linear.weight is None or linear.bias is not None for linear in linears):
                return f"block {index} has quantized or biased weights beside its experts"
            if unusual := getattr(layer, "unusual", ""):
                return f"block {index} {unusual}"
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None and not router.fits(gate.routing):
                return f"block {index} chooses experts by groups"
        return ""

    def run(
        self, layers: Sequence[Any], hidden_TD: Tensor, ctx: Any, captured_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply blocks in order; also return the hidden states captured."""
        seen = {0: hidden_TD}
        for applied, layer in enumerate(layers, start=1):
            hidden_TD = self._attend(layer, hidden_TD, ctx)
            hidden_TD = self._feed_forward(layer, hidden_TD)
            if applied in captured_layers:
                seen[applied] = hidden_TD
        return hidden_TD, [seen[k] for k in captured_layers]

    def _attend(self, layer: Any, hidden_TD: Tensor, ctx: Any) -> Tensor:
        own, spec, dependent = layer.self_attn, layer.self_attn.spec, self._products.dependent
        kv = ctx.kv.layers[own.layer_index]
        rope = Rope(ctx.slots_T, ctx.positions_T, layer.rotary.cos_Pr, layer.rotary.sin_Pr)
        squeezed_TC = self._multiply(self._normed(hidden_TD, layer.input_layernorm), own.qkv_a_proj)
        norms = (_norm(own.q_a_layernorm), _norm(own.kv_a_layernorm))
        q_TN = query_and_write(squeezed_TC, norms, own.q_b_proj.weight, rope, kv, dependent)
        q_THd = q_TN.view(-1, own.num_heads, spec.head_dim)
        up_HNc = own.kv_b_proj.weight.view(own.num_heads, -1, spec.kv_rank)
        q_THC = heads_linear(q_THd, up_HNc[:, : spec.nope_dim].transpose(1, 2), rope, dependent)
        pieces = attend_pieces(q_THC, kv, ctx.batch, spec.scale, spec.kv_rank, dependent=dependent)
        out_THv = merge_values(pieces, up_HNc[:, spec.nope_dim :], dependent)
        return self._multiply(out_THv.flatten(1), own.o_proj, hidden_TD)

    def _feed_forward(self, layer: Any, hidden_TD: Tensor) -> Tensor:
        x_TD, mlp = self._normed(hidden_TD, layer.post_attention_layernorm), layer.mlp
        gate = getattr(mlp, "gate", None)
        if gate is None:
            return self._gated(mlp, x_TD, hidden_TD)
        gate_up, down = mlp.experts.weights
        shared = mlp.shared_experts
        inputs = router.Gate(
            gate.weight, gate.bias_E, gate.routing,
            None if shared is None else shared.gate_up_proj.weight,
        )  # fmt: skip
        codes = row_codes(x_TD, gate_up)
        routed = router.route_rows(x_TD, inputs, codes, self._products.dependent)
        chosen = routed.ids_TK, routed.weights_TK
        if self._options.on_choice is not None:
            self._options.on_choice(routed.ids_TK)
        tiles = expert_tiles(self._architecture, gate_up.format, routed.ids_TK.numel()).changed(self._options.settings)
        inner = None if routed.shared_TI is None else (routed.shared_TI, shared.down_proj.weight)
        options = ExpertOptions(tiles, hidden_TD, self._products.dependent, codes, inner)
        return experts(x_TD, gate_up, down, *chosen, options)

    def _gated(self, mlp: Any, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        return self._multiply(self._multiply(x_TD, mlp.gate_up_proj, silu=True), mlp.down_proj, residual_TD)

    def _multiply(self, x_TD: Tensor, linear: Any, residual_TD: Tensor | None = None, silu: bool = False) -> Tensor:
        rows = self._products.rows_for(linear.weight, x_TD)
        return self._products.multiply(rows, linear.weight, Epilogue(None, residual_TD, silu=silu))

    def _normed(self, x_TD: Tensor, norm: Any) -> Tensor:
        return norms.rms_norm(x_TD, _norm(norm), self._products.dependent)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


def _feed_forward(layer: Any) -> list[Any]:
    """Return the dense products of a block's feed-forward part."""
    mlp = layer.mlp if isinstance(layer.mlp, MLP) else layer.mlp.shared_experts
    return [] if mlp is None else [mlp.gate_up_proj, mlp.down_proj]
