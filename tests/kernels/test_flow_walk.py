"""Programs whose keys are asked for take every block of every request once, in order, and never wait for each other.

Gluon has no interpreter, so the functions that lay out a program's walk run here over numpy's numbers.
"""

import types

import numpy as np
import pytest

pytest.importorskip("triton")

from slipstream.kernels.triton import attention_flow_walk

BLOCK, IN_GROUP, REQUESTS = 64, 4, 64


class Numbers(np.ndarray):
    def to(self, _):
        return self.astype(np.int64)


def numbers(values):
    return np.asarray(values).view(Numbers)


GLUON = types.SimpleNamespace(
    int32=None,
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


def plain(name, **others):
    function = getattr(attention_flow_walk, name).fn
    return types.FunctionType(function.__code__, {"gl": GLUON, "_add": None, **others}, name)


def number_at(values, request, count):
    return numbers(np.where(np.arange(count) == request, values, 0).sum())


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
        walks = [walked(ends, part, parts) for part in range(parts)]
        steps = [part for _, part, _ in walks]
        every = [block for request, end in enumerate(ends) for block in blocks(request, end)]
        assert sorted(block for part in steps for block, _, _ in part) == every
        if walks[0][0]:
            outs, stalls = finished(steps)
            assert sorted(outs) == [blocks(request, end) for request, end in enumerate(ends)]
            assert not stalls
        else:
            holders = [{block[0] for block, _, _ in part} for part in steps]
            shared = [sum(request in part for part in holders) for request in range(len(ends))]
            assert shared == walks[0][2][2][: len(ends)].tolist()


@pytest.mark.parametrize(("keys", "parts"), [(1216, 16), (1216, 33), (10240, 33)])
def test_requests_alike_are_cut_at_blocks(keys, parts):
    walks = [walked([keys] * 40, part, parts) for part in range(parts)]
    counts = [len(part) for _, part, _ in walks]
    assert walks[0][0] and max(counts) - min(counts) <= 1
