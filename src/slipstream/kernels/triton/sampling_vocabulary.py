"""The sampler's passes over the vocabulary in parallel: processing and the best of each part, then sums of weights.

A program takes a part of a row. Cells are so few tokens that the highest of each tell where the best k lie.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import wait_for_inputs
from slipstream.kernels.triton.sampling_tokens import (
    BIAS,
    FREQUENCY,
    LEAST,
    MIN_P,
    MIN_UNTIL,
    NO_ENTRY,
    NUM_TOP,
    PENALTIES,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TRUNCATION,
    USES,
    certain_score,
    draw_best,
    least_above,
    no_entry,
    number,
    order_of,
    setting,
    weight,
    whole_setting,
)


@triton.jit
def best_of_groups(value_ptr, entry_ptr, row, num_groups, GROUPS: tl.constexpr):
    """Return the best value of a row's splits and its entry."""
    group = tl.arange(0, GROUPS)
    value = tl.load(value_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    entry = tl.load(entry_ptr + row * num_groups + group, mask=group < num_groups, other=NO_ENTRY)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, entry, NO_ENTRY), 0)


@triton.jit
def raw_logits(logits_ptr, row, entry, V, stride):
    """Return a row's logits as they came, -inf past the vocabulary."""
    return number(tl.load(logits_ptr + row * stride + entry, mask=entry < V, other=float("-inf")))


@triton.jit
def is_changed(records_ptr, slot, position, mask_row):
    """Tell whether anything changes a row's logits before truncation."""
    changes = (whole_setting(records_ptr, slot, USES) & (PENALTIES | BIAS)) != 0
    return changes | (position < whole_setting(records_ptr, slot, MIN_UNTIL)) | (mask_row >= 0)


@triton.jit
def row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed):
    """Return a row's logits as truncation sees them; where anything changed them, they were kept."""
    if changed:
        logits = tl.load(processed_ptr + row * V + entry, mask=entry < V, other=float("-inf"))
    else:
        logits = raw_logits(logits_ptr, row, entry, V, stride)
    return logits


@triton.jit
def _penalised(logits, records_ptr, said_ptr, path_ptr, slot, row, entry, V, num_path):
    said = tl.load(said_ptr + slot * V + entry, mask=entry < V, other=0)
    for at in range(num_path):
        said += 2 * (entry == tl.load(path_ptr + row * num_path + at)).to(tl.int32)
    count = (said >> 1).to(tl.float32)
    repetition = setting(records_ptr, slot, REPETITION).to(tl.float32)
    repeated = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + repetition), logits * repetition)
    logits = tl.where(said > 0, repeated, logits)
    logits = logits - setting(records_ptr, slot, FREQUENCY).to(tl.float32) * count
    return logits - setting(records_ptr, slot, PRESENCE).to(tl.float32) * (count > 0).to(tl.float32)


@triton.jit
def _bits(words_ptr, entry, V, num_words):
    """Return as 1 or 0 the bit of each token; past the last word there is none."""
    word = tl.load(words_ptr + (entry >> 5), mask=(entry < V) & ((entry >> 5) < num_words), other=0)
    return (word >> (entry & 31)) & 1


