"""Decoder blocks as eight kernels each: norm, qkv, rope and write, attention, o, norm, gate and up, down.

In passes of a few rows norms are part of the products after them, and rotations of the product before: five kernels.
In passes of more, a product may leave it to the norm or the rotation to add up its splits of K. Where weights
are FP8, a product of a few rows may also turn them into codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch
from slipstream.kernels.ops import Ending
from slipstream.kernels.triton import norm as norms
from slipstream.kernels.triton.attention.dispatch import attention, work_list_of
from slipstream.kernels.triton.attention.hopper_launch import WorkList
from slipstream.kernels.triton.copies import take_rows
from slipstream.kernels.triton.gemm.dispatch import Weight
from slipstream.kernels.triton.gemm.small_m_launch import squares_of
from slipstream.kernels.triton.gemm.split_k import Epilogue, FoldedNorm, Rows
from slipstream.kernels.triton.gemm.split_k_reduce import PartialSums, reduce_partials, reduce_to_codes
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.ops import FusedKernels
from slipstream.kernels.triton.rope import Rope, RopeWrite, rope_and_write
from slipstream.models.layers import Linear


class LlamaBlocks:
    """Runs the blocks of Llama-class targets and EAGLE-3 drafts over pages."""

    def __init__(self, kernels: FusedKernels) -> None:
        self._products = kernels.products
        self._launch = kernels.attention

    def unfit(self, layers: Sequence[Any], ctx: Any) -> str:
        """Return why these blocks cannot run here, or nothing; `ctx` is any forward context."""
        if not layers or getattr(ctx, "kv", None) is None:
            return "the context keeps no pages"
        for index, layer in enumerate(layers):
            attention_layer, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
            linears = [getattr(attention_layer, name, None) for name in ("qkv_proj", "o_proj")]
            linears += [getattr(mlp, name, None) for name in ("gate_up_proj", "down_proj")]
            if any(linear is None or type(linear) is not Linear for linear in linears):
                return f"block {index} is not made of plain attention and a gated feed-forward"
            if any(getattr(getattr(linear, "ranks", None), "size", 1) > 1 for linear in linears):
                return f"block {index} is split over ranks, which add up after each product"
            if unusual := getattr(layer, "unusual", ""):
                return f"block {index} {unusual}"
            unknown = next((linear for linear in linears if not self._products.knows(_weight(linear))), None)
            if unknown is not None:
                return f"block {index} has weights of {_described(unknown)}, which the Triton kernels do not multiply"
        return ""

    def run(
        self, layers: Sequence[Any], hidden_TD: Tensor, ctx: Any, captured_layers: Sequence[int],
        embedding_TD: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Apply blocks in order; also return the hidden states captured."""
        seen: dict[int, Tensor] = {}
        state, queries = _State(hidden_TD), self._queries(layers, hidden_TD, ctx)
        for applied, layer in enumerate(layers):
            following = _weight(layers[applied + 1].self_attn.qkv_proj) if applied + 1 < len(layers) else None
            given_TD, state = self._block(layer, state, ctx, embedding_TD, following, queries[applied])
            if applied in captured_layers:
                seen[applied] = given_TD
        last_TD = seen[len(layers)] = self._whole(state)
        return last_TD, [seen[k] for k in captured_layers]

    def _queries(self, layers: Sequence[Any], hidden_TD: Tensor, ctx: Any) -> list["_Queries"]:
        """Return whose queries each layer attends with: everybody's, but for the last where the pass has an ending."""
        ending: Ending | None = getattr(ctx, "ending", None)
        whole = layers if ending is None else layers[:-1]
        num_tokens = len(ctx.batch.kv_index_T)
        every = _Queries(ctx.batch, self._walks(whole, hidden_TD.dtype, ctx.batch, num_tokens, ctx.kv))
        if ctx.beside is not None:
            every = replace(every, beside=ctx.beside)
        if ending is None:
            return [every] * len(layers)
        work = self._walks(layers[-1:], hidden_TD.dtype, ending.batch, len(ending.rows_L), ctx.kv)
        return [*[every] * len(whole), _Queries(ending.batch, work, ending.rows_L)]

    def _walks(
        self, layers: Sequence[Any], dtype: torch.dtype, batch: AttentionBatch, num_tokens: int, kv: Any
    ) -> WorkList | None:
        """Lay out what programs of attention walk through, for all layers: before the first product, so it is there."""
        own = next((layer.self_attn for layer in layers if layer.self_attn.shape.window is None), None)
        if own is None:
            return None
        return work_list_of(batch, num_tokens, own.shape.num_heads, kv.layers[own.layer_index], dtype, self._launch)

    def _block(
        self, layer: Any, state: "_State", ctx: Any, embedding_TD: Tensor | None, following: Weight | None,
        queries: "_Queries",
    ) -> tuple[Tensor, "_State"]:  # fmt: skip
        """Apply a block; return the hidden states it was given, whole, and what it leaves.

        Args:
            following: the weight its outputs are multiplied by next, after a norm.
        """
        qkv_weight = _weight(layer.self_attn.qkv_proj)
        if getattr(layer, "hidden_norm", None) is not None:
            hidden_TD = self._whole(state)
            pair = (_norm(layer.input_layernorm), _norm(layer.hidden_norm))
            assert embedding_TD is not None, "a draft's first block is given embeddings"
            both = norms.norm_both(embedding_TD, hidden_TD, pair, self._products.dependent)
            rows = self._products.rows_for(qkv_weight, both)
            residual = both[:, hidden_TD.shape[1] :] if layer.normed_residual else hidden_TD
        else:
            hidden_TD, rows = self._normed(state, _norm(layer.input_layernorm), qkv_weight)
            residual = hidden_TD
        attended, residual = self._attend(layer, rows, residual, ctx, queries)
        gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
        state = self._project(layer.self_attn.o_proj, attended, residual, _weight(gate_up))
        middle_TD, rows = self._normed(state, _norm(layer.post_attention_layernorm), _weight(gate_up))
        num_maxima = self._products.num_maxima(_weight(gate_up), len(residual))
        maxima = self._maxima_workspace(_weight(down), len(residual), num_maxima)
        silu = Epilogue(gate_up.bias, None, silu=True, maxima_TB=maxima)
        inner = _Unprojected(self._products.multiply(rows, _weight(gate_up), silu), maxima)
        return hidden_TD, self._project(down, inner, middle_TD, following)

    def _maxima_workspace(self, following: Weight, num_rows: int, count: int) -> Tensor | None:
        """Return a workspace for so many maxima of a row, if the `following` product makes codes from them."""
        if count == 0 or not self._products.makes_codes(following, num_rows):
            return None
        return torch.empty(num_rows, count, dtype=torch.float32, device=self._products.counters.device)

    def _attend(
        self, layer: Any, rows: Rows, residual_TD: Tensor, ctx: Any, queries: "_Queries"
    ) -> tuple["_Unprojected", Tensor]:
        """Write everybody's keys and values, and attend; return also what outputs are added to."""
        own, shape = layer.self_attn, layer.self_attn.shape
        weight, bias = _weight(own.qkv_proj), own.qkv_proj.bias
        kv = ctx.kv.layers[own.layer_index]
        heads = (shape.num_heads, shape.num_kv_heads)
        rope = Rope(ctx.slots_T, ctx.positions_T, layer.rotary.cos_Pr, layer.rotary.sin_Pr)
        write = RopeWrite(heads, rope, kv)
        num_rows = rows.values_TK.shape[0]
        if own.q_norm is None and self._products.folds_rope(weight, num_rows, rows.dtype, write):
            q = self._products.multiply(rows, weight, Epilogue(bias, rope=write)).view(num_rows, heads[0], -1)
        else:
            qkv: Tensor | PartialSums | None = None
            if bias is None:  # where attention work through many requests, it may start while this product runs
                qkv = self._products.deferred_sums(rows, weight, waited=queries.work is not None)
            if qkv is None:
                qkv = self._products.multiply(rows, weight, Epilogue(bias))
            qk_norm = None if own.q_norm is None else (_norm(own.q_norm), _norm(own.k_norm))
            q = rope_and_write(qkv, write, qk_norm, rows.dtype, self._products.dependent)
        if queries.rows_L is not None:
            q, residual_TD = take_rows(queries.rows_L, q, residual_TD, self._products.dependent)
        leaves = len(q) < self._launch.config.serial_from and queries.beside is None
        maxima = self._maxima_workspace(_weight(own.o_proj), len(q), heads[0] if leaves else 0)
        scale, window = shape.softmax_scale, shape.window
        if queries.beside is None:
            out = attention(q, kv, queries.batch, scale, window, self._launch, maxima, queries.work)
        else:
            first = len(queries.batch.kv_index_T)
            out = torch.cat(
                [
                    attention(q[:first], kv, queries.batch, scale, window, self._launch, None, queries.work),
                    attention(q[first:], kv, queries.beside, scale, window, self._launch),
                ]
            )
        return _Unprojected(out.flatten(1), maxima), residual_TD

    def _normed(self, state: "_State", norm: Norm, weight: Weight) -> tuple[Tensor, Rows]:
        """Return the hidden states, whole, and the rows of the product that follows."""
        x_TD, dependent = state.hidden_TD, self._products.dependent
        if state.squares_TB is not None:
            return x_TD, Rows(x_TD, None, x_TD.dtype, FoldedNorm(norm.weight_D, norm.eps, state.squares_TB))
        codes = self._products.wants(weight)
        if state.sums is not None and codes is None:
            x_TD, normed_TD = reduce_partials(state.sums, x_TD, norm, dependent, self._products.add_warps)
            assert normed_TD is not None, "a norm was asked for"
            return x_TD, self._products.rows_for(weight, normed_TD)
        if state.sums is not None and codes is not None:
            x_TD, codes_TD, scale_T = reduce_to_codes(state.sums, x_TD, norm, codes, dependent)
            return x_TD, Rows(codes_TD, scale_T, x_TD.dtype)
        x_TD = self._whole(state)
        if codes is None:
            return x_TD, self._products.rows_for(weight, norms.rms_norm(x_TD, norm, dependent))
        return x_TD, Rows(*norms.norm_codes(x_TD, norm, codes, dependent), x_TD.dtype)

    def _whole(self, state: "_State") -> Tensor:
        """Return the hidden states with whatever is still to be added."""
        if state.sums is None:
            return state.hidden_TD
        products = self._products
        return reduce_partials(state.sums, state.hidden_TD, None, products.dependent, products.add_warps)[0]

    def _project(self, linear: Any, inputs: "_Unprojected", residual_TN: Tensor, following: Weight | None) -> "_State":
        """Multiply and add the residual; leave sums of squares if the `following` product applies its norm itself."""
        weight, x_TD = _weight(linear), inputs.x_TD
        if inputs.maxima_TB is None:
            rows = self._products.rows_for(weight, x_TD)
        else:
            rows = Rows(x_TD, None, x_TD.dtype, maxima_TB=inputs.maxima_TB)
        sums = self._products.deferred_sums(rows, weight) if linear.bias is None else None
        if sums is not None:
            return _State(residual_TN, sums=sums)
        squares_TB = None
        folds = following is not None and self._products.folds_norm(following, len(x_TD))
        squared = self._products.squared(weight, len(x_TD)) if folds else 0
        if squared:
            squares_TB = squares_of(residual_TN, squared)
        out = self._products.multiply(rows, weight, Epilogue(linear.bias, residual_TN, squares_TB=squares_TB))
        return _State(out, squares_TB)


@dataclass(frozen=True)
class _State:
    """What goes from product to norm: hidden states, and their sums of squares if a product has left them.

    Args:
        sums: those of a product's splits that are still to be added to the hidden states.
    """

    hidden_TD: Tensor
    squares_TB: Tensor | None = None
    sums: PartialSums | None = None


@dataclass(frozen=True)
class _Queries:
    """Whose queries a layer attends with, and what they see; it goes on with those tokens alone.

    Args:
        work: see `work_list_of`.
        rows_L: which tokens of the pass; None is all.
        beside: what the tokens after those of `batch` see, where a pass is over two batches.
    """

    batch: AttentionBatch
    work: WorkList | None
    rows_L: Tensor | None = None
    beside: AttentionBatch | None = None


@dataclass(frozen=True)
class _Unprojected:
    """What goes into the products that add to the residual: rows, and maxima if the kernel before has left them."""

    x_TD: Tensor
    maxima_TB: Tensor | None


def _weight(linear: Any) -> Weight:
    weight: Weight = linear.weight if linear.weight is not None else linear.packed
    return weight


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


def _described(linear: Any) -> str:
    return str(linear.weight.dtype) if linear.weight is not None else f"format {linear.packed.format}"
