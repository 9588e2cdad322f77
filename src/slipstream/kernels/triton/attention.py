"""Paged attention for decoding, verifying and prefill: query tokens x the heads that share a key, in one tile.

A request's keys are cut in splits of a fixed length. A split's result is a maximum, a sum and a weighted sum of values;
results are merged in the order of splits, by the program itself (SERIAL) or by the last of those that share a tile. A
split, a block or a key that a row does not see changes none of its bits, so they depend on the row's own keys alone.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913, SIM108

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.launch import arrived_last, launch_options, wait_for_inputs
from slipstream.kernels.triton.tuning import AttentionConfig, read_tuning
from slipstream.kernels.triton.variants import Variant

_LOG2E = 1.4426950408889634
_NARROW_ROWS = 16


@triton.jit
def _find_request(starts_ptr, tile, num_requests, TOKENS: tl.constexpr, REQUESTS: tl.constexpr):
    """Return the request of a tile of TOKENS queries; request r's tiles start at starts[r] // TOKENS + r."""
    r = tl.arange(0, REQUESTS)
    first = tl.load(starts_ptr + r, mask=r < num_requests, other=2147480000) // TOKENS + r
    return tl.sum(((first <= tile) & (r < num_requests)).to(tl.int32), 0) - 1


@triton.jit
def _hide(scores, index, own_R, ancestors_R, end, window, HAS_WINDOW: tl.constexpr):
    """Return scores with -inf where a row does not see a key; signs make the masks, which are numbers, not predicates.

    AMD keeps a predicate of every element in scalar registers, of which there are few.
    """
    distance = own_R[:, None] - index[None, :]
    bit = (ancestors_R[:, None] >> tl.minimum(tl.maximum(distance, 0), 63).to(tl.int64)).to(tl.int32) & 1
    seen = (bit | ((63 - distance) >> 31)) & ((-1 - distance) >> 31) & ((index - end) >> 31)[None, :]
    if HAS_WINDOW:
        seen = seen & ((distance - window) >> 31)
    return tl.where(seen != 0, scores, float("-inf"))


