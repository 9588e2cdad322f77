"""Attention over paged latents (MLA, absorbed): each latent is read once for all heads and query tokens of a tile.

Specified by `slipstream.kernels.reference.attention.latent_attention`. Keys are cut in splits of one fixed length, and
splits are merged in order, so a token's bits depend neither on the batch, nor on the page size, nor on the tokens
checked beside it. Sums are float32; softmax weights are rounded to the latents' type before they multiply latents, and
the output to q's type once, at the end: to nearest, ties to even (not toward zero, as some MLA kernels convert).
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.expert_tiles import matrix_instruction, shipped
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.tuning import architecture_of
from slipstream.kernels.triton.variants import Variant

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class LatentTiles:
    """Tiles of latent attention: `split` keys to a partial result (part of the bits), `block` keys a step.

    Args:
        rows: (token, head) rows of a tile; 8 heads of a rank times 4 tokens of a verified chain are 32.
    """

    split: int = 512
    block: int = 64
    rows: int = 32
    warps: int = 8
    stages: int = 2


@triton.jit
def partial_kernel(q_ptr, latent_ptr, table_ptr, starts_ptr, lens_ptr, index_ptr, ancestors_ptr, acc_ptr, stats_ptr,
                   scale, slot_stride, table_width, page_size, num_splits, H, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                   WIDTH_P: tl.constexpr, ROPE_P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   SPLIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Attend the rows of one tile over one split of keys; latents are the left side, rows the right, of each product.

    `scale` is in base 2. The first WIDTH columns of a latent are both key and value; ROPE further ones are key only.
    """
    wait_for_inputs(PDL)
    split = tl.program_id(0)
    request = tl.program_id(1)
    first_token = tl.load(starts_ptr + request)
    num_rows = (tl.load(starts_ptr + request + 1) - first_token) * H
    kv_len = tl.load(lens_ptr + request)
    lane = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if (tl.program_id(2) * ROWS >= num_rows) | (split * SPLIT >= kv_len):
        return
    real = lane < num_rows
    token = first_token + lane // H
    row = (first_token * H + lane).to(tl.int64)
    own_key = tl.load(index_ptr + token, mask=real, other=-1).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + token, mask=real, other=0).to(tl.int64)
    column = tl.arange(0, WIDTH_P)
    rope_column = tl.arange(0, ROPE_P)
    q_at = q_ptr + row[None, :] * (WIDTH + ROPE)
    q = tl.load(q_at + column[:, None], mask=real[None, :] & (column < WIDTH)[:, None], other=0.0)
    q_rope = tl.load(q_at + WIDTH + rope_column[:, None], mask=real[None, :] & (rope_column < ROPE)[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([WIDTH_P, ROWS], tl.float32)
    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, kv_len), BLOCK):
        key = start + tl.arange(0, BLOCK)
        known = key < kv_len
        page = tl.load(table_ptr + request.to(tl.int64) * table_width + key // page_size, mask=known, other=0)
        slot = page.to(tl.int64) * page_size + key % page_size
        at = latent_ptr + slot[:, None] * slot_stride
        latent = tl.load(at + column[None, :], mask=known[:, None] & (column < WIDTH)[None, :], other=0.0)
        rope = tl.load(
            at + WIDTH + rope_column[None, :], mask=known[:, None] & (rope_column < ROPE)[None, :], other=0.0
        )
        scores = tl.dot(latent, q, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee") * scale
        distance = own_key[None, :] - key[:, None]
        bit = (ancestors[None, :] >> tl.minimum(tl.maximum(distance, 0), 63).to(tl.int64)) & 1
        visible = (distance >= 0) & ((distance > 63) | (bit == 1))
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0))
        level = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may see nothing of a split
        shrink = tl.exp2(best - level)
        weight = tl.exp2(scores - level[None, :])
        total = total * shrink + tl.sum(weight, 0)
        acc = tl.dot(tl.trans(latent), weight.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
        best = new_best
    out = row * num_splits + split
    tl.store(acc_ptr + out[None, :] * WIDTH + column[:, None], acc, mask=real[None, :] & (column < WIDTH)[:, None])
    tl.store(stats_ptr + out * 2, best, mask=real)
    tl.store(stats_ptr + out * 2 + 1, total, mask=real)


@triton.jit
def merge_kernel(acc_ptr, stats_ptr, index_ptr, out_ptr, num_splits, H, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
                 SPLIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Merge one row's splits, in order, and round to the output's type."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    own_key = tl.load(index_ptr + row // H).to(tl.int32)
    column = tl.arange(0, WIDTH_P)
    inside = column < WIDTH
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([WIDTH_P], tl.float32)
    for split in range(own_key // SPLIT + 1):
        at = row * num_splits + split
        split_best = tl.load(stats_ptr + at * 2)
        new_best = tl.maximum(best, split_best)
        level = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - level)
        weight = tl.exp2(split_best - level)
        total = total * shrink + tl.load(stats_ptr + at * 2 + 1) * weight
        acc = acc * shrink + tl.load(acc_ptr + at * WIDTH + column, mask=inside, other=0.0) * weight
        best = new_best
    out = tl.div_rn(acc, tl.zeros_like(acc) + total)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def latent_attention(
    q_THC: Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scale: float,
    value_width: int,
    tiles: LatentTiles | None = None,
    dependent: bool = False,
) -> Tensor:
    """Attend absorbed queries [T, H, C] over the latents each may see: [T, H, value_width]."""
    num_tokens, num_heads, width = q_THC.shape
    num_requests, table_width = batch.page_table_RP.shape
    architecture = architecture_of(q_THC.device)
    tiles = tiles or shipped_tiles(architecture)
    rope_width = width - value_width
    max_keys = table_width * batch.page_size if batch.max_keys is None else batch.max_keys
    num_splits = max(1, triton.cdiv(max_keys, tiles.split))
    acc = torch.empty(num_tokens * num_heads, num_splits, value_width, dtype=torch.float32, device=q_THC.device)
    stats = torch.empty(num_tokens * num_heads, num_splits, 2, dtype=torch.float32, device=q_THC.device)
    out_THc = q_THC.new_empty(num_tokens, num_heads, value_width)
    width_p = max(16, triton.next_power_of_2(value_width))
    index_T = batch.kv_index_T.contiguous()
    # Without a bound from the host, one request might hold all tokens of the pass.
    max_queries = num_tokens if batch.max_queries is None else batch.max_queries
    grid = (num_splits, num_requests, triton.cdiv(max_queries * num_heads, tiles.rows))
    partial_kernel[grid](
        q_THC.contiguous(), layer.keys_SGd, batch.page_table_RP.contiguous(), batch.query_starts_R1, batch.kv_lens_R,
        index_T, batch.ancestors_T.contiguous(), acc, stats, scale * _LOG2E, layer.keys_SGd.stride(0), table_width,
        batch.page_size, num_splits, num_heads,
        WIDTH=value_width, ROPE=rope_width, WIDTH_P=width_p, ROPE_P=max(16, triton.next_power_of_2(rope_width)),
        ROWS=tiles.rows, BLOCK=tiles.block, SPLIT=tiles.split, num_warps=tiles.warps, num_stages=tiles.stages,
        PDL=dependent, **launch_options(dependent, matrix_instruction(architecture)),
    )  # fmt: skip
    merge_kernel[(num_tokens * num_heads,)](
        acc, stats, index_T, out_THc, num_splits, num_heads,
        WIDTH=value_width, WIDTH_P=width_p, SPLIT=tiles.split, PDL=dependent, **launch_options(dependent),
    )  # fmt: skip
    return out_THc


def shipped_tiles(architecture: str) -> LatentTiles:
    """Return the tiles that ship for an architecture."""
    return LatentTiles(**shipped(architecture)["latent_attention"])


def variants(architecture: str) -> list[Variant]:
    """Return the kernels that run on an architecture, with the widths of Kimi-K2.5 and DeepSeek-V3."""
    tiles = shipped_tiles(architecture)
    partial = {
        "q_ptr": "*bf16", "latent_ptr": "*bf16", "table_ptr": "*i32", "starts_ptr": "*i32", "lens_ptr": "*i32",
        "index_ptr": "*i64", "ancestors_ptr": "*i64", "acc_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32",
        "slot_stride": "i32", "table_width": "i32", "page_size": "i32", "num_splits": "i32", "H": "i32",
    }  # fmt: skip
    widths = {"WIDTH": 512, "WIDTH_P": 512, "SPLIT": tiles.split, "PDL": False}
    blocks = {"ROPE": 64, "ROPE_P": 64, "ROWS": tiles.rows, "BLOCK": tiles.block}
    merge = {
        "acc_ptr": "*fp32", "stats_ptr": "*fp32", "index_ptr": "*i64", "out_ptr": "*bf16", "num_splits": "i32",
        "H": "i32",
    }  # fmt: skip
    aligned = ("q_ptr", "latent_ptr", "acc_ptr", "slot_stride")
    return [
        Variant(
            "latent attention", partial_kernel, partial, widths | blocks, tiles.warps, tiles.stages, "bf16", aligned
        ),
        Variant("latent attention, merge", merge_kernel, merge, widths, 4, 2, divisible=("acc_ptr", "out_ptr")),
    ]
