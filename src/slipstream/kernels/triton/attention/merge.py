"""How the last program of a tile merges what several have stored of a request's keys: in order, a few read at a time.

A read from another processor takes as long as merging many results, so as many loads are in flight as registers hold.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.attention.tile import merge, nothing
from slipstream.kernels.triton.launch import keep_order


@triton.jit
def _stored(sums_at, part_at, place, first, count, real, STRIDE: tl.constexpr, D: tl.constexpr):
    """Return a result as another program has stored it, STRIDE rows of it; outside first..count, that of no keys."""
    is_there = real & (place >= first) & (place < count)
    best = tl.load(sums_at + place * (2 * STRIDE), mask=is_there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums_at + place * (2 * STRIDE) + STRIDE, mask=is_there, other=0.0, cache_modifier=".cg")
    acc = tl.load(part_at + place * (STRIDE * D), mask=is_there[:, None], other=0.0, cache_modifier=".cg")
    return best, total, acc


@triton.jit
def stored_four(sums_at, part_at, place, first, count, real, STRIDE: tl.constexpr, D: tl.constexpr):
    """Return four results, all read at once."""
    best_0, total_0, acc_0 = _stored(sums_at, part_at, place, first, count, real, STRIDE, D)
    best_1, total_1, acc_1 = _stored(sums_at, part_at, place + 1, first, count, real, STRIDE, D)
    best_2, total_2, acc_2 = _stored(sums_at, part_at, place + 2, first, count, real, STRIDE, D)
    best_3, total_3, acc_3 = _stored(sums_at, part_at, place + 3, first, count, real, STRIDE, D)
    return (best_0, total_0, acc_0), (best_1, total_1, acc_1), (best_2, total_2, acc_2), (best_3, total_3, acc_3)


@triton.jit
def _merge_read(best, total, acc, four):
    """Merge four results that were read, in their order."""
    best, total, acc = merge(best, total, acc, four[0][0], four[0][1], four[0][2])
    best, total, acc = merge(best, total, acc, four[1][0], four[1][1], four[1][2])
    best, total, acc = merge(best, total, acc, four[2][0], four[2][1], four[2][2])
    return merge(best, total, acc, four[3][0], four[3][1], four[3][2])


@triton.jit
def _merge_four(best, total, acc, sums_at, part_at, place, first, count, real, ROWS: tl.constexpr, D: tl.constexpr):
    """Merge four stored results in their order, all read at once where registers allow it."""
    if ROWS > 16:
        for other in range(place, place + 4):
            best_0, total_0, acc_0 = _stored(sums_at, part_at, other, first, count, real, ROWS, D)
            best, total, acc = merge(best, total, acc, best_0, total_0, acc_0)
    else:
        four = stored_four(sums_at, part_at, place, first, count, real, ROWS, D)
        best, total, acc = _merge_read(best, total, acc, four)
    return best, total, acc


@triton.jit
def merge_stored(
    sums_at, part_at, first_split, last_split, real,
    ROWS: tl.constexpr, D: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return sums [ROWS] and values [ROWS, D] of all results, of groups (WHOLE) or of splits, merged in their order.

    Places count from the first's group on.
    """
    best, total, acc = nothing(ROWS, D)
    first_group, end_group = first_split // IN_GROUP, tl.cdiv(last_split, IN_GROUP)
    if WHOLE:
        for place in range(0, end_group - first_group, 4):
            best, total, acc = _merge_four(
                best, total, acc, sums_at, part_at, place, 0, end_group - first_group, real, ROWS, D
            )
    else:
        before = first_group * IN_GROUP
        for place in range(0, last_split - before, IN_GROUP):
            group_best, group_total, group_acc = nothing(ROWS, D)
            group_best, group_total, group_acc = _merge_four(
                group_best, group_total, group_acc, sums_at, part_at, place, first_split - before,
                last_split - before, real, ROWS, D,
            )  # fmt: skip
            best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
    return total, acc


@triton.jit
def merge_group(best, total, acc, four, ROWS: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Merge four results that were read: groups one after another (WHOLE), or splits among themselves first."""
    if WHOLE:
        best, total, acc = _merge_read(best, total, acc, four)
    else:
        group_best, group_total, group_acc = nothing(ROWS, D)
        group_best, group_total, group_acc = _merge_read(group_best, group_total, group_acc, four)
        best, total, acc = merge(best, total, acc, group_best, group_total, group_acc)
    return best, total, acc


@triton.jit
def merge_sixteens(
    best, total, acc, sums_at, part_at, first, count, real,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the results from `first` to `count` in their order, sixteen read at a time.

    Merging with a result of no keys changes no bit, so the last sixteen may be fewer.
    """
    for place in range(0, count, 16):
        four_0 = stored_four(sums_at, part_at, place, first, count, real, STRIDE, D)
        four_1 = stored_four(sums_at, part_at, place + 4, first, count, real, STRIDE, D)
        four_2 = stored_four(sums_at, part_at, place + 8, first, count, real, STRIDE, D)
        four_3 = stored_four(sums_at, part_at, place + 12, first, count, real, STRIDE, D)
        keep_order(PDL)  # or the assembler issues some of these loads only after others are merged
        best, total, acc = merge_group(best, total, acc, four_0, ROWS, D, WHOLE)
        best, total, acc = merge_group(best, total, acc, four_1, ROWS, D, WHOLE)
        best, total, acc = merge_group(best, total, acc, four_2, ROWS, D, WHOLE)
        best, total, acc = merge_group(best, total, acc, four_3, ROWS, D, WHOLE)
    return best, total, acc


@triton.jit
def merge_compact(
    sums_at, part_at, first_split, last_split, real,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Return what `merge_stored` does, of the first ROWS rows of results that have STRIDE, sixteen read at a time."""
    best, total, acc = nothing(ROWS, D)
    first_group = first_split // IN_GROUP
    first, count = 0, tl.cdiv(last_split, IN_GROUP) - first_group
    if not WHOLE:
        first, count = first_split - first_group * IN_GROUP, last_split - first_group * IN_GROUP
    _, total, acc = merge_sixteens(best, total, acc, sums_at, part_at, first, count, real, ROWS, STRIDE, D, WHOLE, PDL)
    return total, acc


@triton.jit
def merge_streamed(sums_at, part_at, count, real, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """Return sums [ROWS] and values [ROWS, D] of the first `count` stored results of groups, merged in their order.

    They pass through shared memory, STAGES - 1 of them in flight.
    """
    best, total, acc = nothing(ROWS, D)
    for place in tl.range(0, count, num_stages=STAGES):
        best_s, total_s, acc_s = _stored(sums_at, part_at, place, 0, count, real, ROWS, D)
        best, total, acc = merge(best, total, acc, best_s, total_s, acc_s)
    return total, acc
