"""Programs whose keys are asked for take every block of every request once, in order, and never wait for each other.

Gluon has no interpreter, so the functions that lay out a program's walk run here over numpy's numbers.
"""

import types

import numpy as np
import pytest

pytest.importorskip("triton")

from slipstream.kernels.triton.attention import work_list

BLOCK, IN_GROUP, REQUESTS = 64, 4, 64


class Numbers(np.ndarray):
    def to(self, _):
        return self.astype(np.int64)


class Memory:
    """Numbers, and a place among them."""

    def __init__(self, cells, at=0):
        self.cells, self.at = cells, at

    def __add__(self, offset):
        return Memory(self.cells, self.at + offset)


def store(place, values):
    place.cells[place.at] = values


def numbers(values):
    return np.asarray(values).view(Numbers)


GLUON = types.SimpleNamespace(
    int32=None,
    int64=None,
    full=lambda shape, value, *_: numbers(np.full(shape, value)),
    load=lambda place, mask=True, other=0, **_: numbers(
        np.where(mask, place.cells[np.where(mask, place.at, 0)], other)
    ),
    store=store,
    static_range=range,
    SliceLayout=lambda *_: None,
    arange=lambda first, end, _: numbers(np.arange(first, end)),
    where=lambda condition, yes, no: numbers(np.where(condition, yes, no)),
    minimum=lambda a, b: numbers(np.minimum(a, b)),
    maximum=lambda a, b: numbers(np.maximum(a, b)),
    sum=lambda values, axis: numbers(np.sum(values, axis)),
    max=lambda values, axis: numbers(np.max(values, axis)),
    associative_scan=lambda values, axis, _: numbers(np.cumsum(values, axis)),
    convert_layout=lambda values, _: values,
    BlockedLayout=lambda *_: None,
)


SIZES = {"_REQUEST": work_list.OF_REQUEST, "_PART": work_list.OF_PART, "_NUMBERS": 16, "_PAGES": 32}


def plain(name, **others):
    function = getattr(work_list, name).fn
    return types.FunctionType(function.__code__, {"gl": GLUON, "_add": None, **SIZES, **others}, name)


def number_at(values, request, count):
    return numbers(np.where(np.arange(count) == request, values, 0).sum())


DESCRIBED, DESCRIBED_AT = plain("described"), plain("described_at", number_at=number_at)
PAGES_OF, LAID_OUT, LAID_OUT_PAGES = plain("pages_of"), plain("laid_out"), plain("laid_out_pages")
OF_REQUESTS = plain("of_requests")
WALK_OF, NEXT_OF, STOP_OF = plain("walk_of", number_at=number_at), plain("next_of"), plain("stop_of")


def walked(ends, part, parts):
    """Return whether requests are cut at blocks, and a part's steps: block, what becomes of it, what is waited for."""
    padded = numbers([*ends, *[0] * (REQUESTS - len(ends))])
    request, start, count, walk, counted = WALK_OF(padded, len(ends), part, parts, REQUESTS, BLOCK, IN_GROUP, 1, None)
    request, start, steps = int(request), int(start), []
    for step in range(int(count)):
        here, then, waits = (request, start), "", None
        start += BLOCK
        if start >= STOP_OF(walk, request, ends[request]):
            then = "left" if request == walk[1] else "whole"
            request, start, late = (int(value) for value in NEXT_OF(walk, request, len(ends)))
            waits = request if late and step + 1 < count else None
        steps.append((here, then, waits))
    return bool(walk[0]), steps, counted


