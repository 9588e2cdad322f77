"""How the programs of `persistent_ws` merge partial results: as in `merge`, in Gluon."""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from slipstream.kernels.triton.attention.fp8_keys import column_of
from slipstream.kernels.triton.attention.tile import merge
from slipstream.kernels.triton.attention.work_list import number_at, of_request, of_requests
from slipstream.kernels.triton.gluon_compat import async_load, thread_barrier


@gluon.jit
def nothing(ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the result of no keys."""
    none = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    return none, gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT)), gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)


@gluon.jit
def store_result(
    best, total, acc, sums_ptr, partial_ptr, result, q_first, last_token, REPEATS: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a partial result in the workspace: its maximum, its sum and its values."""
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    real = q_first + row // REPEATS <= last_token
    gl.store(sums_ptr + result * (2 * ROWS) + row, best, mask=real)
    gl.store(sums_ptr + result * (2 * ROWS) + ROWS + row, total, mask=real)
    part_at = partial_ptr + result * (ROWS * WIDTH) + (row[:, None] * WIDTH + column[None, :])
    gl.store(part_at, acc, mask=real[:, None])


@gluon.jit
def hand_over(
    so_far, group, sums_ptr, partial_ptr, flag_ptr, result, q_first, last_token, REPEATS: gl.constexpr,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Leave what a request's groups came to so far, and its last group, for the program that has its other blocks."""
    store_result(so_far[0], so_far[1], so_far[2], sums_ptr, partial_ptr, result, q_first, last_token, REPEATS, ROWS,
                 WIDTH, LAYOUT)  # fmt: skip
    store_result(group[0], group[1], group[2], sums_ptr, partial_ptr, result + 1, q_first, last_token, REPEATS, ROWS,
                 WIDTH, LAYOUT)  # fmt: skip
    thread_barrier()
    gl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def load_left(
    left, counter_ptr, sums_ptr, partial_ptr, request, group, num_results, GROUPS: gl.constexpr, WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Ask for what another program has left of a request, its groups so far and its last group; wait if it must be.

    One warp. That program has a lower number, so it runs, and it waits for nobody before it leaves it. Rows without a
    query may be anything, and nobody stores what becomes of them.
    """
    cell = request.to(gl.int64) * GROUPS + group
    there = gl.atomic_cas(counter_ptr + cell, 1, 0, sem="acquire", scope="gpu")
    while there != 1:
        there = gl.atomic_cas(counter_ptr + cell, 1, 0, sem="acquire", scope="gpu")
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    sums_at = sums_ptr + cell * num_results * (2 * ROWS) + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    for i in gl.static_range(4):
        async_load(left[0].index(i), sums_at + i * ROWS)
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)), gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    part_at = partial_ptr + cell * num_results * (ROWS * WIDTH) + (row[:, None] * WIDTH + column[None, :])
    async_load(left[1].index(0), part_at)
    async_load(left[1].index(1), part_at + ROWS * WIDTH)
    async_copy.mbarrier_arrive(left[2], increment_count=False)


@gluon.jit
def take_over(left, LAYOUT: gl.constexpr):
    """Return what the producer has loaded: a request's groups so far, and its last group."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    mbarrier.wait(left[2], 0)
    best, total, acc = left[0].index(0).load(ROW), left[0].index(1).load(ROW), left[1].index(0).load(LAYOUT)
    group_best, group_total = left[0].index(2).load(ROW), left[0].index(3).load(ROW)
    return best, total, acc, group_best, group_total, left[1].index(1).load(LAYOUT)


@gluon.jit
def store_outputs(
    out_ptr, total, acc, group, q_first, last_token, HEADS: gl.constexpr, REPEATS: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, FP8: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a request's outputs; those of FP8 values have their columns in an order of their own."""
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    real = q_first + row // REPEATS <= last_token
    token = gl.minimum(q_first + row // REPEATS, last_token).to(gl.int64)
    head = group * REPEATS + row % REPEATS
    out = (acc / gl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    if FP8:
        column = column_of(column, WIDTH)
    gl.store(out_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :], out, mask=real[:, None])


@gluon.jit
def _stored(sums_at, part_at, place, count, real, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return a result as another program has stored it; from `count` on, that of no keys."""
    there = real & (place < count)
    best = gl.load(sums_at + place * (2 * ROWS), mask=there, other=float("-inf"), cache_modifier=".cg")
    total = gl.load(sums_at + place * (2 * ROWS) + ROWS, mask=there, other=0.0, cache_modifier=".cg")
    acc = gl.load(part_at + place * (ROWS * WIDTH), mask=there[:, None], other=0.0, cache_modifier=".cg")
    return best, total, acc


@gluon.jit
def _stored_four(sums_at, part_at, place, count, real, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return four results, all read at once."""
    one = _stored(sums_at, part_at, place, count, real, ROWS, WIDTH)
    two = _stored(sums_at, part_at, place + 1, count, real, ROWS, WIDTH)
    three = _stored(sums_at, part_at, place + 2, count, real, ROWS, WIDTH)
    four = _stored(sums_at, part_at, place + 3, count, real, ROWS, WIDTH)
    return one, two, three, four


@gluon.jit
def _merge_four(best, total, acc, four):
    """Merge four results that were read, in their order."""
    for i in gl.static_range(4):
        best, total, acc = merge(best, total, acc, four[i][0], four[i][1], four[i][2])
    return best, total, acc


@gluon.jit
def _finish_request(
    out_ptr, sums_ptr, partial_ptr, request, num_results, group, q_first, last_token, end,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, GROUP_KEYS: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Merge a request's results in their order, eight read at a time, and store its outputs.

    Merging with a result of no keys changes no bit, so the last ones read may be fewer.
    """
    REPEATS: gl.constexpr = HEADS // GROUPS
    LANES: gl.constexpr = WIDTH // 4
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)), gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    real = q_first + row // REPEATS <= last_token
    cell = group + request.to(gl.int64) * GROUPS
    sums_at = sums_ptr + cell * num_results * (2 * ROWS) + row
    part_at = partial_ptr + cell * num_results * (ROWS * WIDTH) + (row[:, None] * WIDTH + column[None, :])
    count = (end + GROUP_KEYS - 1) // GROUP_KEYS
    best, total, acc = nothing(ROWS, WIDTH, WIDE)
    for place in range(0, count, 8):
        four = _stored_four(sums_at, part_at, place, count, real, ROWS, WIDTH)
        later = _stored_four(sums_at, part_at, place + 4, count, real, ROWS, WIDTH)
        best, total, acc = _merge_four(best, total, acc, four)
        best, total, acc = _merge_four(best, total, acc, later)
    store_outputs(out_ptr, total, acc, group, q_first, last_token, HEADS, REPEATS, ROWS, WIDTH, FP8, WIDE)


@gluon.jit
def finish_requests(
    out_ptr, sums_ptr, partial_ptr, counter_ptr, work_ptr, counted, num_results, group,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, REQUESTS: gl.constexpr,
    GROUP_KEYS: gl.constexpr, FP8: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Count this part among those that are done with its requests, and finish the requests it is the last of."""
    from_request, to_request = counted
    holders_R = of_requests(work_ptr, 4, REQUESTS, LAYOUT)
    r = gl.arange(0, REQUESTS, LAYOUT)
    mine_R = (r >= from_request) & (r < to_request)
    thread_barrier()
    one_R = gl.full([REQUESTS], 1, gl.int32, LAYOUT)
    counters = counter_ptr + r * GROUPS + group
    before_R = gl.atomic_add(counters, one_R, mask=mine_R, sem="acq_rel", scope="gpu")
    others_R = gl.where(mine_R, holders_R - 1 - before_R, 1)  # numbers, which stay in registers as masks would not
    gl.store(counters, one_R - 1, mask=others_R == 0)
    for one in range(from_request, to_request):
        if number_at(others_R, one, REQUESTS) == 0:
            _finish_request(
                out_ptr, sums_ptr, partial_ptr, one, num_results, group, of_request(work_ptr, 0, one, REQUESTS),
                of_request(work_ptr, 1, one, REQUESTS), of_request(work_ptr, 2, one, REQUESTS), HEADS, GROUPS, WIDTH,
                ROWS, GROUP_KEYS, FP8,
            )  # fmt: skip