@triton.jit
def _attend_block(
    best, total, acc, q, k_ptr, v_ptr, pages_at, slot_stride, own_R, ancestors_R, start, end, scale, window,
    WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add BLOCK keys; past the end the last key is read again, and hidden. Scores are powers of two."""
    dtype = v_ptr.dtype.element_ty
    column = tl.arange(0, D)
    if D != WIDTH:
        column = tl.minimum(column, WIDTH - 1)  # queries are zero beyond the width
    index = start + tl.arange(0, BLOCK)
    key = tl.minimum(index, end - 1) if MASKED else index
    page = tl.load(pages_at + key // PAGE).to(tl.int64)
    at = (page * PAGE + key % PAGE) * slot_stride
    k = tl.load(k_ptr + at[None, :] + column[:, None])
    v = tl.load(v_ptr + at[:, None] + column[None, :])
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if MASKED:
        scores = _hide(scores, index, own_R, ancestors_R, end, window, HAS_WINDOW)
    new_best = tl.maximum(best, tl.max(scores, 1))
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(scores - pivot[:, None]).to(dtype)
    shrink = tl.exp2(best - pivot)
    # The sum is a product with ones: its order is the matrix instruction's, not that of however many warps there are.
    ones = tl.full([BLOCK, 16], 1.0, tl.float32).to(dtype)
    total = tl.dot(weight, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(weight, v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _attend_split(
    q, k_ptr, v_ptr, pages_at, slot_stride, own_R, ancestors_R, lowest, from_key, to_key, scale, window,
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
            best, total, acc = _attend_block(
                best, total, acc, q, k_ptr, v_ptr, pages_at, slot_stride, own_R, ancestors_R, start, to_key, scale,
                window, WIDTH, D, BLOCK, PAGE, HAS_WINDOW, False,
            )  # fmt: skip
    for start in range(masked_from, to_key, BLOCK):
        best, total, acc = _attend_block(
            best, total, acc, q, k_ptr, v_ptr, pages_at, slot_stride, own_R, ancestors_R, start, to_key, scale,
            window, WIDTH, D, BLOCK, PAGE, HAS_WINDOW, True,
        )  # fmt: skip
    return best, tl.max(total, 1), acc


@triton.jit
def _merge(best, total, acc, best_s, total_s, acc_s):
    """Add a later split's result; total is [rows], acc [rows, D]."""
    new_best = tl.maximum(best, best_s)
    pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
    a, b = tl.exp2(best - pivot), tl.exp2(best_s - pivot)
    return new_best, total * a + total_s * b, acc * a[:, None] + acc_s * b[:, None]


@triton.jit
def _merge_stored(sums_at, part_at, count, ROWS: tl.constexpr, D: tl.constexpr):
    """Merge the results of `count` splits, in their order, as other programs have stored them."""
    best = tl.load(sums_at, cache_modifier=".cg")
    total = tl.load(sums_at + ROWS, cache_modifier=".cg")
    acc = tl.load(part_at, cache_modifier=".cg")
    for place in range(1, count):
        best_s = tl.load(sums_at + place * (2 * ROWS), cache_modifier=".cg")
        total_s = tl.load(sums_at + place * (2 * ROWS) + ROWS, cache_modifier=".cg")
        acc_s = tl.load(part_at + place * (ROWS * D), cache_modifier=".cg")
        best, total, acc = _merge(best, total, acc, best_s, total_s, acc_s)
    return best, total, acc


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, ancestors_ptr, sums_ptr, partial_ptr,
    counter_ptr, num_requests, num_splits, slot_stride, pages_stride, scale, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SERIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _find_request(starts_ptr, tile, num_requests, TOKENS, REQUESTS)
    q_from, q_to = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
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
        first_split = 0
        if HAS_WINDOW:
            first_split = tl.maximum(lowest - window + 1, 0) // SPLIT
        last_split = tl.cdiv(end, SPLIT)
        split += first_split
        pages_at = pages_ptr + request.to(tl.int64) * pages_stride
        k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
        if split < last_split:
            best, total, acc = _attend_split(
                q, k_at, v_at, pages_at, slot_stride, own, ancestors, lowest, split * SPLIT,
                tl.minimum(split * SPLIT + SPLIT, end), scale, window, ROWS, WIDTH, D, BLOCK, PAGE, HAS_WINDOW,
            )  # fmt: skip
            finished = True
            if SERIAL:
                for other in range(split + 1, last_split):
                    best_s, total_s, acc_s = _attend_split(
                        q, k_at, v_at, pages_at, slot_stride, own, ancestors, lowest, other * SPLIT,
                        tl.minimum(other * SPLIT + SPLIT, end), scale, window, ROWS, WIDTH, D, BLOCK, PAGE, HAS_WINDOW,
                    )  # fmt: skip
                    best, total, acc = _merge(best, total, acc, best_s, total_s, acc_s)
            else:
                cell = tile.to(tl.int64) * GROUPS + group
                sums_at = sums_ptr + cell * num_splits * (2 * ROWS) + row
                part_at = partial_ptr + cell * num_splits * (ROWS * D) + (row[:, None] * D + column[None, :])
                place = split - first_split
                tl.store(sums_at + place * (2 * ROWS), best)
                tl.store(sums_at + place * (2 * ROWS) + ROWS, total)
                tl.store(part_at + place * (ROWS * D), acc)
                finished = arrived_last(counter_ptr + cell, last_split - first_split)
                if finished:
                    best, total, acc = _merge_stored(sums_at, part_at, last_split - first_split, ROWS, D)
            if finished:
                out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                is_row = q_first + row // REPEATS <= last_token
                is_out = is_row[:, None] & (column < WIDTH)[None, :]
                tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_out)


@dataclass(frozen=True)
class AttentionLaunch:
    """How attention runs: its tiles, the counters its programs share, and whether it may overlap what was before."""

    config: AttentionConfig
    counters: Tensor
    dependent: bool
    instruction: int = 0