@triton.jit
def _leaves_others(words_ptr, ends_ptr, V, num_words, num_end_words):
    """Tell whether a mask leaves anything but end tokens."""
    found = tl.zeros([1024], tl.int32)
    for first in range(0, num_end_words, 1024):
        at = first + tl.arange(0, 1024)
        words = tl.load(words_ptr + at, mask=at < tl.minimum(num_words, num_end_words), other=0)
        ends = tl.load(ends_ptr + at, mask=at < num_end_words, other=0)
        real = tl.where(at < V // 32, -1, (1 << (V % 32)) - 1)
        found = found | (words & ~ends & real)
    return tl.max((found != 0).to(tl.int32), 0) != 0


@triton.jit
def _processed(
    logits, records_ptr, said_ptr, bias_ptr, ends_ptr, words_ptr, path_ptr, slot, row, mask_row, entry, V, num_path,
    num_words, num_end_words, waits,
):  # fmt: skip
    """Apply a row's penalties, bias, mask and minimum length."""
    uses = whole_setting(records_ptr, slot, USES)
    if (uses & PENALTIES) != 0:
        logits = _penalised(logits, records_ptr, said_ptr, path_ptr, slot, row, entry, V, num_path)
    if (uses & BIAS) != 0:
        logits += tl.load(bias_ptr + slot * V + entry, mask=entry < V, other=0.0)
    if mask_row >= 0:
        allowed = _bits(words_ptr + mask_row * num_words, entry, V, num_words)
        logits = tl.where(allowed != 0, logits, float("-inf"))
    if waits:
        ends = _bits(ends_ptr + slot * num_end_words, entry, V, num_end_words)
        logits = tl.where(ends != 0, float("-inf"), logits)
    return number(tl.where(entry < V, logits, float("-inf")))


@triton.jit
def _keep_cells(cells_ptr, row, block, logits, num_cells, BLOCK: tl.constexpr, CELL: tl.constexpr):
    """Keep the highest logit of each cell of a block."""
    highest = tl.max(tl.reshape(logits, [BLOCK // CELL, CELL]), 1)
    cell = block * (BLOCK // CELL) + tl.arange(0, BLOCK // CELL)
    tl.store(cells_ptr + row * num_cells + cell, highest, mask=cell < num_cells)


@triton.jit
def _best_of_plain(
    logits_ptr, records_ptr, slot, position, row, first, V, stride, BLOCK: tl.constexpr, TAKEN: tl.constexpr
):
    """Return the best of a part of a row that uses nothing but temperature."""
    best, at = float("-inf"), no_entry()
    temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
    if temperature > 0:
        seed = whole_setting(records_ptr, slot, SEED)
        for block in range(TAKEN):
            begin = first + block * BLOCK
            logits = raw_logits(logits_ptr, row, begin + tl.arange(0, BLOCK), V, stride)
            best, at = draw_best(logits, begin, temperature, position, seed, best, at, BLOCK)
    else:  # all loads are in flight at once: one block to a program is too little to keep the memory busy
        highest, where = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], NO_ENTRY, tl.int32)
        for block in tl.static_range(TAKEN):
            entry = first + block * BLOCK + tl.arange(0, BLOCK)
            logits = raw_logits(logits_ptr, row, entry, V, stride)
            better = logits > highest
            highest, where = tl.where(better, logits, highest), tl.where(better, entry, where)
        best = tl.max(highest, 0)
        at = tl.min(tl.where(highest == best, where, NO_ENTRY), 0)
    return best, at


@triton.jit
def process_kernel(
    logits_ptr, records_ptr, said_ptr, bias_ptr, ends_ptr, words_ptr, mask_row_ptr, slot_ptr, position_ptr, path_ptr,
    processed_ptr, value_ptr, entry_ptr, raw_value_ptr, cells_ptr, raw_cells_ptr,
    V, stride, num_path, num_words, num_end_words, num_cells,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, CELL: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave the best of a part of a row: of logits / T + noise, or of logits where truncation follows.

    Rows that truncation follows and that anything changed are kept as they are then. Cells are kept for top-k, and
    those of the logits as they came for the best tokens' log probabilities.
    """
    wait_for_inputs(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = row * tl.num_programs(1) + group
    slot, position = tl.load(slot_ptr + row), tl.load(position_ptr + row)
    mask_row = tl.full([], -1, tl.int64)
    if MASKED:
        mask_row = tl.load(mask_row_ptr + row)
    uses, num_top = whole_setting(records_ptr, slot, USES), whole_setting(records_ptr, slot, NUM_TOP)
    changed = is_changed(records_ptr, slot, position, mask_row)
    truncates = (uses & TRUNCATION) != 0
    first = group * (TAKEN * BLOCK)
    if (not changed) & (not truncates) & (num_top < 0):
        best, at = _best_of_plain(logits_ptr, records_ptr, slot, position, row, first, V, stride, BLOCK, TAKEN)
        tl.store(value_ptr + cell, best)
        tl.store(entry_ptr + cell, at)
        return
    temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
    seed = whole_setting(records_ptr, slot, SEED)
    waits = position < whole_setting(records_ptr, slot, MIN_UNTIL)
    if waits & (mask_row >= 0):
        waits = _leaves_others(
            words_ptr + mask_row * num_words, ends_ptr + slot * num_end_words, V, num_words, num_end_words
        )
    best, at, raw_best = float("-inf"), no_entry(), float("-inf")
    for block in range(TAKEN):
        begin = first + block * BLOCK
        entry = begin + tl.arange(0, BLOCK)
        logits = raw_logits(logits_ptr, row, entry, V, stride)
        if num_top >= 0:
            raw_best = tl.maximum(raw_best, tl.max(logits, 0))
            if num_top > 0:
                _keep_cells(raw_cells_ptr, row, group * TAKEN + block, logits, num_cells, BLOCK, CELL)
        if changed:
            logits = _processed(
                logits, records_ptr, said_ptr, bias_ptr, ends_ptr, words_ptr, path_ptr, slot, row, mask_row, entry, V,
                num_path, num_words, num_end_words, waits,
            )  # fmt: skip
            if truncates:
                tl.store(processed_ptr + row * V + entry, logits, mask=entry < V)
        if (uses & TOP_K) != 0:
            _keep_cells(cells_ptr, row, group * TAKEN + block, logits, num_cells, BLOCK, CELL)
        if (temperature > 0) & (not truncates):
            best, at = draw_best(logits, begin, temperature, position, seed, best, at, BLOCK)
        else:
            highest = tl.max(logits, 0)
            if highest > best:
                best, at = highest, tl.min(tl.where(logits == highest, entry, NO_ENTRY), 0)
    tl.store(value_ptr + cell, best)
    tl.store(entry_ptr + cell, at)
    tl.store(raw_value_ptr + cell, raw_best)


@triton.jit
def weigh_kernel(
    logits_ptr, records_ptr, mask_row_ptr, slot_ptr, position_ptr, processed_ptr, value_ptr, raw_value_ptr, sum_ptr,
    raw_sum_ptr, drawn_ptr, drawn_entry_ptr, V, stride,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave a part's sums of weights, of both kinds, and the best of logits / T + noise that min-p keeps.

    For rows that truncate without top-k, and rows whose log probabilities are wanted.
    """
    wait_for_inputs(PDL)
    row, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cell = row * num_groups + group
    slot, position = tl.load(slot_ptr + row), tl.load(position_ptr + row)
    uses, num_top = whole_setting(records_ptr, slot, USES), whole_setting(records_ptr, slot, NUM_TOP)
    draws = ((uses & TRUNCATION) != 0) & ((uses & TOP_K) == 0)
    if (not draws) & (num_top < 0):
        return
    mask_row = tl.full([], -1, tl.int64)
    if MASKED:
        mask_row = tl.load(mask_row_ptr + row)
    changed = is_changed(records_ptr, slot, position, mask_row)
    other = tl.arange(0, GROUPS)
    first = group * (TAKEN * BLOCK)
    if num_top >= 0:
        raw = tl.load(raw_value_ptr + row * num_groups + other, mask=other < num_groups, other=float("-inf"))
        total = tl.zeros([BLOCK], tl.int64)
        for block in range(TAKEN):
            entry = first + block * BLOCK + tl.arange(0, BLOCK)
            weights = weight(raw_logits(logits_ptr, row, entry, V, stride), tl.max(raw, 0), 1.0)
            total += tl.where(entry < V, weights, 0)
        tl.store(raw_sum_ptr + cell, tl.sum(total, 0))
    if draws:
        highest = tl.load(value_ptr + row * num_groups + other, mask=other < num_groups, other=float("-inf"))
        temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
        best, at = certain_score(tl.max(highest, 0), temperature), no_entry()
        seed = whole_setting(records_ptr, slot, SEED)
        least = least_above(setting(records_ptr, slot, LEAST) * 2147483648.0)
        total = tl.zeros([BLOCK], tl.int64)
        for block in range(TAKEN):
            begin = first + block * BLOCK
            entry = begin + tl.arange(0, BLOCK)
            logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
            weights = weight(logits, tl.max(highest, 0), temperature)
            total += tl.where(entry < V, weights, 0)
            logits = tl.where(((uses & MIN_P) == 0) | (weights >= least), logits, float("-inf"))
            best, at = draw_best(logits, begin, temperature, position, seed, best, at, BLOCK)
        tl.store(sum_ptr + cell, tl.sum(total, 0))
        tl.store(drawn_ptr + cell, best)
        tl.store(drawn_entry_ptr + cell, at)


@triton.jit
def nucleus_kernel(
    logits_ptr, records_ptr, mask_row_ptr, slot_ptr, position_ptr, processed_ptr, value_ptr, drawn_ptr,
    drawn_entry_ptr, before_ptr, V, stride,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave a part's sum of weights before the drawn token; for rows with top-p and without top-k."""
    wait_for_inputs(PDL)
    row, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, position = tl.load(slot_ptr + row), tl.load(position_ptr + row)
    if (whole_setting(records_ptr, slot, USES) & (TOP_P | TOP_K)) != TOP_P:
        return
    mask_row = tl.full([], -1, tl.int64)
    if MASKED:
        mask_row = tl.load(mask_row_ptr + row)
    changed = is_changed(records_ptr, slot, position, mask_row)
    other = tl.arange(0, GROUPS)
    highest = tl.load(value_ptr + row * num_groups + other, mask=other < num_groups, other=float("-inf"))
    _, token = best_of_groups(drawn_ptr, drawn_entry_ptr, row, num_groups, GROUPS)
    own = order_of(row_logits(logits_ptr, processed_ptr, row, token, V, stride, changed), token)
    temperature = setting(records_ptr, slot, TEMPERATURE).to(tl.float32)
    total = tl.zeros([BLOCK], tl.int64)
    for block in range(TAKEN):
        entry = group * (TAKEN * BLOCK) + block * BLOCK + tl.arange(0, BLOCK)
        logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
        weights = weight(logits, tl.max(highest, 0), temperature)
        total += tl.where((entry < V) & (order_of(logits, entry) > own), weights, 0)
    tl.store(before_ptr + row * num_groups + group, tl.sum(total, 0))


@triton.jit
def count_kernel(
    records_ptr, said_ptr, slot_ptr, tokens_ptr, counts_ptr, V, num_tokens, tokens_stride, counts_stride,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a row's tokens to what its slot has said, where penalties look back on it."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    if (whole_setting(records_ptr, slot, USES) & PENALTIES) != 0:
        at = tl.arange(0, TOKENS)
        real = (at < num_tokens) & (at < tl.load(counts_ptr + row * counts_stride))
        token = tl.load(tokens_ptr + row * tokens_stride + at, mask=real, other=-1)
        tl.atomic_add(said_ptr + slot * V + token, tl.full([TOKENS], 2, tl.int32), mask=real & (token >= 0))
