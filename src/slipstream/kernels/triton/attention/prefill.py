"""Paged attention by one program to a tile of queries: prompts, and layers with sinks, windows or chunks.

`prefill_kernel` takes all splits of a tile's keys and merges their results in order, as `split_kv` does.
`windowed_kernel` takes a tile's keys from the first that any of its rows sees, in blocks that begin at multiples of
their length. A block or a key that a row does not see changes none of its bits, which are its own keys' alone.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.ops import Sight
from slipstream.kernels.triton.attention.tile import (
    DESCRIPTION,
    add_block,
    attend_block,
    find_request,
    first_seen,
    hide,
    key_offsets,
    load_scales,
    merge,
    nothing,
    widen,
)
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs

_LOG2E = 1.4426950408889634
_ROWS, _BLOCK = 16, 64  # of a tile with sinks, a window or a chunk


@triton.jit
def _attend_split(
    q, k_ptr, v_ptr, scales, pages_at, slot_stride, own_R, ancestors_R, lowest, from_key, to_key,
    scale, first_R,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from_key..to_key: maximum [rows], sum [rows, 16] with equal columns, and values [rows, D].

    Keys more than 63 before the `lowest` of the rows' own are seen by all rows, and need no mask.
    """
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    masked_from = from_key
    if not HAS_WINDOW:
        plain = tl.maximum(tl.minimum(to_key, lowest - 63) - from_key, 0)
        masked_from = from_key + plain // BLOCK * BLOCK
        for start in range(from_key, masked_from, BLOCK):
            at = key_offsets(pages_at, slot_stride, start, to_key, BLOCK, PAGE)
            best, total, acc = attend_block(
                best, total, acc, q, k_ptr, v_ptr, scales, at, own_R, ancestors_R, start, to_key, scale, first_R,
                WIDTH, D, SLOT, BLOCK, HAS_WINDOW, False,
            )  # fmt: skip
    for start in range(masked_from, to_key, BLOCK):
        at = key_offsets(pages_at, slot_stride, start, to_key, BLOCK, PAGE)
        best, total, acc = attend_block(
            best, total, acc, q, k_ptr, v_ptr, scales, at, own_R, ancestors_R, start, to_key, scale, first_R,
            WIDTH, D, SLOT, BLOCK, HAS_WINDOW, True,
        )  # fmt: skip
    return best, tl.max(total, 1), acc


