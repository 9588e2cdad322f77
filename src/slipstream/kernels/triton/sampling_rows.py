"""The sampler's last pass, a program a row: the token, and the log probabilities that are wanted."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import wait_for_inputs
from slipstream.kernels.triton.sampling_tokens import (
    LEAST,
    NO_ENTRY,
    NO_TOKEN,
    NUM_TOP,
    SEED,
    TEMPERATURE,
    TOP_K,
    TRUNCATION,
    USES,
    K,
    P,
    certain_score,
    entry_of,
    least_above,
    logit_of,
    no_entry,
    order_of,
    setting,
    whole_setting,
)
from slipstream.kernels.triton.sampling_truncation import (
    draw_before,
    draw_found,
    find_best,
    found_orders,
    last_of_best,
    weight_before,
)
from slipstream.kernels.triton.sampling_vocabulary import best_of_groups, is_changed, raw_logits, row_logits


@triton.jit
def _sum_of_groups(sum_ptr, row, num_groups, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    return tl.sum(tl.load(sum_ptr + row * num_groups + group, mask=group < num_groups, other=0), 0)


@triton.jit
def first_in_nucleus(
    logits_ptr, processed_ptr, records_ptr, slot, row, position, token, bound, total, before, highest, V, stride,
    changed, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the drawn token if top-p keeps it, else one drawn from those before it, and so on.

    What comes before a token that top-p does not keep is a smaller set with the same nucleus, and the best of a set, if
    it lies in a part of it, is the best of that part. Without a token to begin with, one is drawn from those before the
    bound, and without a total it is the weight of those. `before` is the weight before the token, -1 if not known.
    """
    temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
    seed = whole_setting(records_ptr, slot, SEED)
    top_p = setting(records_ptr, slot, P)
    least = least_above(setting(records_ptr, slot, LEAST) * 2147483648.0)
    searching = True
    while searching:
        if (token == NO_ENTRY) & (total > 0):
            token = draw_before(
                logits_ptr, processed_ptr, row, bound, highest, temperature, least, position, seed,
                certain_score(highest, temperature), V, stride, changed, BLOCK,
            )  # fmt: skip
        searching = False
        if top_p < 1:
            if token != NO_ENTRY:
                bound = order_of(row_logits(logits_ptr, processed_ptr, row, token, V, stride, changed), token)
            if before < 0:
                before = weight_before(
                    logits_ptr, processed_ptr, row, bound, highest, temperature, V, stride, changed, BLOCK
                )
            if total == 0:
                total = before
                searching = True
            elif before >= least_above(top_p * total.to(tl.float64)):
                token = no_entry()
                searching = True
            before = tl.full([], -1, tl.int64)
    return token


