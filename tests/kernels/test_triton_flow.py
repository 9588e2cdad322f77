"""Attention whose keys a warp of its own asks for compiles for sm_90, and has the bits of what asks for its own."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from cpu_samples import causal, filled_cache
from triton_samples import batch_to_device, layer_to_device, numbers

from interpreted import DEVICE
from slipstream.kernels import keys_and_values
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.reference.kv_fp8 import encode_kv
from slipstream.kernels.triton.attention import dispatch as attending
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention, work_list_of
from slipstream.kernels.triton.attention.hopper_launch import _work_shape
from slipstream.kernels.triton.tuning import AttentionConfig, architecture_of, read_tuning


def shaped(requests: int, queries: int, bound: int) -> AttentionBatch:
    """Return a batch of which shapes and bounds alone are asked."""
    tokens = torch.empty(queries * requests, dtype=torch.int64)
    return AttentionBatch(
        torch.empty(requests + 1, dtype=torch.int32), torch.empty(requests, dtype=torch.int32),
        torch.empty(requests, 1, dtype=torch.int32), tokens, tokens, 16, max_queries=queries, max_keys=bound,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "bound", "expected"),
    [
        (40, 1623, "flow"),
        (40, 16384, "flow"),
        (65, 1623, "own"),
        (65, 2048, "even"),
        (8, 16384, "even"),
        (40, 512, "own"),
        (8, 1623, "own"),
    ],
)
def test_many_requests_are_given_it(monkeypatch, requests, bound, expected):
    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **options: taken.append(self.name)

    taken = []
    for name, kernel in (("own", "splits_kernel"), ("even", "even_kernel")):
        monkeypatch.setattr(attending, kernel, Kernel(name))
    monkeypatch.setattr(attending, "launch_persistent", lambda *args: taken.append("flow"))
    cache = torch.empty(0, 8, 128, dtype=torch.bfloat16)
    batch = shaped(requests, 4, bound)
    launch = AttentionLaunch(read_tuning("sm_90").attention, torch.zeros(1024, dtype=torch.int32), dependent=False)
    attention(torch.empty(4 * requests, 32, 128, dtype=torch.bfloat16), KvLayer(cache, cache), batch, 0.1, None, launch)
    assert taken == [expected]


@pytest.mark.parametrize(
    ("requests", "queries", "bound"), [(40, 4, 1623), (40, 1, 1623), (33, 3, 16384), (64, 2, 4096)]
)
def test_walks_laid_out_for_a_pass_are_those_its_layers_need(monkeypatch, requests, queries, bound):
    config = read_tuning("sm_90").attention
    launch = AttentionLaunch(config, torch.zeros(1024, dtype=torch.int32), dependent=True, early=True)
    cache = torch.empty(0, 8, 128, dtype=torch.bfloat16)
    batch = shaped(requests, queries, bound)
    needs = []
    monkeypatch.setattr(
        attending,
        "lay_out_work",
        lambda programs, described, shape, launch: _work_shape(programs, len(described[1]), shape),
    )
    monkeypatch.setattr(
        attending,
        "launch_persistent",
        lambda *args: needs.append((_work_shape(config.persistent_programs, len(args[1][1]), args[4]), args[-1])),
    )
    q = torch.empty(queries * requests, 32, 128, dtype=torch.bfloat16)
    work = work_list_of(batch, len(q), 32, KvLayer(cache, cache), q.dtype, launch)
    attention(q, KvLayer(cache, cache), batch, 0.1, None, launch, None, work)
    assert needs == [(work, work)] and work["parts"] == 16
    assert (
        work_list_of(dataclasses.replace(batch, max_keys=64), len(q), 32, KvLayer(cache, cache), q.dtype, launch)
        is None
    )


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="a warp of its own asks for keys on Hopper alone")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("programs", [8, 64, 136, 264])
@pytest.mark.parametrize(
    ("counts", "before"),
    [
        ([1] * 3, [700, 3, 260]),
        ([4] * 21, [1152 + 13 * i for i in range(21)]),  # alike enough to be cut anywhere
        ([4] * 9, [1500, 252, 256, 10, 383, 1020, 61, 64, 2043]),
        ([1, 0, 3, 0, 2], [3, 40, 300, 0, 129]),
    ],
    ids=str,
)
def test_keys_that_are_asked_for_give_the_same_bits(counts, before, programs, page_size, generator):
    batch = causal(counts, before, page_size, generator)
    keys, values = ([torch.randn(n, 8, 128, generator=generator) for n in batch.kv_lens_R] for _ in range(2))
    layer = layer_to_device(filled_cache(batch, keys, values), torch.bfloat16)
    batch = dataclasses.replace(batch_to_device(batch), max_queries=max(counts))
    q = numbers(sum(counts), 32, 128, generator=generator, dtype=torch.bfloat16)
    own = AttentionConfig(split=64, block=64, programs=1)
    even = dataclasses.replace(own, even_programs=264)
    flow = dataclasses.replace(even, persistent_programs=programs)
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    outs = [
        attention(q, layer, batch, 0.2, None, AttentionLaunch(config, counters, dependent))
        for config, dependent in ((own, False), (even, False), (flow, False), (flow, True))
    ]
    launch = AttentionLaunch(flow, counters, dependent=True, early=True)
    work = work_list_of(batch, len(q), 32, layer, q.dtype, launch)
    assert work is not None
    counters.add_(0)  # lets nobody start early
    outs += [attention(q, layer, batch, 0.2, None, launch, None, work) for _ in range(2)]
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    assert not counters.any()


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="a warp of its own asks for keys on Hopper alone")
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("shape", [(32, 8, 128), (16, 4, 64), (8, 1, 128)], ids=str)
@pytest.mark.parametrize(
    ("counts", "before"),
    [
        ([1], [5000]),
        ([4] * 21, [1152 + 13 * i for i in range(21)]),
        ([2] * 9, [1500, 252, 256, 10, 383, 1020, 61, 64, 2043]),
        ([1, 0, 2, 0, 2], [3, 40, 300, 0, 129]),
    ],
    ids=str,
)
def test_keys_in_fp8_give_the_bits_of_their_numbers(counts, before, shape, page_size, generator):
    heads, groups, width = shape
    if max(counts) * heads // groups > 16:
        pytest.skip("these are the rows of a narrow tile")
    batch = causal(counts, before, page_size, generator)
    keys, values = ([torch.randn(n, groups, width, generator=generator) for n in batch.kv_lens_R] for _ in range(2))
    layer = layer_to_device(filled_cache(batch, keys, values), torch.bfloat16)
    (keys, key_scales), (values, value_scales) = encode_kv(9 * layer.keys_SGd), encode_kv(3 * layer.values_SGd)
    scales = tuple(part.T.contiguous().T for part in (key_scales, value_scales))
    short = KvLayer(keys, values, scales)
    long = KvLayer(*keys_and_values(short, torch.arange(len(keys), device=DEVICE), torch.bfloat16))
    written = torch.zeros(len(keys), dtype=torch.bool, device=DEVICE)
    for pages, count in zip(batch.page_table_RP.tolist(), batch.kv_lens_R.tolist(), strict=True):
        slots = torch.arange(count)
        written[torch.tensor(pages)[slots // page_size] * page_size + slots % page_size] = True
    for part in (keys, values):
        part.view(torch.uint8)[~written] = 0x7F  # NaN
    for part in scales:
        part[~written] = 255
    batch = dataclasses.replace(batch_to_device(batch), max_queries=max(counts))
    q = numbers(sum(counts), heads, width, generator=generator, dtype=torch.bfloat16)
    own = AttentionConfig(split=64, block=64, programs=1)
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    expected = attention(q, short, batch, 0.02, None, AttentionLaunch(own, counters, False))
    for programs in (8, 132):
        flow = dataclasses.replace(own, persistent_programs=programs)
        for cache in (short, long):
            launch = AttentionLaunch(flow, counters, dependent=True, early=True)
            work = work_list_of(batch, len(q), heads, cache, q.dtype, launch)
            assert work is not None
            counters.add_(0)  # lets nobody start early
            for _ in range(3):
                assert torch.equal(attention(q, cache, batch, 0.02, None, launch, None, work), expected)
    assert not counters.any()