@triton.jit(
    do_not_specialize=["num_requests", "pages_stride", "scale_stride", "window"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr,
    num_requests, slot_stride, pages_stride, scale_step, scale_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of one request's queries to all keys they see."""
    wait_for_inputs(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
    scales = (k_scales_ptr, v_scales_ptr, group * scale_stride, scale_step)
    request, q_from, q_to = find_request(starts_ptr, tile, num_requests, TOKENS, REQUESTS)
    q_first = q_from + (tile - (q_from // TOKENS + request)) * TOKENS
    if q_first < q_to:
        row = tl.arange(0, ROWS)
        # Rows past the last query repeat it, and are not stored.
        last_token = tl.minimum(q_first + TOKENS, q_to) - 1
        token = tl.minimum(q_first + row // REPEATS, last_token)
        head = group * REPEATS + row % REPEATS
        column = tl.arange(0, D)
        q_at = (token.to(tl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
        if D == WIDTH:
            q = tl.load(q_ptr + q_at)
        else:
            q = tl.load(q_ptr + q_at, mask=(column < WIDTH)[None, :], other=0.0)
        own = tl.load(index_ptr + token).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token)
        end = tl.minimum(tl.load(lens_ptr + request), tl.max(own, 0) + 1)
        lowest = tl.min(own, 0)
        first, first_split = tl.zeros_like(own), 0
        if HAS_WINDOW:
            first = first_seen(own, ancestors, window, 0)
            first_split = tl.min(first, 0) // SPLIT
        last_split = tl.cdiv(end, SPLIT)
        pages_at = pages_ptr + request.to(tl.int64) * pages_stride
        k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
        if first_split < last_split:
            best, total, acc = nothing(ROWS, D)
            group_best, group_total, group_acc = nothing(ROWS, D)
            for split in range(first_split, last_split):
                best_s, total_s, acc_s = _attend_split(
                    q, k_at, v_at, scales, pages_at, slot_stride, own, ancestors, lowest, split * SPLIT,
                    tl.minimum(split * SPLIT + SPLIT, end), scale, first, ROWS, WIDTH, D, GROUPS * WIDTH, BLOCK, PAGE,
                    HAS_WINDOW,
                )  # fmt: skip
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best_s, total_s, acc_s)
                if ((split + 1) % IN_GROUP == 0) | (split + 1 == last_split):
                    best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            is_row = q_first + row // REPEATS <= last_token
            is_out = is_row[:, None] & (column < WIDTH)[None, :]
            tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(
    do_not_specialize=["num_requests", "pages_stride", "scale_stride", "window", "chunk"],
    do_not_specialize_on_alignment=DESCRIPTION,
)
def windowed_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr,
    ancestors_ptr, num_requests, slot_stride, pages_stride, scale_step, scale_stride, scale, window, chunk,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of queries; a window or a chunk of 0 sees all keys."""
    wait_for_inputs(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
    scales = (k_scales_ptr, v_scales_ptr, group * scale_stride, scale_step)
    request, q_from, q_to = find_request(starts_ptr, tile, num_requests, TOKENS, REQUESTS)
    q_first = q_from + (tile - (q_from // TOKENS + request)) * TOKENS
    if q_first < q_to:
        row = tl.arange(0, ROWS)
        # Rows past the last query repeat it, and are not stored.
        last_token = tl.minimum(q_first + TOKENS, q_to) - 1
        token = tl.minimum(q_first + row // REPEATS, last_token)
        head = group * REPEATS + row % REPEATS
        column = tl.arange(0, D)
        q_at = (token.to(tl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
        q = tl.load(q_ptr + q_at, mask=(column < WIDTH)[None, :], other=0.0)
        own = tl.load(index_ptr + token).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + token)
        end = tl.minimum(tl.load(lens_ptr + request), tl.max(own, 0) + 1)
        first = first_seen(own, ancestors, window, chunk)
        pages_at = pages_ptr + request.to(tl.int64) * pages_stride
        best, sums, acc = nothing(ROWS, D)
        total = tl.zeros([ROWS, 16], tl.float32)
        read = tl.minimum(column, WIDTH - 1)  # queries are zero beyond the width
        for start in range(tl.min(first, 0) // BLOCK * BLOCK, end, BLOCK):
            at = key_offsets(pages_at, slot_stride, start, end, BLOCK, PAGE)
            k = tl.load(k_ptr + group * WIDTH + at[None, :] + read[:, None])
            v = tl.load(v_ptr + group * WIDTH + at[:, None] + read[None, :])
            scores = tl.dot(q, widen(k, q), input_precision="ieee") * scale
            if k_scales_ptr is not None:
                scores = scores * load_scales(scales, at, 0, GROUPS * WIDTH)[None, :]
                v = widen(v, q)
            scores = hide(scores, start + tl.arange(0, BLOCK), own, ancestors, end, first, True)
            best, total, acc = add_block(best, total, acc, scores, v, scales, at, GROUPS * WIDTH, BLOCK)
        sums = tl.max(total, 1)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            best, sums, acc = merge(best, sums, acc, sink, tl.full([ROWS], 1.0, tl.float32), tl.zeros_like(acc))
        out = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
        is_row = q_first + row // REPEATS <= last_token
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])


def windowed_attention(
    q_THd: Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scale: float,
    sight: Sight,
    dependent: bool,
    instruction: int = 0,
) -> Tensor:
    """Attend over the pages of each request; the grid follows from shapes alone."""
    batch = batch if batch.tree is None else batch.by_node
    num_tokens, num_heads, width = q_THd.shape
    num_groups, num_requests = layer.keys_SGd.shape[1], batch.kv_lens_R.shape[0]
    repeats = num_heads // num_groups
    rows = max(_ROWS, triton.next_power_of_2(repeats))
    tokens = rows // repeats
    sinks_H = None if sight.sinks_H is None else sight.sinks_H.detach().float().contiguous()
    out = torch.empty_like(q_THd)
    windowed_kernel[(num_groups, num_tokens // tokens + num_requests)](
        q_THd, layer.keys_SGd, layer.values_SGd, *(layer.scales or (None, None)), sinks_H, out, batch.query_starts_R1,
        batch.kv_lens_R, batch.page_table_RP, batch.kv_index_T.contiguous(), batch.ancestors_T.contiguous(),
        num_requests,
        layer.keys_SGd.stride(0), batch.page_table_RP.stride(0), *layer.scale_strides, scale * _LOG2E,
        sight.window or 0, sight.chunk or 0,
        HEADS=num_heads, GROUPS=num_groups, WIDTH=width, D=max(triton.next_power_of_2(width), 16), ROWS=rows,
        TOKENS=tokens, REQUESTS=triton.next_power_of_2(num_requests), BLOCK=_BLOCK, PAGE=batch.page_size,
        PDL=dependent, num_warps=4, num_stages=2, **launch_options(dependent, instruction),
    )  # fmt: skip
    return out
