"""Experts of a few tokens, one (token, k) pair at a time: W4A8 products word by word, without matrix instructions.

With one row to a weight a matrix instruction multiplies mostly zeros, and its operands take a detour through shared
memory. Here a thread loads 16 bytes of codes, multiplies them where they are, and one launch does all of a stage:
gate, up and activation; then the row's new codes, down, and the sum over a token's experts. Sums are integers until
scales are applied as the other kernels apply them, so the bits are theirs.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.triton.gemm.split_k import prefetch_rows
from slipstream.kernels.triton.launch import wait_for_inputs
from slipstream.kernels.triton.moe.rows import SHARED_TOKENS, activated, finished, round_even, shared_rows
from slipstream.kernels.triton.moe.tiles import ExpertTiles
from slipstream.quant.packed import ExpertWeights

Rest = tuple[Tensor | None, Tensor | None, Tensor | None]
COLUMNS_PER_WORD = 8
_INT8_MAX = tl.constexpr(127.0)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _word_sums(codes, low, high, ASSEMBLY: tl.constexpr):
    """Return 16 times the sum of a word's eight products: low nibbles with bytes of `low`, high ones with `high`."""
    if ASSEMBLY == "cuda":
        sums = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 4; and.b32 a, a, 0xF0F0F0F0; and.b32 b, $1, 0xF0F0F0F0; "
            "dp4a.s32.s32 a, a, $2, 0; dp4a.s32.s32 $0, b, $3, a; }",
            "=r,r,r,r", [codes, low, high], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = tl.zeros_like(codes)
        for byte in tl.static_range(4):
            sums += (codes << (28 - 8 * byte) >> 28) * (low << (24 - 8 * byte) >> 24)
            sums += (codes << (24 - 8 * byte) >> 28) * (high << (24 - 8 * byte) >> 24)
        sums = sums * 16
    return sums