def blocks(request, end):
    return [(request, block * BLOCK) for block in range(max(-(-end // BLOCK), 1))]


def finished(parts):
    """Run parts side by side, a block at a time; return what is finished, in the order it was taken, and the waits."""
    left, outs, stalls = {}, [], 0
    taken, waits, at = [[] for _ in parts], [None for _ in parts], [0 for _ in parts]
    while any(at[p] < len(steps) for p, steps in enumerate(parts)):
        leaves = {}
        for p, steps in enumerate(parts):
            if at[p] == len(steps):
                continue
            if waits[p] is not None and waits[p] not in left:
                stalls += 1
                assert stalls < 1000, "parts wait for each other"
                continue
            if waits[p] is not None:
                taken[p] = left.pop(waits[p])
            block, then, waits[p] = steps[at[p]]
            at[p] += 1
            taken[p].append(block)
            if then == "left":
                leaves[block[0]], taken[p] = taken[p], []
            elif then == "whole":
                outs.append(taken[p])
                taken[p] = []
        left |= leaves
    assert not left, "what is left for another is taken"
    return outs, stalls


@pytest.mark.parametrize("seed", range(60))
def test_every_block_is_taken_once_and_in_order(seed):
    random = np.random.default_rng(seed)
    count, parts = int(random.integers(1, 65)), int(random.choice([1, 2, 5, 16, 33, 49]))
    kinds = (
        random.integers(0, 400, count),
        random.choice([0, 1, 63, 64, 65, 255, 256, 257, 1216, 5000], count),
        (random.integers(1, 3000) * random.uniform(0.6, 1.3, count)).astype(np.int64),
    )
    for ends in (kind.tolist() for kind in kinds):
        work = [walked(ends, part, parts) for part in range(parts)]
        steps = [part for _, part, _ in work]
        every = [block for request, end in enumerate(ends) for block in blocks(request, end)]
        assert sorted(block for part in steps for block, _, _ in part) == every
        if work[0][0]:
            outs, stalls = finished(steps)
            assert sorted(outs) == [blocks(request, end) for request, end in enumerate(ends)]
            assert not stalls
        else:
            holders = [{block[0] for block, _, _ in part} for part in steps]
            shared = [sum(request in part for part in holders) for request in range(len(ends))]
            assert shared == work[0][2][2][: len(ends)].tolist()


@pytest.mark.parametrize(("keys", "parts"), [(1216, 16), (1216, 33), (10240, 33)])
def test_requests_alike_are_cut_at_blocks(keys, parts):
    work = [walked([keys] * 40, part, parts) for part in range(parts)]
    counts = [len(part) for _, part, _ in work]
    assert work[0][0] and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_laid_out_for_a_pass_is_what_a_program_would_find_out(seed):
    random = np.random.default_rng(seed)
    count, parts, queries, page = int(random.integers(1, 65)), int(random.choice([1, 16, 33])), 4, 16
    ends = random.choice([4, 63, 64, 65, 257, 1216, 5000], count) + random.integers(0, 30, count)
    shorter = random.integers(1, queries + 1, count)
    starts = np.concatenate([[0], np.cumsum(shorter)])
    index = np.concatenate([np.arange(end - own, end) for end, own in zip(ends, shorter, strict=True)])
    table = random.integers(0, 10000, (count, 400))
    memories = [Memory(numbers(values)) for values in (starts, ends, table.reshape(-1), index)]
    work = Memory(np.full(SIZES["_REQUEST"] * REQUESTS + SIZES["_PART"] * parts, -77))
    expected_R = DESCRIBED(memories[0], memories[1], memories[3], count, 4, REQUESTS, queries, None)
    for part in range(parts):
        program = types.SimpleNamespace(
            **vars(GLUON), program_id=lambda _, part=part: part, num_programs=lambda _: parts
        )
        lay_out = plain(
            "work_list_kernel", described=DESCRIBED, described_at=DESCRIBED_AT, walk_of=WALK_OF, pages_of=PAGES_OF
        )
        lay_out.__globals__["gl"] = program
        lay_out(work, *memories, count, 400, 4, REQUESTS, queries, BLOCK, page, IN_GROUP, False)
    assert not (work.cells == -77).any()
    for part in range(parts):
        wanted = WALK_OF(expected_R[2], count, part, parts, REQUESTS, BLOCK, IN_GROUP, 1, None)
        request, start, num_blocks, walk, counted, first = LAID_OUT(work, part, REQUESTS)
        assert (request, start, num_blocks) == wanted[:3] and list(walk) == list(wanted[3])
        assert counted == wanted[4][:2] and list(first) == [int(row[int(request)]) for row in expected_R]
        pages = PAGES_OF(memories[2], request, 400, start // page, first[2], np.arange(32), page)
        assert (LAID_OUT_PAGES(work, part, np.arange(32), REQUESTS) == pages).all()
        for which, row in enumerate((*expected_R, wanted[4][2])):
            assert (OF_REQUESTS(work, which, REQUESTS, None) == row).all()
