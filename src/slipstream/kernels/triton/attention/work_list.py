"""Which keys a program of `slipstream.kernels.triton.attention.persistent_ws` attends to, and in which order.

Where no request has more blocks of keys than a program takes, all requests' blocks are cut evenly. A
request then lies in one program or in two. Who has its first blocks takes them before all else, and leaves how far it
came; who has the others takes them last, and goes on from there: a program has at least as many blocks as the request,
so the first ones are done by then, and the order of sums is as if nothing were cut. Else groups of splits are cut as in
`even_kernel`.

All layers of a pass have the same work, so `work_list_kernel` lays it out once, and programs read what it wrote before
the PDL wait.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OF_REQUEST = 5
"""Numbers of a request: what `described` says, and how many parts share it."""
OF_PART = 48
"""Numbers of a part: what `walk_of` says (12), its first request as `described` (4), and that one's next pages (32)."""
_REQUEST, _PART, _NUMBERS, _PAGES = gl.constexpr(OF_REQUEST), gl.constexpr(OF_PART), gl.constexpr(16), gl.constexpr(32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def number_at(values_R, request, REQUESTS: gl.constexpr):
    """Return one request's number."""
    return gl.sum(gl.where(gl.arange(0, REQUESTS, values_R.type.layout) == request, values_R, 0), 0)


@gluon.jit
def described(
    starts_ptr, lens_ptr, index_ptr, num_requests, TOKENS: gl.constexpr, REQUESTS: gl.constexpr,
    QUERIES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return each request's first and last query, the end of its keys, and the key from which on one may be hidden.

    Read past the nearest cache, since a kernel that has not waited may find old lines there. See `even`: a
    request without queries ends at 0.
    """
    r = gl.arange(0, REQUESTS, LAYOUT)
    there = r < num_requests
    first = gl.load(starts_ptr + r, mask=there, other=0, cache_modifier=".cg")
    to = gl.load(starts_ptr + r + 1, mask=there, other=0, cache_modifier=".cg")
    lens = gl.load(lens_ptr + r, mask=there, other=0, cache_modifier=".cg")
    last = gl.minimum(first + TOKENS, to) - 1
    highest, lowest = gl.full([REQUESTS], -1, gl.int32, LAYOUT), gl.full([REQUESTS], 2147483647, gl.int32, LAYOUT)
    for query in gl.static_range(QUERIES):
        token = gl.maximum(gl.minimum(first + query, last), 0)
        own = gl.load(index_ptr + token, mask=there, other=0, cache_modifier=".cg").to(gl.int32)
        highest, lowest = gl.maximum(highest, own), gl.minimum(lowest, own)
    end = gl.where(first < to, gl.minimum(lens, highest + 1), 0)
    return first, last, end, gl.minimum(lowest - 63, end)


@gluon.jit
def described_at(described_R, request, REQUESTS: gl.constexpr):
    """Return what `described` says of one request."""
    first, last = number_at(described_R[0], request, REQUESTS), number_at(described_R[1], request, REQUESTS)
    end, sure = number_at(described_R[2], request, REQUESTS), number_at(described_R[3], request, REQUESTS)
    return first, last, end, sure


@gluon.jit
def walk_of(
    ends_R, num_requests, part, most_parts, REQUESTS: gl.constexpr, BLOCK: gl.constexpr, IN_GROUP: gl.constexpr,
    NUM_WARPS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return a part's first request and key, its number of blocks, and what else there is to know of its walk.

    The walk: whether requests are cut at blocks (`chained`); the request whose first blocks alone are the part's, and
    the key they end at; the requests that are the part's own, and the one whose other blocks it has, or -1, and the key
    they begin at. Then, for who counts: the part's requests, and how many parts share each request.
    """
    r = gl.arange(0, REQUESTS, LAYOUT)
    blocks_R = gl.where(r < num_requests, gl.maximum((ends_R + BLOCK - 1) // BLOCK, 1), 0)
    num_blocks = gl.sum(blocks_R, 0)
    chained = gl.max(blocks_R, 0) * gl.minimum(most_parts, num_blocks) <= num_blocks
    per = gl.where(chained, 1, IN_GROUP)
    units_R = (blocks_R + per - 1) // per
    flat_R = gl.convert_layout(units_R, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    until_R = gl.convert_layout(gl.associative_scan(flat_R, 0, _add), LAYOUT)
    before_R = until_R - units_R
    num_units = gl.sum(units_R, 0)
    # Part p's units begin at p * num_units // num_parts, and none is empty.
    num_parts = gl.minimum(most_parts, num_units)
    from_unit, to_unit = part * num_units // num_parts, (part + 1) * num_units // num_parts
    first_R = gl.maximum(from_unit - before_R, 0)
    last_R = gl.minimum(gl.minimum(to_unit - before_R, units_R) * per, blocks_R)
    num_blocks = gl.where(part < num_parts, gl.sum(gl.maximum(last_R - first_R * per, 0), 0), 0)
    from_request = gl.sum((until_R <= from_unit).to(gl.int32), 0)
    to_request = gl.sum(((before_R < to_unit) & (r < num_requests)).to(gl.int32), 0)
    # The last part that begins at unit u or before it is ((u + 1) * num_parts - 1) // num_units.
    holders_R = (until_R * num_parts - 1) // num_units - ((before_R + 1) * num_parts - 1) // num_units + 1
    late_start = (from_unit - number_at(before_R, from_request, REQUESTS)) * (per * BLOCK)
    is_late = chained & (late_start > 0)
    is_early = chained & (number_at(until_R, to_request - 1, REQUESTS) > to_unit)
    early_stop = (to_unit - number_at(before_R, to_request - 1, REQUESTS)) * BLOCK
    first_own, to_own = from_request + is_late.to(gl.int32), to_request - is_early.to(gl.int32)
    early, late = gl.where(is_early, to_request - 1, -1), gl.where(is_late, from_request, -1)
    request = gl.minimum(gl.where(is_early, early, first_own), num_requests - 1)
    walk = (chained, early, early_stop, first_own, to_own, late, late_start)
    return request, gl.where(chained, 0, late_start), num_blocks, walk, (from_request, to_request, holders_R)


@gluon.jit
def next_of(walk, request, num_requests):
    """Return the request after this one and its first key, and whether it is the one whose other blocks come last."""
    following = gl.where(request == walk[1], walk[3], request + 1)
    is_late = (walk[5] >= 0) & (request != walk[5]) & (following >= walk[4])
    request = gl.where(is_late, walk[5], gl.minimum(following, num_requests - 1))
    return request, gl.where(is_late, walk[6], 0), is_late


@gluon.jit
def stop_of(walk, request, end):
    """Return the key that a request's blocks in this part end at."""
    return gl.where(request == walk[1], walk[2], end)


@gluon.jit
def pages_of(pages_ptr, request, pages_stride, first_page, end, lane, PAGE: gl.constexpr):
    """Return a warp's worth of pages from a request's first_page on; past its end, that of the last key."""
    place = gl.minimum(first_page + lane, (gl.maximum(end, 1) - 1) // PAGE)
    return gl.load(pages_ptr + request.to(gl.int64) * pages_stride + place, cache_modifier=".cg")


@gluon.jit(
    do_not_specialize=["num_requests", "pages_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "lens_ptr", "pages_ptr", "index_ptr"],
)
def work_list_kernel(
    work_ptr, starts_ptr, lens_ptr, pages_ptr, index_ptr, num_requests, pages_stride,
    TOKENS: gl.constexpr, REQUESTS: gl.constexpr, QUERIES: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr,
    IN_GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Lay out the walk of one part, and the first program what all parts know of the requests; one warp.

    Whoever reads it before a wait of its own must come two kernels later: see `AttentionLaunch`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part, most_parts = gl.program_id(0), gl.num_programs(0)
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
    described_R = described(starts_ptr, lens_ptr, index_ptr, num_requests, TOKENS, REQUESTS, QUERIES, LAYOUT)
    request, start, num_blocks, walk, counted = walk_of(
        described_R[2], num_requests, part, most_parts, REQUESTS, BLOCK, IN_GROUP, 1, LAYOUT
    )
    first, last, end, sure = described_at(described_R, request, REQUESTS)
    numbers = (
        request, start, num_blocks, walk[0].to(gl.int32), walk[1], walk[2], walk[3], walk[4], walk[5], walk[6],
        counted[0], counted[1], first, last, end, sure,
    )  # fmt: skip
    at = work_ptr + _REQUEST * REQUESTS + part * _PART
    for i in gl.static_range(_NUMBERS):
        gl.store(at + i, numbers[i])
    lane = gl.arange(0, _PAGES, LAYOUT)
    gl.store(at + _NUMBERS + lane, pages_of(pages_ptr, request, pages_stride, start // PAGE, end, lane, PAGE))
    if part == 0:
        known = (described_R[0], described_R[1], described_R[2], described_R[3], counted[2])
        for i in gl.static_range(_REQUEST):
            gl.store(work_ptr + i * REQUESTS + gl.arange(0, REQUESTS, LAYOUT), known[i])


@gluon.jit
def laid_out(work_ptr, part, REQUESTS: gl.constexpr):
    """Return a part's numbers: what `walk_of` does, and of its first request what `described` does.

    Read as memory that may change, here and below: past the nearest cache, and all at once. The assembler would move
    other reads behind the branch around a part of no blocks, one trip after that of their number.
    """
    at = work_ptr + _REQUEST * REQUESTS + part * _PART
    n = ()
    for i in gl.static_range(_NUMBERS):
        n += (gl.load(at + i, volatile=True),)
    walk = (n[3] != 0, n[4], n[5], n[6], n[7], n[8], n[9])
    return n[0], n[1], n[2], walk, (n[10], n[11]), (n[12], n[13], n[14], n[15])


@gluon.jit
def laid_out_pages(work_ptr, part, lane, REQUESTS: gl.constexpr):
    """Return the pages from a part's first key on, as `pages_of` does."""
    return gl.load(work_ptr + _REQUEST * REQUESTS + part * _PART + _NUMBERS + lane, volatile=True)


@gluon.jit
def of_requests(work_ptr, WHICH: gl.constexpr, REQUESTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a number of each request: its first or last query, its end, what may be hidden, or who shares it."""
    return gl.load(work_ptr + WHICH * REQUESTS + gl.arange(0, REQUESTS, LAYOUT), volatile=True)


@gluon.jit
def of_request(work_ptr, WHICH: gl.constexpr, request, REQUESTS: gl.constexpr):
    """Return such a number of one request."""
    return gl.load(work_ptr + WHICH * REQUESTS + request, volatile=True)


@gluon.jit
def all_described(work_ptr, REQUESTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return what `described` does, of all requests."""
    first_R, last_R = of_requests(work_ptr, 0, REQUESTS, LAYOUT), of_requests(work_ptr, 1, REQUESTS, LAYOUT)
    return first_R, last_R, of_requests(work_ptr, 2, REQUESTS, LAYOUT), of_requests(work_ptr, 3, REQUESTS, LAYOUT)