@triton.jit
def _wait_first(PDL: tl.constexpr):
    """Wait for the kernel before, and only then let the next one start: it may count on what came before this one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def words_gate_up_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, ids_ptr, hidden_ptr, INNER, WORDS: tl.constexpr,
                         TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ASSEMBLY: tl.constexpr,
                         PDL: tl.constexpr):  # fmt: skip
    """Multiply one pair by BLOCK_N rows of gate and as many of up; write silu(gate) * up in the activations' type."""
    _wait_first(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = expert * (2 * INNER) + output
    gate_at = w_ptr + weight_row[:, None] * WORDS
    up_at = gate_at + INNER.to(tl.int64) * WORDS
    x_at = x_ptr + (pair // TOP_K).to(tl.int64) * (2 * WORDS)
    gate_sums = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
    for start in range(0, WORDS, BLOCK_W):
        word = start + tl.arange(0, BLOCK_W)
        real = (output < INNER)[:, None] & (word < WORDS)[None, :]
        gate_codes = tl.load(gate_at + word[None, :], mask=real, other=0)
        up_codes = tl.load(up_at + word[None, :], mask=real, other=0)
        low = tl.load(x_at + word, mask=word < WORDS, other=0)
        high = tl.load(x_at + WORDS + word, mask=word < WORDS, other=0)
        low = tl.broadcast_to(low[None, :], [BLOCK_N, BLOCK_W])
        high = tl.broadcast_to(high[None, :], [BLOCK_N, BLOCK_W])
        gate_sums += _word_sums(gate_codes, low, high, ASSEMBLY)
        up_sums += _word_sums(up_codes, low, high, ASSEMBLY)
    x_scale = tl.load(x_scale_ptr + pair // TOP_K)
    w_scale = tl.load(w_scale_ptr + weight_row, mask=output < INNER, other=0).to(tl.float32)
    gate = (tl.sum(gate_sums, 1) >> 4).to(tl.float32) * (x_scale * w_scale)
    w_scale = tl.load(w_scale_ptr + weight_row + INNER, mask=output < INNER, other=0).to(tl.float32)
    up = (tl.sum(up_sums, 1) >> 4).to(tl.float32) * (x_scale * w_scale)
    hidden = activated(gate, up, hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + pair.to(tl.int64) * INNER + output, hidden, mask=output < INNER)


@triton.jit
def _row_words(row_at, here, WORDS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_W: tl.constexpr):
    """Quantize a token's rows (pointers [TOP_K]) to INT8, as `write_row` does.

    Returns words of even and of odd columns [TOP_K, BLOCK_W], four bytes each, and scales.
    """
    word = tl.arange(0, BLOCK_W)[None, :, None]
    byte = tl.arange(0, 4)[None, None, :]
    column = 2 * (4 * word + byte)
    mask = here[:, None, None] & (word < WORDS)
    even = tl.load(row_at[:, None, None] + column, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(row_at[:, None, None] + column + 1, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2), 1)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + _INT8_MAX)
    divisor = tl.zeros_like(even) + tl.where(scale == 0, 1.0, scale)[:, None, None]
    even = round_even(tl.div_rn(even, divisor)).to(tl.int32)
    odd = round_even(tl.div_rn(odd, divisor)).to(tl.int32)
    return tl.sum((even & 255) << (8 * byte), 2), tl.sum((odd & 255) << (8 * byte), 2), scale


@triton.jit
def words_down_kernel(hidden_ptr, w_ptr, w_scale_ptr, ids_ptr, weights_ptr, add_ptr, inner_ptr, shared_ptr,
                      out_ptr, D, WORDS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, ADD: tl.constexpr,
                      SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
                      ASSEMBLY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply all of one token's pairs by BLOCK_N rows of their experts' down, and add them up in the order of k.

    Which experts they are was known before stage 1 began, and it let this kernel start no sooner: the codes are read
    while it still runs.
    """
    token = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    pair = token * TOP_K + slot
    expert = tl.load(ids_ptr + pair, mask=slot < TOP_K, other=-1, cache_modifier=".cg").to(tl.int64)
    here = expert >= 0
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_W)
    weight_row = tl.maximum(expert, 0)[:, None] * D + output[None, :]
    real = here[:, None] & (output < D)[None, :]
    w_at = w_ptr + weight_row[:, :, None] * WORDS + word[None, None, :]
    codes = tl.load(w_at, mask=real[:, :, None] & (word < WORDS)[None, None, :], other=0)
    w_scale = tl.load(w_scale_ptr + weight_row, mask=real, other=0).to(tl.float32)
    if PDL and SHARED:
        shared_at = shared_ptr + tl.minimum(output, D - 1).to(tl.int64)[:, None] * SHARED
        prefetch_rows(shared_at, 0, SHARED, 64)
    wait_for_inputs(PDL)
    row_at = hidden_ptr + pair * (8 * WORDS)  # eight columns to a word
    low, high, scale = _row_words(row_at, here, WORDS, TOP_K, BLOCK_W)
    low = tl.broadcast_to(low[:, None, :], [SLOTS, BLOCK_N, BLOCK_W])
    high = tl.broadcast_to(high[:, None, :], [SLOTS, BLOCK_N, BLOCK_W])
    sums = (tl.sum(_word_sums(codes, low, high, ASSEMBLY), 2) >> 4).to(tl.float32)
    share = tl.load(weights_ptr + pair, mask=here, other=0.0)
    rows = share[:, None] * (sums * (scale[:, None] * w_scale))
    total = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):  # in the order of k: of each sum here all but one number is zero
        total += tl.sum(tl.where(slot[:, None] == k, rows, 0.0), 0)
    shared = total
    if SHARED:
        lane = tl.arange(0, BLOCK_T)  # the token is the first row of a tile
        tokens = token + lane
        tile = shared_rows(inner_ptr, shared_ptr, tokens, lane == 0, output, D, SHARED, BLOCK_T, BLOCK_N)
        shared = tl.sum(tl.where(lane[None, :] == 0, tile, 0.0), 1)
    at = token * D + output
    out = finished(total, shared, add_ptr, at, output < D, SHARED > 0, ADD, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=output < D)


def fits(gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Tell whether these kernels multiply such experts: W4A8, rows that are whole words."""
    return gate_up.format == "w4a8" and not (
        gate_up.in_features % COLUMNS_PER_WORD or down.in_features % COLUMNS_PER_WORD
    )


def run_words(
    rows: tuple[Tensor, Tensor], weights: tuple[ExpertWeights, ExpertWeights], chosen: tuple[Tensor, Tensor],
    tiles: ExpertTiles, rest: Rest, out_TD: Tensor, launch: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Write the weighted sum of each token's experts into `out_TD` and return it.

    Args:
        rows: in INT8, even columns before odd ones (`write_row`), and their scales.
        chosen: experts and weights, [T, K] each.
        rest: what is added: the residual, and a shared expert's inner rows and weight; None where there is none.
        launch: further arguments of each launch.
    """
    (gate_up, down), (ids_TK, weights_TK), (codes_TD, scale_T) = weights, chosen, rows
    num_tokens, top_k = ids_TK.shape
    inner = down.in_features
    hidden_PI = out_TD.new_empty(num_tokens * top_k, inner)
    words = gate_up.in_features // COLUMNS_PER_WORD
    stage = tiles.stage1
    words_gate_up_kernel[(triton.cdiv(inner, stage.block_n), num_tokens * top_k)](
        codes_TD.view(torch.int32), gate_up.codes.view(torch.int32), scale_T, gate_up.scales["scale"], ids_TK,
        hidden_PI, inner, WORDS=words, TOP_K=top_k, BLOCK_N=stage.block_n,
        BLOCK_W=min(stage.block_k // COLUMNS_PER_WORD, triton.next_power_of_2(words)), num_warps=stage.warps, **launch,
    )  # fmt: skip
    width, words, stage = down.out_features, inner // COLUMNS_PER_WORD, tiles.stage2
    words_down_kernel[(triton.cdiv(width, stage.block_n), num_tokens)](
        hidden_PI, down.codes.view(torch.int32), down.scales["scale"], ids_TK, weights_TK, *rest, out_TD, width,
        WORDS=words, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), ADD=rest[0] is not None,
        SHARED=0 if rest[2] is None else rest[2].shape[1], BLOCK_T=SHARED_TOKENS, BLOCK_N=stage.block_n,
        BLOCK_W=triton.next_power_of_2(words), num_warps=stage.warps, **launch,
    )  # fmt: skip
    return out_TD