@triton.jit
def _truncated(
    logits_ptr, processed_ptr, records_ptr, cells_ptr, sum_ptr, before_ptr, drawn_ptr, drawn_entry_ptr, list_ptr,
    kept_ptr, slot, row, position, highest, V, stride, num_groups, num_cells, changed,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr, TOGETHER: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Return the token of a row that truncates."""
    uses, k = whole_setting(records_ptr, slot, USES), whole_setting(records_ptr, slot, K)
    temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
    found = tl.full([], KEPT + 1, tl.int32)
    if ((uses & TOP_K) != 0) & (k <= KEPT):
        found = find_best(
            logits_ptr, processed_ptr, cells_ptr, list_ptr, kept_ptr, row, k, V, stride, num_cells, changed,
            CELLS, CELL, TOGETHER, KEPT,
        )  # fmt: skip
    token = no_entry()
    if found <= KEPT:
        token = draw_found(
            kept_ptr, row, found, k, temperature, setting(records_ptr, slot, P), setting(records_ptr, slot, LEAST),
            position, whole_setting(records_ptr, slot, SEED), KEPT,
        )  # fmt: skip
    else:
        bound, total = tl.full([], NO_TOKEN, tl.int64), _sum_of_groups(sum_ptr, row, num_groups, GROUPS)
        before = _sum_of_groups(before_ptr, row, num_groups, GROUPS)
        if (uses & TOP_K) != 0:
            bound = last_of_best(logits_ptr, processed_ptr, row, k, highest, V, stride, changed, BLOCK) - 1
            total = (setting(records_ptr, slot, P) >= 1).to(tl.int64)
            before = tl.full([], -1, tl.int64)
        else:
            _, token = best_of_groups(drawn_ptr, drawn_entry_ptr, row, num_groups, GROUPS)
        token = first_in_nucleus(
            logits_ptr, processed_ptr, records_ptr, slot, row, position, token, bound, total, before, highest, V,
            stride, changed, BLOCK,
        )  # fmt: skip
    return token


@triton.jit
def _write_tops(
    logits_ptr, cells_ptr, list_ptr, kept_ptr, top_id_ptr, top_logprob_ptr, row, num_top, norm, V, stride, num_cells,
    BLOCK: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr, TOGETHER: tl.constexpr, KEPT: tl.constexpr,
    MAX_TOP: tl.constexpr,
):  # fmt: skip
    """Write the best tokens of a row and their log probabilities."""
    raw = False
    found = find_best(
        logits_ptr, cells_ptr, cells_ptr, list_ptr, kept_ptr, row, num_top, V, stride, num_cells, raw,
        CELLS, CELL, TOGETHER, KEPT,
    )  # fmt: skip
    orders = found_orders(kept_ptr, row, tl.minimum(found, KEPT), KEPT)
    last = tl.full([], 9223372036854775807, tl.int64)
    for rank in range(num_top):
        if found <= KEPT:
            best = tl.max(tl.where(orders < last, orders, NO_TOKEN), 0)
        else:  # thousands of equal ones: a pass for each
            best = tl.full([], NO_TOKEN, tl.int64)
            for first in range(0, V, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                order = order_of(raw_logits(logits_ptr, row, entry, V, stride), entry)
                best = tl.maximum(best, tl.max(tl.where((order < last) & (entry < V), order, NO_TOKEN), 0))
        last = best
        logit = logit_of((best >> 32).to(tl.int32))
        if logit > float("-inf"):
            tl.store(top_id_ptr + row * MAX_TOP + rank, entry_of(best).to(tl.int64))
            tl.store(top_logprob_ptr + row * MAX_TOP + rank, (logit.to(tl.float64) - norm).to(tl.float32))


@triton.jit
def finish_kernel(
    logits_ptr, records_ptr, mask_row_ptr, slot_ptr, position_ptr, processed_ptr, value_ptr, entry_ptr, raw_value_ptr,
    cells_ptr, raw_cells_ptr, sum_ptr, before_ptr, raw_sum_ptr, drawn_ptr, drawn_entry_ptr, list_ptr, kept_ptr,
    token_ptr, logprob_ptr, top_id_ptr, top_logprob_ptr, V, stride, num_groups, num_cells,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, CELLS: tl.constexpr, CELL: tl.constexpr, TOGETHER: tl.constexpr,
    KEPT: tl.constexpr, MAX_TOP: tl.constexpr, TOPS: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a row's token, and what its slot wants beside it."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slot_ptr + row), tl.load(position_ptr + row)
    uses, num_top = whole_setting(records_ptr, slot, USES), whole_setting(records_ptr, slot, NUM_TOP)
    highest, token = best_of_groups(value_ptr, entry_ptr, row, num_groups, GROUPS)
    if ((uses & TRUNCATION) != 0) & (highest > float("-inf")):
        mask_row = tl.full([], -1, tl.int64)
        if MASKED:
            mask_row = tl.load(mask_row_ptr + row)
        token = _truncated(
            logits_ptr, processed_ptr, records_ptr, cells_ptr, sum_ptr, before_ptr, drawn_ptr, drawn_entry_ptr,
            list_ptr, kept_ptr, slot, row, position, highest, V, stride, num_groups, num_cells,
            is_changed(records_ptr, slot, position, mask_row), BLOCK, GROUPS, CELLS, CELL, TOGETHER, KEPT,
        )  # fmt: skip
    has_token = highest > float("-inf")
    tl.store(token_ptr + row, tl.where(has_token, token, -1).to(tl.int64))
    if num_top >= 0:
        group = tl.arange(0, GROUPS)
        raw = tl.load(raw_value_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
        total = _sum_of_groups(raw_sum_ptr, row, num_groups, GROUPS).to(tl.float64)
        norm = tl.max(raw, 0).to(tl.float64) + tl.log(total * 4.656612873077393e-10)
        logit = raw_logits(logits_ptr, row, tl.where(has_token, token, V), V, stride)
        own = tl.where(logit > float("-inf"), logit.to(tl.float64) - norm, float("-inf"))
        tl.store(logprob_ptr + row, own.to(tl.float32))
        rank = tl.arange(0, TOPS)
        tl.store(top_id_ptr + row * MAX_TOP + rank, tl.full([TOPS], -1, tl.int64), mask=rank < MAX_TOP)
        tl.store(
            top_logprob_ptr + row * MAX_TOP + rank, tl.full([TOPS], float("-inf"), tl.float32), mask=rank < MAX_TOP
        )
        tl.debug_barrier()
        if (num_top > 0) & (tl.max(raw, 0) > float("-inf")):
            _write_tops(
                logits_ptr, raw_cells_ptr, list_ptr, kept_ptr, top_id_ptr, top_logprob_ptr, row, num_top, norm, V,
                stride, num_cells, BLOCK, CELLS, CELL, TOGETHER, KEPT, MAX_TOP,
            )  # fmt: skip