def attention(
    q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | None, launch: AttentionLaunch
) -> Tensor:
    """Attend over the pages of each request; the grid follows from shapes and host-side bounds alone."""
    num_tokens, num_heads, width = q_THd.shape
    num_groups, config = layer.keys_SGd.shape[1], launch.config
    num_requests = batch.kv_lens_R.shape[0]
    repeats = num_heads // num_groups
    most_queries = num_tokens if batch.max_queries is None else batch.max_queries
    rows = _NARROW_ROWS if most_queries * repeats <= _NARROW_ROWS else config.rows_wide
    rows = max(rows, triton.next_power_of_2(repeats))
    tokens = rows // repeats
    most_keys = batch.page_table_RP.shape[1] * batch.page_size if batch.max_keys is None else batch.max_keys
    serial = most_queries >= config.serial_from
    num_splits = 1 if serial else max(-(-most_keys // config.split), 1)
    num_tiles = num_tokens // tokens + num_requests
    head_block = max(triton.next_power_of_2(width), 16)
    cells = 1 if serial else num_tiles * num_groups * num_splits * rows
    assert serial or num_tiles * num_groups <= launch.counters.numel(), "every shared tile has a counter"
    sums = torch.empty(2 * cells, dtype=torch.float32, device=q_THd.device)
    partial = torch.empty(cells * head_block, dtype=torch.float32, device=q_THd.device)
    out = torch.empty_like(q_THd)
    _attention_kernel[(num_groups, num_tiles, num_splits)](
        q_THd, layer.keys_SGd, layer.values_SGd, out, batch.query_starts_R1, batch.kv_lens_R, batch.page_table_RP,
        batch.kv_index_T.contiguous(), batch.ancestors_T.contiguous(), sums, partial, launch.counters, num_requests,
        num_splits,
        layer.keys_SGd.stride(0), batch.page_table_RP.stride(0), scale * _LOG2E, window or 0,
        HEADS=num_heads, GROUPS=num_groups, WIDTH=width, D=head_block, ROWS=rows, TOKENS=tokens,
        REQUESTS=triton.next_power_of_2(num_requests), SPLIT=config.split, BLOCK=config.block, PAGE=batch.page_size,
        HAS_WINDOW=window is not None, SERIAL=serial, PDL=launch.dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    )  # fmt: skip
    return out


def variants(architecture: str) -> list[Variant]:
    """List what ships: narrow and wide tiles, merged by several programs or by one, for heads of 64 and 128."""
    config = read_tuning(architecture).attention
    signature = {
        "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16", "starts_ptr": "*i32",
        "lens_ptr": "*i32", "pages_ptr": "*i32", "index_ptr": "*i64", "ancestors_ptr": "*i64", "sums_ptr": "*fp32",
        "partial_ptr": "*fp32", "counter_ptr": "*i32", "num_requests": "i32", "num_splits": "i32",
        "slot_stride": "i32", "pages_stride": "i32", "scale": "fp32", "window": "i32",
    }  # fmt: skip
    divisible = tuple(name for name in signature if name.endswith("_ptr") or name == "slot_stride")
    shipped = []
    for rows, serial in ((_NARROW_ROWS, False), (config.rows_wide, False), (config.rows_wide, True)):
        for heads, groups, width in ((32, 8, 128), (9, 3, 64)):
            constants = {
                "HEADS": heads, "GROUPS": groups, "WIDTH": width, "D": width, "ROWS": rows,
                "TOKENS": rows // (heads // groups), "REQUESTS": 64, "SPLIT": config.split, "BLOCK": config.block,
                "PAGE": 16, "HAS_WINDOW": False, "SERIAL": serial, "PDL": False,
            }  # fmt: skip
            name = f"attention {rows} rows, heads of {width}{', serial' if serial else ''}"
            shipped.append(
                Variant(name, _attention_kernel, signature, constants, config.num_warps, config.num_stages, "bf16",
                        divisible)
            )  # fmt: skip
    return shipped
