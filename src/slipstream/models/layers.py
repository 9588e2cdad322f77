"""The layers every decoder here is made of; each takes the kernels it runs on from the forward context."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.checkpoint.span import Span
from slipstream.kernels import Ops
from slipstream.models.context import ForwardContext
from slipstream.models.parallel import ALONE, Ranks
from slipstream.quant.packed import PackedWeight


class Linear(nn.Module):
    """A linear layer, weight [out, in]; `parts` are the checkpoint tensors whose rows it joins, with their heights.

    A part, or the input, may be a span: what this rank holds of it. Where the input is split, every rank has a share
    of each output, and the shares are added up over `ranks`.

    The weight is dense or, once `pack` was called, kept as a checkpoint stores it.
    """

    weight: nn.Parameter | None

    def __init__(
        self, in_features: int | Span, parts: Mapping[str, int | Span], bias: bool = False, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.columns = _span(in_features)
        self.rows = {name: _span(height) for name, height in parts.items()}
        self.in_features = self.columns.size
        self.parts = {name: span.size for name, span in self.rows.items()}
        self.ranks = ALONE if self.columns.is_whole else ranks
        out_features = sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, self.in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self, packed: PackedWeight) -> None:
        """Give up the dense weight for a packed one of the same shape."""
        assert (packed.out_features, packed.in_features) == (sum(self.parts.values()), self.in_features)
        self.weight = None
        self.packed = packed

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Multiply each row by the weight."""
        if self.ranks.size == 1:
            return self._multiply(x_TD, self.bias, ops)
        sum_TN = self.ranks.sum(self._multiply(x_TD, None, ops))
        return sum_TN if self.bias is None else sum_TN + self.bias

    def _multiply(self, x_TD: Tensor, bias_N: Tensor | None, ops: Ops) -> Tensor:
        if self.weight is not None:
            return ops.linear(x_TD, self.weight, bias_N)
        assert self.packed is not None
        return ops.packed_linear(x_TD, self.packed, bias_N)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Normalise the last dimension."""
        return ops.rms_norm(x_TD, self.weight, self.eps)


@dataclass(frozen=True)
class AttentionShape:
    """What an attention layer needs to know of its model."""

    input_size: int
    output_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values live in the context."""

    def __init__(self, shape: AttentionShape, layer_index: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        heads, kv_heads = ranks.cut(shape.num_heads), ranks.cut_or_copy(shape.num_kv_heads)
        self.shape = replace(shape, num_heads=heads.size, num_kv_heads=kv_heads.size)  # this rank's
        self.layer_index = layer_index
        q, kv = heads.times(shape.head_dim), kv_heads.times(shape.head_dim)
        self.qkv_proj = Linear(shape.input_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, shape.qkv_bias)
        self.o_proj = Linear(q, {"o_proj": shape.output_size}, shape.output_bias, ranks)
        self.q_norm = RMSNorm(shape.head_dim, shape.qk_norm_eps) if shape.qk_norm_eps is not None else None
        self.k_norm = RMSNorm(shape.head_dim, shape.qk_norm_eps) if shape.qk_norm_eps is not None else None

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        """Attend to what the context lets each token see."""
        shape = self.shape
        leading = x_TD.shape[:-1]
        qkv = self.qkv_proj(x_TD, ctx.ops).unflatten(-1, (-1, shape.head_dim))
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, ctx.ops), self.k_norm(k, ctx.ops)
        q, k = ctx.ops.rotate(q, *rotary), ctx.ops.rotate(k, *rotary)
        out = ctx.attend(self.layer_index, q, k, v, shape.head_dim**-0.5, shape.window)
        projected: Tensor = self.o_proj(out.reshape(*leading, -1), ctx.ops)
        return projected


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate) * up)."""

    def __init__(self, width: int, intermediate: int, bias: bool = False, ranks: Ranks = ALONE) -> None:
        super().__init__()
        inner = ranks.cut(intermediate)
        self.gate_up_proj = Linear(width, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = Linear(inner, {"down_proj": width}, bias, ranks)

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Apply the three products."""
        down: Tensor = self.down_proj(ops.silu_mul(self.gate_up_proj(x_TD, ops)), ops)
        return down


class Embedding(nn.Module):
    """Rows of a table by token id; the table is dense or, once `pack` was called, kept as a checkpoint stores it."""

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.shape = (vocab_size, width)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.packed: PackedWeight | None = None

    def pack(self, packed: PackedWeight) -> None:
        """Give up the dense table for a packed one of the same shape."""
        assert (packed.out_features, packed.in_features) == self.shape
        self.weight = None
        self.packed = packed

    @property
    def dtype(self) -> torch.dtype:
        """The type of the rows looked up."""
        return torch.float32 if self.weight is None else self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        if self.weight is not None:
            return self.weight.device
        assert self.packed is not None
        return self.packed.codes.device

    def forward(self, token_ids_T: Tensor, ops: Ops) -> Tensor:
        """Look the tokens up."""
        if self.weight is not None:
            return nn.functional.embedding(token_ids_T, self.weight)
        assert self.packed is not None
        return ops.packed_rows(self.packed, token_ids_T)


def _span(size: int | Span) -> Span:
    return Span.whole(size) if isinstance(size, int) else size
