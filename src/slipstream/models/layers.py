"""The layers every decoder here is made of; each takes the kernels it runs on from the forward context."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.checkpoint.span import Span
from slipstream.checkpoint.spec import SILU, Activation, Tempering
from slipstream.errors import KernelError
from slipstream.kernels import Ops, Sight
from slipstream.models.context import ForwardContext
from slipstream.models.parallel import ALONE, Ranks
from slipstream.quant.packed import MixedWeight, PackedWeight


class Linear(nn.Module):
    """A linear layer, weight [out, in]; `parts` are the checkpoint tensors whose rows it joins, with their heights.

    A part, or the input, may be a span: what this rank holds of it. Where the input is split, every rank has a share
    of each output, and the shares are added up over `ranks`.

    The weight is dense or, once `pack` was called, kept as a checkpoint stores it. Rows that hold rotary pairs side by
    side in the checkpoint (`rotary_rows`) hold them half a stretch apart here, as the kernels rotate them.
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
        self.rotary_rows: tuple[range, ...] = ()
        self.stays_dense = False
        out_features = sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, self.in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | MixedWeight | None = None

    def pack(self, packed: PackedWeight | MixedWeight) -> None:
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

    def read_rows(self, row_ids_T: Tensor, ops: Ops) -> Tensor:
        """Return rows of the weight as float32 numbers; KernelError if the kernels cannot read rows of its format."""
        if self.weight is not None:
            return self.weight[row_ids_T].float()
        assert self.packed is not None
        if len(self.packed.runs) > 1:
            raise KernelError(f"No rows are read from a weight in several formats ({self.packed.format}).")
        return ops.packed_rows(self.packed.runs[0], row_ids_T)

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
        runs = self.packed.runs
        if len(runs) == 1:
            return ops.packed_linear(x_TD, runs[0], bias_N)
        heights = [run.out_features for run in runs]
        biases = [None] * len(runs) if bias_N is None else torch.split(bias_N, heights)
        return torch.cat([ops.packed_linear(x_TD, *part) for part in zip(runs, biases, strict=True)], dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale; a width that is a span is this rank's part of the row.

    Where checkpoints store the scale less an `offset`, or without a `factor`, it is kept whole here, in float32.
    """

    def __init__(self, width: int | Span, eps: float, offset: float = 0.0, factor: float = 1.0) -> None:
        super().__init__()
        self.columns = _span(width)
        self.offset, self.factor = offset, factor
        self.weight = nn.Parameter(torch.ones(self.columns.size))
        self.eps = eps

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Normalise the last dimension."""
        return ops.rms_norm(x_TD, self.weight, self.eps)

    def split(self, x_TD: Tensor, squares_T1: Tensor) -> Tensor:
        """Normalise this rank's part of rows whose squares, all ranks' parts together, add up to `squares_T1`."""
        scale_T1 = torch.rsqrt(squares_T1 / self.columns.total + self.eps)
        return self.weight * (x_TD.float() * scale_T1).to(x_TD.dtype)


class Scale(nn.Module):
    """A learned number that rows are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Multiply every row."""
        return x_TD * self.weight


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
    sinks: bool = False
    scale: float | None = None
    norm_offset: float = 0.0
    chunk: int | None = None
    rotates: bool = True
    neighbours: bool = False
    unit_qk_eps: float | None = None
    tempering: Tempering | None = None
    keys_as_values: bool = False
    unit_values_eps: float | None = None

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values live in the context."""

    def __init__(self, shape: AttentionShape, layer_index: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        heads, kv_heads = ranks.cut(shape.num_heads), ranks.cut_or_copy(shape.num_kv_heads)
        self.shape = replace(shape, num_heads=heads.size, num_kv_heads=kv_heads.size)  # this rank's
        self.layer_index = layer_index
        q, kv = heads.times(shape.head_dim), kv_heads.times(shape.head_dim)
        parts = {"q_proj": q, "k_proj": kv} | ({} if shape.keys_as_values else {"v_proj": kv})
        self.qkv_proj = Linear(shape.input_size, parts, shape.qkv_bias)
        self.o_proj = Linear(q, {"o_proj": shape.output_size}, shape.output_bias, ranks)
        q_width, k_width = (q, kv) if shape.norms_all_heads else (shape.head_dim, shape.head_dim)
        eps, offset = shape.qk_norm_eps, shape.norm_offset
        self.q_norm = RMSNorm(q_width, eps, offset) if eps is not None else None
        self.k_norm = RMSNorm(k_width, eps, offset) if eps is not None else None
        if shape.neighbours and shape.rotates:
            width, count = shape.head_dim, heads.size + kv_heads.size
            self.qkv_proj.rotary_rows = tuple(range(head * width, (head + 1) * width) for head in range(count))
        self.heads = heads
        self.sinks = nn.Parameter(torch.empty(heads.size, dtype=torch.float32)) if shape.sinks else None

    @property
    def sight(self) -> int | Sight | None:
        """What a token sees; where there are no sinks, the window alone."""
        shape = self.shape
        return (
            shape.window if self.sinks is None and shape.chunk is None else Sight(shape.window, shape.chunk, self.sinks)
        )

    def forward(self, x_TD: Tensor, rotary: tuple[Tensor, Tensor] | None, ctx: ForwardContext) -> Tensor:
        """Attend to what the context lets each token see; `rotary` is None in a block that knows no positions."""
        q, k, v = self.project(x_TD, rotary, ctx)
        out = ctx.attend(self.layer_index, q, k, v, self.shape.softmax_scale, self.sight)
        projected: Tensor = self.o_proj(out.reshape(*x_TD.shape[:-1], -1), ctx.ops)
        return projected

    def project(
        self, x_TD: Tensor, rotary: tuple[Tensor, Tensor] | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, in their positions."""
        shape = self.shape
        qkv = self.qkv_proj(x_TD, ctx.ops).unflatten(-1, (-1, shape.head_dim))
        q, k, *own = qkv.split([rows // shape.head_dim for rows in self.qkv_proj.parts.values()], dim=-2)
        v = k if shape.keys_as_values else own[0]
        if shape.unit_values_eps is not None:
            v = self._unit(v, shape.unit_values_eps, ctx.ops)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, k, self.q_norm, self.k_norm, ctx.ops)
        if rotary is not None:
            q, k = ctx.ops.rotate(q, *rotary), ctx.ops.rotate(k, *rotary)
            if shape.unit_qk_eps is not None:
                q, k = (self._unit(x, shape.unit_qk_eps, ctx.ops) for x in (q, k))
        elif shape.tempering is not None:
            q = q * _temper(ctx.positions_T, shape.tempering).to(q.dtype)
        return q, k, v

    def _unit(self, x_THd: Tensor, eps: float, ops: Ops) -> Tensor:
        """Norm each head, without a weight."""
        return ops.rms_norm(x_THd, torch.ones(self.shape.head_dim, dtype=x_THd.dtype, device=x_THd.device), eps)

    def _normed(
        self, q_THd: Tensor, k_TGd: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """Norm each head by itself, or all heads as one row, also those of other ranks."""
        if not self.shape.norms_all_heads:
            return q_norm(q_THd, ops), k_norm(k_TGd, ops)
        q, k = q_THd.flatten(-2), k_TGd.flatten(-2)
        ranks = self.o_proj.ranks
        if ranks.size == 1:
            return q_norm(q, ops).view(q_THd.shape), k_norm(k, ops).view(k_TGd.shape)
        squares = ranks.sum(torch.stack([x.float().square().sum(-1) for x in (q, k)], dim=-1))
        copies = ranks.size * k_norm.columns.size // k_norm.columns.total  # ranks that share a key head all count it
        q = q_norm.split(q, squares[..., :1])
        k = k_norm.split(k, squares[..., 1:] / copies)
        return q.view(q_THd.shape), k.view(k_TGd.shape)


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate) * up); without `adds_up` a rank's share of the result is left as it is."""

    def __init__(
        self,
        width: int,
        intermediate: int,
        bias: bool = False,
        ranks: Ranks = ALONE,
        adds_up: bool = True,
        activation: Activation = SILU,
    ) -> None:
        super().__init__()
        self.activation = activation
        inner = ranks.cut(intermediate)
        self.gate_up_proj = Linear(width, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = Linear(inner, {"down_proj": width}, bias, ranks if adds_up else ALONE)

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Apply the three products."""
        gate_up_TN = self.gate_up_proj(x_TD, ops)
        plain = self.activation == SILU
        inner_TN = ops.silu_mul(gate_up_TN) if plain else ops.gate_mul(gate_up_TN, self.activation)
        down: Tensor = self.down_proj(inner_TN, ops)
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


def _temper(positions_T: Tensor, tempering: Tempering) -> Tensor:
    """Return what queries are multiplied by, [T, 1, 1]; in float64, so that a position's bits are its own."""
    grown_T = torch.log1p(torch.floor((positions_T.double() + 1) / tempering.floor))
    return (grown_T * tempering.scale + 1).float()[..., None, None]


def _span(size: int | Span) -> Span:
    return Span.whole(size) if isinstance(size, int) else size
