"""The target: one module and a spec, for Llama-class decoders, DeepSeek-V3 (Kimi-K2) and MiniMax-M2 alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import SILU, ModelSpec
from slipstream.kernels import PLAIN_BLOCK, Ops, Sight
from slipstream.models.context import ForwardContext, KvShape, latent_shape
from slipstream.models.fused.run import run_layers
from slipstream.models.layers import MLP, Attention, AttentionShape, Embedding, Linear, RMSNorm, Scale
from slipstream.models.mla import LatentAttention
from slipstream.models.moe import ExpertsBeside, MixtureOfExperts
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.rope import Rotary


class DecoderLayer(nn.Module):
    """One block: attention and feed-forward, each behind a norm and added to the stream; the spec says of what kind."""

    def __init__(self, spec: ModelSpec, layer_index: int, rotary: Rotary | None, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._rotary = (rotary,)  # a tuple, so that the shared table is not registered once per layer

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_eps, spec.norm_offset)

        self.input_layernorm = norm()
        self.self_attn: Attention | LatentAttention
        if spec.mla is None:
            self.self_attn = Attention(attention_shape(spec, layer_index), layer_index, ranks)
        else:
            width = spec.hidden_size
            self.self_attn = LatentAttention(spec.mla, spec.num_heads, width, width, layer_index, ranks)
        self.post_attention_layernorm = norm()
        self.attention_out_norm = norm() if spec.norms_around else None
        self.feed_forward_out_norm = norm() if spec.norms_around else None
        beside = spec.moe is not None and spec.moe.beside_dense
        self.beside = ExpertsBeside(spec.moe, norm, ranks) if spec.moe is not None and beside else None
        self.out_scale = Scale() if spec.scaled_blocks else None
        self.mlp: MLP | MixtureOfExperts
        if spec.moe is None or beside or layer_index in spec.moe.dense_layers:
            self.mlp = MLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, ranks, True, spec.activation)
        else:
            self.mlp = MixtureOfExperts(spec.moe, spec.hidden_size, ranks)

    @property
    def kind(self) -> str:
        """What the block is made of, in words."""
        if isinstance(self.self_attn, Attention) and isinstance(self.mlp, MLP):
            return PLAIN_BLOCK
        attention = "attention by head" if isinstance(self.self_attn, Attention) else "latent attention"
        return f"{attention} and {'a gated feed-forward' if isinstance(self.mlp, MLP) else 'experts'}"

    @property
    def unusual(self) -> str:
        """What the block has that Llama's blocks and DeepSeek's do not, for kernels that fuse those; else nothing."""
        if isinstance(self.self_attn, Attention) and isinstance(self.self_attn.sight, Sight):
            return "attends with sinks or by chunks"
        if self.rotary is None or (isinstance(self.self_attn, Attention) and self.self_attn.shape.unit_qk_eps):
            return "knows no positions, or norms what it has rotated"
        if self.attention_out_norm is not None:
            return "norms what comes out of attention and of its feed-forward part"
        if isinstance(self.mlp, MLP) and self.mlp.activation != SILU:
            return "has another activation than SiLU"
        experts = self.mlp.experts if isinstance(self.mlp, MixtureOfExperts) else None
        if experts is not None and (experts.gate_up_bias is not None or experts.activation != SILU):
            return "has experts with biases or another activation than SiLU"
        if experts is not None and experts.weighs_inputs:
            return "weighs what experts are given"
        return ""

    @property
    def rotary(self) -> Rotary | None:
        """The block's table of rotary positions, if it knows any."""
        return self._rotary[0]

    def forward(self, hidden_TD: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the stream after this block."""
        rotary = None if self.rotary is None else self.rotary(ctx.positions_T)
        attended_TD = self.self_attn(self.input_layernorm(hidden_TD, ctx.ops), rotary, ctx)
        if self.attention_out_norm is not None:
            attended_TD = self.attention_out_norm(attended_TD, ctx.ops)
        hidden_TD = hidden_TD + attended_TD
        fed_TD = self.mlp(self.post_attention_layernorm(hidden_TD, ctx.ops), ctx.ops)
        if self.beside is not None:
            fed_TD = self.beside(fed_TD, hidden_TD, ctx.ops)
        if self.feed_forward_out_norm is not None:
            fed_TD = self.feed_forward_out_norm(fed_TD, ctx.ops)
        out_TD: Tensor = hidden_TD + fed_TD
        return out_TD if self.out_scale is None else self.out_scale(out_TD)


@dataclass(frozen=True)
class Hidden:
    """What a pass leaves: the stream after the last block, and each captured state, unnormed."""

    last_TD: Tensor
    captured: tuple[Tensor, ...]


class Target(nn.Module):
    """A decoder: table of embeddings, blocks, norm and head; or one rank's part, with part of the blocks and head."""

    def __init__(self, spec: ModelSpec, max_position: int | None = None, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.spec = spec
        self.ranks = ranks
        tables = {
            rope: Rotary(rope, max_position or spec.max_position)
            for rope in dict.fromkeys([spec.rope, *(block.rope for block in spec.blocks if block.rope is not None)])
        }
        self.rotary, *others = tables.values()
        self.other_rotaries = nn.ModuleList(others)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, None if (rope := spec.block(index).rope) is None else tables[rope], ranks)
            for index in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps, spec.norm_offset)
        self.lm_head = Linear(spec.hidden_size, {"lm_head": ranks.cut(spec.vocab_size)})
        if spec.tie_embeddings and ranks.size == 1:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def kv_shape(self) -> KvShape:
        """What this rank keeps of keys and values, or the latents that stand for them."""
        mla = self.spec.mla
        return self.kv_shape_by_head if mla is None else latent_shape(mla, self.spec.num_layers)

    @property
    def kv_shape_by_head(self) -> KvShape:
        """What keys and values take in a cache that keeps the heads apart, as training's does."""
        blocks = (self.spec.block_heads(index) for index in range(self.spec.num_layers))
        return KvShape(tuple((self.ranks.cut_or_copy(kv_heads).size, width) for width, kv_heads in blocks))

    def forward(self, token_ids_T: Tensor, ctx: ForwardContext, captured_layers: Sequence[int] = ()) -> Hidden:
        """Run the blocks; `captured_layers` counts blocks applied (0 = the embedding)."""
        embedding_TD = self.embed_tokens(token_ids_T, ctx.ops)
        if (scale := self.spec.embedding_scale) is not None:
            # Rounded to the rows' type first, as those who trained it did; drafts share the table as it is.
            embedding_TD = embedding_TD * torch.tensor(scale, dtype=embedding_TD.dtype, device="cpu").item()
        last_TD, captured = run_layers(list(self.layers), embedding_TD, ctx, captured_layers)
        return Hidden(last_TD, tuple(captured))

    def logits(self, last_LD: Tensor, ops: Ops) -> Tensor:
        """Turn rows of the stream after the last block into logits over this rank's part of the vocabulary."""
        logits_LV: Tensor = self.lm_head(self.norm(last_LD, ops), ops)
        if (cap := self.spec.logit_cap) is None:
            return logits_LV
        # In float64, rounded once: torch's vectors and the rest of a row differ in the last bit of a tanh.
        return (torch.tanh(logits_LV.double() / cap) * cap).to(logits_LV.dtype)


def attention_shape(spec: ModelSpec, layer_index: int = 0) -> AttentionShape:
    """Read the shape of a block's attention off a target's spec."""
    block = spec.block(layer_index)
    head_dim, num_kv_heads = spec.block_heads(layer_index)
    return AttentionShape(
        input_size=spec.hidden_size,
        output_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        qk_norm_eps=spec.rms_eps if spec.qk_norm else None,
        norms_all_heads=spec.qk_norm == "full",
        window=block.window,
        chunk=block.chunk,
        rotates=block.rope is not None,
        neighbours=spec.neighbours,
        unit_qk_eps=spec.rms_eps if spec.unit_qk and block.rope is not None else None,
        tempering=spec.tempering,
        sinks=spec.sinks,
        scale=spec.attention_scale,
        norm_offset=spec.norm_offset,
        keys_as_values=block.keys_as_values,
        unit_values_eps=spec.rms_eps if spec.unit_values else None,
    )
