"""Paged attention for prompts: one program work all splits of a tile's keys and merges their results in order."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.attention.tile import (
    DESCRIPTION,
    attend_block,
    find_request,
    first_seen,
    key_offsets,
    merge,
    nothing,
)
from slipstream.kernels.triton.launch import wait_for_inputs


@triton.jit
def _attend_split(
    q, k_ptr, v_ptr, k_scales_at, v_scales_at, pages_at, slot_stride, own_R, ancestors_R, lowest, from_key, to_key,
    scale, first_R,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
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
                best, total, acc, q, k_ptr, v_ptr, k_scales_at, v_scales_at, at, own_R, ancestors_R, start, to_key,
                scale, first_R, WIDTH, D, BLOCK, HAS_WINDOW, False,
            )  # fmt: skip
    for start in range(masked_from, to_key, BLOCK):
        at = key_offsets(pages_at, slot_stride, start, to_key, BLOCK, PAGE)
        best, total, acc = attend_block(
            best, total, acc, q, k_ptr, v_ptr, k_scales_at, v_scales_at, at, own_R, ancestors_R, start, to_key, scale,
            first_R, WIDTH, D, BLOCK, HAS_WINDOW, True,
        )  # fmt: skip
    return best, tl.max(total, 1), acc


@triton.jit(do_not_specialize=["num_requests", "pages_stride", "window"], do_not_specialize_on_alignment=DESCRIPTION)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr,
    num_requests, slot_stride, pages_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    IN_GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of one request's queries to all keys they see."""
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
                    q, k_at, v_at, k_scales_ptr, v_scales_ptr, pages_at, slot_stride, own, ancestors, lowest,
                    split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end), scale, first, ROWS, WIDTH, D, BLOCK,
                    PAGE, HAS_WINDOW,
                )  # fmt: skip
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best_s, total_s, acc_s)
                if ((split + 1) % IN_GROUP == 0) | (split + 1 == last_split):
                    best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            is_row = q_first + row // REPEATS <= last_token
            is_out = is_row[:, None] & (column < WIDTH)[None, :]
            tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_out)
