"""Multi-head latent attention (DeepSeek-V3, Kimi-K2): what a token leaves behind is one latent for all heads."""

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import MlaSpec
from slipstream.models.context import ForwardContext
from slipstream.models.latent import LatentUp
from slipstream.models.layers import Linear, RMSNorm

_NORM_EPS = 1e-6  # of the norms inside; DeepSeek's own code takes its default here, whatever rms_norm_eps says


class LatentAttention(nn.Module):
    """Attention whose keys and values are projections of a latent; queries may be squeezed the same way."""

    def __init__(self, spec: MlaSpec, num_heads: int, input_size: int, output_size: int, layer_index: int) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.layer_index = layer_index
        q_size = num_heads * spec.head_dim
        q_rotary = tuple(range(end - spec.rope_dim, end) for end in range(spec.head_dim, q_size + 1, spec.head_dim))
        self._first_size = q_size if spec.q_rank is None else spec.q_rank
        latent_end = self._first_size + spec.latent_dim
        latent_rotary = range(latent_end - spec.rope_dim, latent_end)
        if spec.q_rank is None:
            parts, rotary_rows = {"q_proj": q_size}, (*q_rotary, latent_rotary)
        else:
            parts, rotary_rows = {"q_a_proj": spec.q_rank}, (latent_rotary,)
        self.qkv_a_proj = Linear(input_size, {**parts, "kv_a_proj_with_mqa": spec.latent_dim})
        self.q_a_layernorm = None if spec.q_rank is None else RMSNorm(spec.q_rank, _NORM_EPS)
        self.q_b_proj = None if spec.q_rank is None else Linear(spec.q_rank, {"q_b_proj": q_size})
        if spec.interleaved:
            self.qkv_a_proj.rotary_rows = rotary_rows
            if self.q_b_proj is not None:
                self.q_b_proj.rotary_rows = q_rotary
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, _NORM_EPS)
        self.kv_b_proj = Linear(spec.kv_rank, {"kv_b_proj": num_heads * (spec.nope_dim + spec.value_dim)})
        self.kv_b_proj.stays_dense = True
        self.o_proj = Linear(num_heads * spec.value_dim, {"o_proj": output_size})

    @property
    def up(self) -> LatentUp:
        """The up-projection, a view of `kv_b_proj`."""
        assert self.kv_b_proj.weight is not None, "kv_b_proj is kept dense"
        return LatentUp(self.kv_b_proj.weight.view(self.num_heads, -1, self.spec.kv_rank), self.spec)

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        """Attend to what the context lets each token see."""
        spec, ops = self.spec, ctx.ops
        first, latent_Tc, key_Tr = self.qkv_a_proj(x_TD, ops).split(
            [self._first_size, spec.kv_rank, spec.rope_dim], dim=-1
        )
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            first = self.q_b_proj(self.q_a_layernorm(first, ops), ops)
        q_THd = first.reshape(*x_TD.shape[:-1], self.num_heads, spec.head_dim)
        q_THn, q_THr = q_THd.split([spec.nope_dim, spec.rope_dim], dim=-1)
        q_THd = torch.cat([q_THn, ops.rotate(q_THr, *rotary)], dim=-1)
        key_Tr = ops.rotate(key_Tr.unsqueeze(-2), *rotary).squeeze(-2)
        latent_TC = torch.cat([self.kv_a_layernorm(latent_Tc, ops), key_Tr], dim=-1)
        out_THv = ctx.attend_latent(self.layer_index, q_THd, latent_TC, self.up)
        projected: Tensor = self.o_proj(out_THv.reshape(*x_TD.shape[:-1], -1), ops)
        return projected
