"""The DFlash draft: Qwen3 blocks that fill a block of tokens in one pass, over keys made of the target's features.

The target's captured states at a position, fused, become a key and a value of every layer, with no pass of the draft
over the text. Behind them stands the block: the last known token and masks, each of which foretells the token at its
own place.

Shape letters: T tokens, D draft width, H heads, G key heads, d numbers of a head, V draft vocabulary, L rows.
"""

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import BlockDraftSpec
from slipstream.kernels import Ops
from slipstream.models.context import KvShape, PagedContext
from slipstream.models.layers import MLP, Embedding, Linear, RMSNorm
from slipstream.models.rope import Rotary


class BlockAttention(nn.Module):
    """Attention whose keys and values come of the block's tokens or of the target's features, by the same weights."""

    def __init__(self, spec: BlockDraftSpec, layer_index: int) -> None:
        super().__init__()
        self.layer_index, self.head_dim, self.window = layer_index, spec.head_dim, spec.windows[layer_index]
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, {"q_proj": q}, spec.attention_bias)
        self.kv_proj = Linear(spec.hidden_size, {"k_proj": kv, "v_proj": kv}, spec.attention_bias)
        self.o_proj = Linear(q, {"o_proj": spec.hidden_size}, spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps)

    def keys_and_values(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], ops: Ops) -> tuple[Tensor, Tensor]:
        """Return keys, in their positions, and values by head."""
        k_TGd, v_TGd = self.kv_proj(x_TD, ops).unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        return ops.rotate(self.k_norm(k_TGd.contiguous(), ops), *rotary), v_TGd.contiguous()

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], ctx: PagedContext) -> Tensor:
        """Attend to what the context lets each token see."""
        q_THd = self.q_norm(self.q_proj(x_TD, ctx.ops).unflatten(-1, (-1, self.head_dim)), ctx.ops)
        k_TGd, v_TGd = self.keys_and_values(x_TD, rotary, ctx.ops)
        scale = self.head_dim**-0.5
        out_THd = ctx.attend(self.layer_index, ctx.ops.rotate(q_THd, *rotary), k_TGd, v_TGd, scale, self.window)
        projected_TD: Tensor = self.o_proj(out_THd.flatten(-2), ctx.ops)
        return projected_TD


class BlockLayer(nn.Module):
    """A block of the draft: attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, spec: BlockDraftSpec, layer_index: int) -> None:
        super().__init__()
        self.causal = spec.causal[layer_index]
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.self_attn = BlockAttention(spec, layer_index)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)

    def forward(self, hidden_TD: Tensor, rotary: tuple[Tensor, Tensor], ctx: PagedContext) -> Tensor:
        """Return the stream after this block."""
        hidden_TD = hidden_TD + self.self_attn(self.input_layernorm(hidden_TD, ctx.ops), rotary, ctx)
        out_TD: Tensor = hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD, ctx.ops), ctx.ops)
        return out_TD


class BlockDraft(nn.Module):
    """A DFlash draft. Its table of embeddings and its head are the target's, where a checkpoint leaves them out."""

    token_ids_V: Tensor

    def __init__(self, spec: BlockDraftSpec, max_position: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.rotary = Rotary(spec.rope, max_position or spec.max_position)
        self.fc = Linear(spec.num_features * spec.target_hidden_size, {"fc": spec.hidden_size})
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(spec, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.lm_head = Linear(spec.hidden_size, {"lm_head": spec.draft_vocab_size})
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.register_buffer("token_ids_V", torch.arange(spec.draft_vocab_size), persistent=False)

    @property
    def kv_shape(self) -> KvShape:
        """What is kept of a token's features."""
        return KvShape(((self.spec.num_kv_heads, self.spec.head_dim),) * self.spec.num_layers)

    def follow(self, features: tuple[Tensor, ...], ctx: PagedContext) -> None:
        """Write the keys and values that the target's captured states at each position stand for."""
        fused_TD = self.hidden_norm(self.fc(torch.cat(features, dim=-1), ctx.ops), ctx.ops)
        rotary = self.rotary(ctx.positions_T)
        for layer, kept in zip(self.layers, ctx.kv.layers, strict=True):
            assert isinstance(layer, BlockLayer)
            k_TGd, v_TGd = layer.self_attn.keys_and_values(fused_TD, rotary, ctx.ops)
            ctx.ops.write_kv(kept, k_TGd, v_TGd, ctx.slots_T)

    def forward(self, token_ids_T: Tensor, whole: PagedContext, causal: PagedContext) -> Tensor:
        """Run blocks of tokens; return what the head reads.

        Args:
            whole: every token sees its whole block, those after it included.
            causal: the same pass, in which a token of a block sees only those before it.
        """
        hidden_TD = self.embed_tokens(token_ids_T, whole.ops).to(self.norm.weight.dtype)
        rotary = self.rotary(whole.positions_T)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, rotary, causal if layer.causal else whole)
        normed_TD: Tensor = self.norm(hidden_TD, whole.ops)
        return normed_TD

    def logits(self, normed_LD: Tensor, ops: Ops) -> Tensor:
        """Return logits over the draft's vocabulary; its entry i is token `token_ids_V[i]`."""
        logits_LV: Tensor = self.lm_head(normed_LD, ops)
        return logits_LV
