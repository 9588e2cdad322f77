"""The layers every decoder here is made of; each takes the kernels it runs on from the forward context."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.kernels import Ops
from slipstream.models.context import ForwardContext
from slipstream.quant.packed import PackedWeight


class Linear(nn.Module):
    """A linear layer, weight [out, in]; `parts` are the checkpoint tensors whose rows it joins, with their heights.

    The weight is dense or, once `pack` was called, kept as a checkpoint stores it. Rows that hold rotary pairs side by
    side in the checkpoint (`rotary_rows`) hold them half a stretch apart here, as the kernels rotate them.
    """

    weight: nn.Parameter | None

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.rotary_rows: tuple[range, ...] = ()
        self.stays_dense = False
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self, packed: PackedWeight) -> None:
        """Give up the dense weight for a packed one of the same shape."""
        assert (packed.out_features, packed.in_features) == (sum(self.parts.values()), self.in_features)
        self.weight = None
        self.packed = packed

    def row_order(self) -> Tensor | None:
        """Return which row of the checkpoint each row here is; None where they are the same."""
        if not self.rotary_rows:
            return None
        order = torch.arange(sum(self.parts.values()), device="cpu")
        for rows in self.rotary_rows:
            order[rows.start : rows.stop] = torch.tensor([*rows[::2], *rows[1::2]], device="cpu")
        return order

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Multiply each row by the weight."""
        if self.weight is not None:
            return ops.linear(x_TD, self.weight, self.bias)
        assert self.packed is not None
        return ops.packed_linear(x_TD, self.packed, self.bias)


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
    norms_all_heads: bool = False
    window: int | None = None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values live in the context."""

    def __init__(self, shape: AttentionShape, layer_index: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer_index = layer_index
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv_proj = Linear(
            shape.input_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, shape.qkv_bias
        )
        self.o_proj = Linear(q_size, {"o_proj": shape.output_size}, shape.output_bias)
        q_width, k_width = (q_size, kv_size) if shape.norms_all_heads else (shape.head_dim, shape.head_dim)
        self.q_norm = RMSNorm(q_width, shape.qk_norm_eps) if shape.qk_norm_eps is not None else None
        self.k_norm = RMSNorm(k_width, shape.qk_norm_eps) if shape.qk_norm_eps is not None else None

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        """Attend to what the context lets each token see."""
        shape = self.shape
        leading = x_TD.shape[:-1]
        qkv = self.qkv_proj(x_TD, ctx.ops).unflatten(-1, (-1, shape.head_dim))
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm, ctx.ops), self._normed(k, self.k_norm, ctx.ops)
        q, k = ctx.ops.rotate(q, *rotary), ctx.ops.rotate(k, *rotary)
        out = ctx.attend(self.layer_index, q, k, v, shape.head_dim**-0.5, shape.window)
        projected: Tensor = self.o_proj(out.reshape(*leading, -1), ctx.ops)
        return projected

    def _normed(self, x_THd: Tensor, norm: RMSNorm, ops: Ops) -> Tensor:
        """Norm each head by itself, or all heads as one row."""
        if not self.shape.norms_all_heads:
            return norm(x_THd, ops)  # type: ignore[no-any-return]  # torch leaves calls of modules untyped
        return norm(x_THd.flatten(-2), ops).view(x_THd.shape)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate) * up)."""

    def __init__(self, width: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, {"gate_proj": intermediate, "up_proj": intermediate}, bias)
        self.down_proj = Linear(intermediate, {"down_proj": width}, bias)

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
