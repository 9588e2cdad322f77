"""Where truncation cuts a row, by one program: the best k through their cells, and passes over the whole row.

The best k lie in cells whose highest logit is among the k best of all cells', so few tokens are looked at. What the
cells do not settle (a k beyond KEPT, thousands of equal logits) takes passes over the row, about fifty of them.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.sampling_tokens import (
    NO_ENTRY,
    NO_TOKEN,
    NOTHING,
    draw_best,
    entry_of,
    exact_noise,
    key_of,
    least_above,
    logit_of,
    no_entry,
    order_of,
    weight,
)
from slipstream.kernels.triton.sampling_vocabulary import row_logits


@triton.jit
def find_best(
    logits_ptr, processed_ptr, cells_ptr, list_ptr, kept_ptr, row, k, V, stride, num_cells, changed,
    CELLS: tl.constexpr, CELL: tl.constexpr, TOGETHER: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write the orders of a row's tokens from the k-th highest cell on to `kept_ptr`; return how many there are.

    The best k are among them. If there are more than KEPT, only so many were written.
    """
    cell = tl.arange(0, CELLS)
    highest = key_of(tl.load(cells_ptr + row * num_cells + cell, mask=cell < num_cells, other=float("-inf")))
    low, high = tl.full([], NOTHING + 1, tl.int64), tl.max(highest, 0).to(tl.int64)
    while low < high:  # the largest key that k cells reach; if fewer have a token, the smallest
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
        if tl.sum((highest >= middle.to(tl.int32)).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle - 1
    bar = low.to(tl.int32)
    listed = highest >= bar
    num_listed = tl.sum(listed.to(tl.int32), 0)
    tl.store(list_ptr + row * CELLS + tl.cumsum(listed.to(tl.int32), 0) - 1, cell, mask=listed)
    tl.debug_barrier()
    found = tl.full([], 0, tl.int32)
    for first in range(0, num_listed, TOGETHER):
        at = first + tl.arange(0, TOGETHER)
        cells = tl.load(list_ptr + row * CELLS + at, mask=at < num_listed, other=NO_ENTRY // CELL)
        entry = tl.reshape(cells[:, None] * CELL + tl.arange(0, CELL)[None, :], [TOGETHER * CELL])
        logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
        wanted = (entry < V) & (key_of(logits) >= bar)
        place = found + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(kept_ptr + row * KEPT + place, order_of(logits, entry), mask=wanted & (place < KEPT))
        found += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def found_orders(kept_ptr, row, found, KEPT: tl.constexpr):
    """Return the orders of found tokens, NO_TOKEN past the last."""
    at = tl.arange(0, KEPT)
    return tl.load(kept_ptr + row * KEPT + at, mask=at < found, other=NO_TOKEN)


@triton.jit
def draw_found(kept_ptr, row, found, k, temperature, top_p, min_p, position, seed, KEPT: tl.constexpr):
    """Return the token drawn from the best k of found tokens that top-p and min-p keep."""
    order = found_orders(kept_ptr, row, found, KEPT)
    logits, entry = logit_of((order >> 32).to(tl.int32)), entry_of(order)
    low, high = tl.full([], NO_TOKEN + 1, tl.int64), tl.max(order, 0)
    if found > k:
        low = tl.min(tl.where(order > NO_TOKEN, order, 9223372036854775807), 0)
        while low < high:  # the k-th best
            middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
            if tl.sum((order >= middle).to(tl.int32), 0) >= k:
                low = middle
            else:
                high = middle - 1
    weights = tl.where(order >= low, weight(logits, tl.max(logits, 0), temperature), 0)
    bar = least_above(top_p * tl.sum(weights, 0).to(tl.float64))
    bar = tl.where(top_p < 1, bar, 9223372036854775807)
    kept = (order >= low) & (weights >= least_above(min_p * 2147483648.0))
    score = tl.div_rn(logits, tl.zeros_like(logits) + temperature) + exact_noise(entry, position, seed)
    token, before = no_entry(), bar
    while before >= bar:  # see `first_in_nucleus`
        score = tl.where(kept, score, float("-inf"))
        token = tl.min(tl.where(kept & (score == tl.max(score, 0)), entry, NO_ENTRY), 0)
        own = tl.max(tl.where(entry == token, order, NO_TOKEN), 0)
        before = tl.sum(tl.where(order > own, weights, 0), 0)
        kept = kept & (order > own)
    return token


@triton.jit
def last_of_best(logits_ptr, processed_ptr, row, k, highest, V, stride, changed, BLOCK: tl.constexpr):
    """Return the order of a row's k-th best token, or one that every token reaches."""
    low, high = tl.full([], NO_TOKEN + 1, tl.int64), order_of(highest, 0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
        total = tl.zeros([BLOCK], tl.int32)
        for first in range(0, V, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
            total += (order_of(logits, entry) >= middle).to(tl.int32)
        if tl.sum(total, 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def weight_before(logits_ptr, processed_ptr, row, bound, highest, temperature, V, stride, changed, BLOCK: tl.constexpr):
    """Return the sum of weights of the tokens before a bound in the order."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, V, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
        total += tl.where(order_of(logits, entry) > bound, weight(logits, highest, temperature), 0)
    return tl.sum(total, 0)


@triton.jit
def draw_before(
    logits_ptr, processed_ptr, row, bound, highest, temperature, least, position, seed, best, V, stride, changed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token drawn from those before a bound in the order, of at least this weight.

    `best` is a score that is sure to be exceeded.
    """
    at = no_entry()
    for first in range(0, V, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        logits = row_logits(logits_ptr, processed_ptr, row, entry, V, stride, changed)
        kept = (order_of(logits, entry) > bound) & (weight(logits, highest, temperature) >= least)
        logits = tl.where(kept, logits, float("-inf"))
        best, at = draw_best(logits, first, temperature, position, seed, best, at, BLOCK)
    return at
