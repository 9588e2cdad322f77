"""The EAGLE-3 draft: one module for training and for serving; only the context passed in differs.

Slot t pairs the target's features at position t with the token at t + 1 and predicts the token at t + 2. A P-EAGLE
draft goes on without knowing what it predicted: the slots behind pair a mask's features with a mask's token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import DraftSpec
from slipstream.kernels import PLAIN_BLOCK, Ops
from slipstream.models.context import ForwardContext, KvShape, latent_shape
from slipstream.models.fused.run import run_layers
from slipstream.models.layers import MLP, Attention, AttentionShape, Embedding, Linear, RMSNorm
from slipstream.models.mla import LatentAttention
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.rope import Rotary


class Eagle3Layer(nn.Module):
    """A block of the draft. The first sees [embedding ; hidden]; later ones are ordinary blocks."""

    def __init__(self, spec: DraftSpec, layer_index: int, rotary: Rotary, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._rotary = (rotary,)  # a tuple, so that the shared table is not registered once per layer
        self.first = layer_index == 0
        self.normed_residual = spec.residual == "normed"
        width = spec.hidden_size
        self.input_layernorm = RMSNorm(width, spec.rms_eps)
        self.hidden_norm = RMSNorm(width, spec.rms_eps) if self.first else None
        input_size = 2 * width if self.first else width
        self.self_attn: Attention | LatentAttention
        if spec.mla is None:
            self.self_attn = Attention(_attention_shape(spec, input_size), layer_index, ranks)
        else:
            self.self_attn = LatentAttention(spec.mla, spec.num_heads, input_size, width, layer_index, ranks)
        self.post_attention_layernorm = RMSNorm(width, spec.rms_eps)
        self.mlp = MLP(width, spec.intermediate_size, spec.mlp_bias, ranks)

    @property
    def rotary(self) -> Rotary:
        """The draft's table of rotary positions."""
        return self._rotary[0]

    @property
    def kind(self) -> str:
        """What the block is made of, in words."""
        plain = isinstance(self.self_attn, Attention)
        return PLAIN_BLOCK if plain else "latent attention and a gated feed-forward"

    @property
    def unusual(self) -> str:
        """What it has that a target's block does not, for kernels that fuse those: nothing that they do not know."""
        return ""

    def forward(self, hidden_TD: Tensor, ctx: ForwardContext, embedding_TD: Tensor) -> Tensor:
        """Return the stream after this block, before any final norm."""
        ops = ctx.ops
        x, residual_TD = self._read(hidden_TD, ops, embedding_TD)
        hidden_TD = residual_TD + self.self_attn(x, self.rotary(ctx.positions_T), ctx)
        out_TD: Tensor = hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD, ops), ops)
        return out_TD

    def keys_and_values(self, hidden_TD: Tensor, ctx: ForwardContext, embedding_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what others see of each slot, without the rest of the block; attention by head only."""
        assert isinstance(self.self_attn, Attention), "latents are no keys and values by head"
        x, _ = self._read(hidden_TD, ctx.ops, embedding_TD)
        return self.self_attn.project(x, self.rotary(ctx.positions_T), ctx)[1:]

    def _read(self, hidden_TD: Tensor, ops: Ops, embedding_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads, and what its output is added to."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden_TD, ops), hidden_TD
        normed_TD = self.hidden_norm(hidden_TD, ops)
        x = torch.cat([self.input_layernorm(embedding_TD, ops), normed_TD], dim=-1)
        return x, normed_TD if self.normed_residual else hidden_TD


@dataclass(frozen=True)
class DraftHidden:
    """What a draft pass leaves: what the head reads, and what the next draft step is fed."""

    normed_TD: Tensor
    feedback_TD: Tensor


class Eagle3Draft(nn.Module):
    """An EAGLE-3 draft. `embed_tokens` is the draft's own table or, after `share_embedding`, the target's."""

    token_ids_V: Tensor
    mask_features_C: Tensor | None

    def __init__(self, spec: DraftSpec, max_position: int | None = None, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.spec = spec
        self.ranks = ranks
        self.rotary = Rotary(spec.rope, max_position or spec.max_position)
        feature_width = spec.num_features * spec.target_hidden_size
        per_layer = spec.feature_norm == "per_layer"
        self.fc_norm = nn.ModuleList(
            RMSNorm(spec.target_hidden_size, spec.rms_eps) for _ in range(spec.num_features if per_layer else 0)
        )
        self.input_norm = RMSNorm(feature_width, spec.rms_eps) if spec.feature_norm == "concat" else None
        self.fc = Linear(feature_width, {"fc": spec.hidden_size})
        self.layers = nn.ModuleList(Eagle3Layer(spec, index, self.rotary, ranks) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.lm_head = Linear(spec.hidden_size, {"lm_head": ranks.cut(spec.draft_vocab_size)})
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.register_buffer("token_ids_V", torch.arange(spec.draft_vocab_size), persistent=False)
        mask_C = None if spec.mask_token_id is None else torch.zeros(feature_width)
        self.register_buffer("mask_features_C", mask_C, persistent=False)

    @property
    def kv_shape(self) -> KvShape:
        """What this rank keeps of the draft's keys and values, or the latents that stand for them."""
        if self.spec.mla is not None:
            return latent_shape(self.spec.mla, self.spec.num_layers)
        heads = (self.ranks.cut_or_copy(self.spec.num_kv_heads).size, self.spec.head_dim)
        return KvShape((heads,) * self.spec.num_layers)

    def share_embedding(self, embedding: Embedding) -> None:
        """Use the target's table of embeddings."""
        self.embed_tokens = embedding

    def see_last(self, window: int) -> None:
        """Have attention see the last `window` keys only, all if that is a whole context; latents have no windows."""
        shown = window if window < self.spec.max_position else None
        self.spec = replace(self.spec, sliding_window=shown)
        for layer in self.layers:
            assert isinstance(layer.self_attn, Attention), "only attention by head has windows"
            layer.self_attn.shape = replace(layer.self_attn.shape, window=shown)

    def fuse(self, features: tuple[Tensor, ...], ops: Ops) -> Tensor:
        """Turn the target's captured states at each position into the draft's input hidden state."""
        if len(self.fc_norm):
            features = tuple(norm(x, ops) for norm, x in zip(self.fc_norm, features, strict=True))
        joined_TC = torch.cat(features, dim=-1)
        if self.input_norm is not None:
            joined_TC = self.input_norm(joined_TC, ops)
        fused_TD: Tensor = self.fc(joined_TC, ops)
        return fused_TD

    def forward(self, hidden_TD: Tensor, token_ids_T: Tensor, ctx: ForwardContext) -> DraftHidden:
        """Run one draft step over T slots; `hidden_TD` is fused features or an earlier step's feedback."""
        embedding_TD = self.embed_tokens(token_ids_T, ctx.ops).to(hidden_TD.dtype)  # a target's table may be wider
        hidden_TD, _ = run_layers(list(self.layers), hidden_TD, ctx, (), embedding_TD)
        normed_TD = self.norm(hidden_TD, ctx.ops)
        return DraftHidden(normed_TD, normed_TD if self.spec.feedback == "post_norm" else hidden_TD)

    def run_masks(self, num_requests: int, num_masks: int, ctx: ForwardContext) -> DraftHidden:
        """Run a P-EAGLE draft over as many masks behind each request's last slot, which see those before them."""
        assert self.mask_features_C is not None and self.spec.mask_token_id is not None, "a P-EAGLE draft"
        fused_1D = self.fuse(self.mask_features_C[None].chunk(self.spec.num_features, dim=-1), ctx.ops)
        count = num_requests * num_masks
        token_T = torch.full((count,), self.spec.mask_token_id, device=fused_1D.device)
        hidden: DraftHidden = self(fused_1D.expand(count, -1).contiguous(), token_T, ctx)
        return hidden

    def foretell(self, feedback_LD: Tensor, ops: Ops) -> Tensor:
        """Return the logits of slots by what they feed the next draft step."""
        return self.logits(self.head_input(feedback_LD, ops), ops)

    def head_input(self, feedback_LD: Tensor, ops: Ops) -> Tensor:
        """Return what the head reads of slots by what they feed the next draft step."""
        normed_LD: Tensor = feedback_LD if self.spec.feedback == "post_norm" else self.norm(feedback_LD, ops)
        return normed_LD

    def logits(self, normed_LD: Tensor, ops: Ops) -> Tensor:
        """Return logits over this rank's part of the draft's vocabulary; its entry i is token `token_ids_V[i]`."""
        logits_LV: Tensor = self.lm_head(normed_LD, ops)
        return logits_LV


def _attention_shape(spec: DraftSpec, input_size: int) -> AttentionShape:
    return AttentionShape(
        input_size=input_size,
        output_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        qkv_bias=spec.qkv_bias,
        qk_norm_eps=spec.rms_eps if spec.qk_norm else None,
        window=spec.sliding_window,
    )
