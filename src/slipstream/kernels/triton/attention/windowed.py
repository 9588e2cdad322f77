"""Paged attention for layers that see otherwise than Llama's: with sinks, and within windows or chunks.

One program work a tile's keys from the first that any of its rows sees, in blocks that begin at multiples of their
length. A block or a key that a row does not see changes none of its bits, so they depend on the row's own keys alone.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.ops import Sight
from slipstream.kernels.triton.attention.tile import (
    DESCRIPTION,
    add_block,
    find_request,
    first_seen,
    hide,
    key_offsets,
    merge,
    nothing,
    numbers,
    powers,
)
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs

_LOG2E = 1.4426950408889634
_ROWS, _BLOCK = 16, 64


@triton.jit(
    do_not_specialize=["num_requests", "pages_stride", "window", "chunk"], do_not_specialize_on_alignment=DESCRIPTION
)
def sight_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr,
    ancestors_ptr, num_requests, slot_stride, pages_stride, scale, window, chunk,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of queries; a window or a chunk of 0 sees all keys."""
    wait_for_inputs(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile = tl.program_id(0), tl.program_id(1)
    if k_scales_ptr is not None:  # FP8: scales of this head's codes
        k_scales_ptr += group
        v_scales_ptr += group
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
            scores = tl.dot(q, numbers(k, q), input_precision="ieee") * scale
            if k_scales_ptr is not None:
                scores = scores * powers(k_scales_ptr, at, WIDTH)[None, :]
                v = numbers(v, q)
            scores = hide(scores, start + tl.arange(0, BLOCK), own, ancestors, end, first, True)
            best, total, acc = add_block(best, total, acc, scores, v, v_scales_ptr, at, WIDTH, BLOCK)
        sums = tl.max(total, 1)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            best, sums, acc = merge(best, sums, acc, sink, tl.full([ROWS], 1.0, tl.float32), tl.zeros_like(acc))
        out = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
        is_row = q_first + row // REPEATS <= last_token
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])


def attention(
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
    sight_kernel[(num_groups, num_tokens // tokens + num_requests)](
        q_THd, layer.keys_SGd, layer.values_SGd, *(layer.scales or (None, None)), sinks_H, out, batch.query_starts_R1,
        batch.kv_lens_R, batch.page_table_RP, batch.kv_index_T.contiguous(), batch.ancestors_T.contiguous(),
        num_requests,
        layer.keys_SGd.stride(0), batch.page_table_RP.stride(0), scale * _LOG2E, sight.window or 0,
        sight.chunk or 0,
        HEADS=num_heads, GROUPS=num_groups, WIDTH=width, D=max(triton.next_power_of_2(width), 16), ROWS=rows,
        TOKENS=tokens, REQUESTS=triton.next_power_of_2(num_requests), BLOCK=_BLOCK, PAGE=batch.page_size,
        PDL=dependent, num_warps=4, num_stages=2, **launch_options(dependent, instruction),
    )  # fmt: skip
    return out
