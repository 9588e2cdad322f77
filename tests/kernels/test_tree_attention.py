"""Attention of a tree's nodes reads the keys before the tree once, and gives each node the bits of plain decoding."""

import dataclasses
import functools

import pytest
import torch

from interpreted import DEVICE
from slipstream.kernels import AttentionBatch, KvLayer, TreePaths
from slipstream.kernels.reference.kv_fp8 import FP8
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.attention.tree import TreeLayout
from slipstream.kernels.triton.tuning import AttentionConfig, architecture_of, read_tuning

PAGE, PAGES, GROUPS, WIDTH = 8, 30, 2, 16
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 0]
CONFIG = AttentionConfig(split=16, block=16, rows_wide=16, num_warps=4)
LAYOUTS = {
    "splits": dataclasses.replace(CONFIG, split=32),
    "groups": dataclasses.replace(CONFIG, programs=20),
    "one program": dataclasses.replace(CONFIG, programs=1),
}
CASES = {
    "first key": ([0, 90], torch.bfloat16, 4),
    "ends of groups": ([63, 64], torch.float32, 2),
    "three heads": ([31, 15, 9], torch.float32, 6),
}


def randn(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def sample(roots, dtype, heads):
    """Return queries, a cache and the batch of a tree at each root: paths as requests would have them, slot by slot."""
    num_requests, num_nodes = len(roots), len(PARENTS)
    paths = [[]]
    for node, parent in enumerate(PARENTS[1:], start=1):
        paths.append([*paths[parent], node])
    depth = max(map(len, paths))
    generator = torch.Generator().manual_seed(0)
    each = PAGES // num_requests
    pages_RP = torch.randperm(PAGES, generator=generator)[: num_requests * each].view(num_requests, each).int()

    def slot(request, index):
        return int(pages_RP[request, index // PAGE]) * PAGE + index % PAGE

    slots, positions = [], []
    for request, root in enumerate(roots):
        for path in paths:
            own = [slot(request, root + node) for node in path]
            slots.append(own + [own[-1] if own else slot(request, root)] * (depth - len(own)))
            positions.append(root + len(path))
    layer = KvLayer(*(randn(PAGES * PAGE, GROUPS, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)))
    batch = AttentionBatch(
        query_starts_R1=torch.arange(num_requests + 1, dtype=torch.int32, device=DEVICE) * num_nodes,
        kv_lens_R=torch.tensor([root + depth + 1 for root in roots], dtype=torch.int32, device=DEVICE),
        page_table_RP=pages_RP.to(DEVICE),
        kv_index_T=torch.tensor(positions, device=DEVICE),
        ancestors_T=torch.full((len(positions),), -1, device=DEVICE),
        page_size=PAGE,
        max_queries=num_nodes,
        max_keys=each * PAGE,
        tree=TreePaths(
            torch.tensor(roots, dtype=torch.int32, device=DEVICE), torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        ),
    )
    return randn(len(positions), heads, WIDTH, dtype=dtype, seed=3), layer, batch


def attended(q, layer, batch, config):
    """Return outputs and maxima."""
    launch = AttentionLaunch(config, torch.zeros(4096, dtype=torch.int32, device=DEVICE), dependent=False)
    maxima = torch.zeros(q.shape[:2], device=DEVICE)
    return attention(q, layer, batch, 0.25, None, launch, maxima), maxima


@functools.cache
def alone(case, split):
    """Return what nodes have as requests of their own."""
    q, layer, batch = sample(*CASES[case])
    return attended(q, layer, batch.by_node, dataclasses.replace(CONFIG, split=split))


EACH_ONCE = set(zip(CASES, LAYOUTS, strict=False))
"""Of cases and layouts of results: what is always tested; the other pairs take a minute."""


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=[] if (case, layout) in EACH_ONCE else pytest.mark.long)
        for case in CASES
        for layout in LAYOUTS
    ],
)
def test_nodes_have_the_bits_they_have_as_requests_of_their_own(case, layout):
    config = LAYOUTS[layout]
    out, maxima = attended(*sample(*CASES[case]), config)
    expected, expected_maxima = alone(case, config.split)
    assert torch.equal(out, expected)
    assert torch.equal(maxima, expected_maxima)


def test_keys_in_fp8_are_read_with_their_scales():
    q, layer, batch = sample([40, 33], torch.bfloat16, 4)
    codes = (layer.keys_SGd.to(FP8), layer.values_SGd.to(FP8))
    scales = tuple(torch.randint(125, 129, x.shape[:2], dtype=torch.uint8, device=DEVICE) for x in codes)
    fp8 = KvLayer(*codes, scales)
    assert torch.equal(attended(q, fp8, batch, CONFIG)[0], attended(q, fp8, batch.by_node, CONFIG)[0])


def test_results_of_groups_take_bounded_memory():
    few = TreeLayout.of(CONFIG, 8, 4096, 5, 1 << 10)
    many = TreeLayout.of(CONFIG, 500, 32768, 5, 64 << 20)
    assert not few.running and few.shares > 1
    assert many.running and many.shares == 1


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("shape", "num_nodes", "page"),
    [((32, 8, 128), 7, 64), ((32, 8, 128), 64, 16), ((9, 3, 64), 32, 16), ((28, 4, 128), 16, 64)],
    ids=str,
)
def test_on_hopper_nodes_have_the_portable_kernels_bits(shape, num_nodes, page):
    (heads, groups, width), depth = shape, 5
    torch.manual_seed(num_nodes)
    roots = [0, 63, 64, 255, 256, 700, 5000]
    each = -(-(max(roots) + num_nodes + 1) // page)
    pages_RP = torch.randperm(len(roots) * each).view(len(roots), each)
    slots_RK = (pages_RP[:, :, None] * page + torch.arange(page)).flatten(1)
    parents = [-1] + [int(torch.randint(max(0, node - 9), node, ())) for node in range(1, num_nodes)]
    paths = [[]]
    for node in range(1, num_nodes):
        path = [*paths[parents[node]], node]
        paths.append(path if len(path) <= depth else [node])
    slots, positions = [], []
    for row, root in zip(slots_RK.tolist(), roots, strict=True):
        for path in paths:
            own = [row[root + node] for node in path] or [row[root]]
            slots.append(own + [own[-1]] * (depth - len(own)))
            positions.append(root + len(path))
    layer = KvLayer(*(randn(slots_RK.numel(), groups, width, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)))
    batch = AttentionBatch(
        query_starts_R1=torch.arange(len(roots) + 1, dtype=torch.int32, device=DEVICE) * num_nodes,
        kv_lens_R=torch.tensor(roots, dtype=torch.int32, device=DEVICE) + depth + 1,
        page_table_RP=pages_RP.int().to(DEVICE),
        kv_index_T=torch.tensor(positions, device=DEVICE),
        ancestors_T=torch.full((len(positions),), -1, device=DEVICE),
        page_size=page,
        max_queries=num_nodes,
        max_keys=each * page,
        tree=TreePaths(
            torch.tensor(roots, dtype=torch.int32, device=DEVICE), torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        ),
    )
    q = randn(len(positions), heads, width, dtype=torch.bfloat16, seed=3)
    shipped = read_tuning("sm_90").attention
    expected, maxima = attended(q, layer, batch.by_node, AttentionConfig(split=64, block=64))
    for config in (shipped, dataclasses.replace(shipped, programs=40), dataclasses.replace(shipped, programs=1 << 20)):
        for _ in range(3):
            found = attended(q, layer, batch, config)
            assert torch.equal(found[0], expected) and torch.equal(found[1], maxima), config.programs
