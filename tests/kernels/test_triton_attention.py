import dataclasses

import pytest
import torch
from cpu_samples import causal, filled_cache
from triton_samples import (
    REFERENCE,
    attention_sample,
    batch_to_device,
    layer_to_device,
    small_tuning,
    triton_ops,
)

from interpreted import DEVICE
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention

OPS = triton_ops()


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(
    ("counts", "before", "page_size", "shape"),
    [
        ([1], [0], 16, (4, 2, 16)),
        ([1, 3], [5, 100], 16, (8, 2, 32)),
        ([4, 1, 2], [10, 70, 63], 64, (9, 3, 64)),
        ([20], [50], 16, (4, 1, 24)),
        ([2, 0, 30], [33, 40, 0], 16, (4, 4, 16)),
    ],
)
def test_attention_is_the_references(counts, before, page_size, shape, window, generator):
    q, layer, batch = attention_sample(counts, before, page_size, shape, generator)
    got = OPS.attention(q, layer, batch, 0.25, window)
    torch.testing.assert_close(got, REFERENCE.attention(q, layer, batch, 0.25, window), rtol=1e-5, atol=1e-5)


def test_bfloat16_keys_and_values_are_read_as_stored(generator):
    q, layer, batch = attention_sample([3, 1], [40, 90], 16, (8, 2, 32), generator, torch.bfloat16)
    expected = REFERENCE.attention(q.float(), layer_to_device(layer), batch, 0.2, None)
    torch.testing.assert_close(OPS.attention(q, layer, batch, 0.2, None).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("nodes", [5, 12])
def test_a_tree_sees_only_ancestors(nodes, generator):
    q, layer, batch = attention_sample([nodes, 1], [70, 20], 16, (4, 2, 16), generator)
    parents = [-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))]
    ancestors = batch.ancestors_T.clone()
    for node in range(nodes):
        bits, up = -1 & ~((1 << node) - 1), node  # everything before the tree
        while up >= 0:
            bits |= 1 << (node - up)
            up = parents[up]
        ancestors[node] = bits | 1 if node < 63 else bits
        for other in range(node):
            chain, up = [], node
            while up >= 0:
                chain.append(up)
                up = parents[up]
            if other not in chain:
                ancestors[node] &= ~(1 << (node - other))
    batch = dataclasses.replace(batch, ancestors_T=ancestors)
    expected = REFERENCE.attention(q, layer, batch, 0.25, None)
    torch.testing.assert_close(OPS.attention(q, layer, batch, 0.25, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [3, 16])
def test_tokens_of_a_block_see_as_the_last_of_them_does(count, generator):
    q, layer, batch = attention_sample([count, count], [70, 20], 16, (4, 2, 16), generator)
    last = batch.kv_lens_R.long().repeat_interleave(count) - 1
    batch = dataclasses.replace(batch, kv_index_T=last)
    expected = REFERENCE.attention(q, layer, batch, 0.25, None)
    torch.testing.assert_close(OPS.attention(q, layer, batch, 0.25, None), expected, rtol=1e-5, atol=1e-5)


def one_request(q, layer, batch, row, page_size, generator):
    """The same request alone, on pages of another size, shuffled."""
    kv_len = int(batch.kv_lens_R[row])
    index = torch.arange(kv_len, device=DEVICE)
    slots = batch.page_table_RP[row, index // batch.page_size].long() * batch.page_size + index % batch.page_size
    tokens = slice(int(batch.query_starts_R1[row]), int(batch.query_starts_R1[row + 1]))
    count = tokens.stop - tokens.start
    alone = causal([count], [kv_len - count], page_size, generator)
    moved = filled_cache(alone, [layer.keys_SGd[slots].cpu().float()], [layer.values_SGd[slots].cpu().float()])
    return q[tokens], layer_to_device(moved, layer.keys_SGd.dtype), batch_to_device(alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_neither_batch_nor_pages(dtype, generator):
    q, layer, batch = attention_sample([2, 4, 1], [70, 100, 20], 16, (8, 2, 32), generator, dtype)
    together = OPS.attention(q, layer, batch, 0.2, None)
    for row in range(3):
        tokens = slice(int(batch.query_starts_R1[row]), int(batch.query_starts_R1[row + 1]))
        for page_size in (16, 64):
            alone = OPS.attention(*one_request(q, layer, batch, row, page_size, generator), 0.2, None)
            assert torch.equal(alone, together[tokens])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("count", [4, 12, 40])
def test_a_query_keeps_its_bits_however_many_share_the_pass(count, window, generator):
    q, layer, batch = attention_sample([count], [80], 16, (8, 2, 32), generator, torch.bfloat16)
    batch = dataclasses.replace(batch, max_queries=count, max_keys=120)
    together = OPS.attention(q, layer, batch, 0.2, window)
    for token in (0, count - 1):
        single = dataclasses.replace(
            batch,
            query_starts_R1=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            kv_lens_R=(batch.kv_index_T[token : token + 1] + 1).int(),
            kv_index_T=batch.kv_index_T[token : token + 1],
            ancestors_T=batch.ancestors_T[token : token + 1],
            max_queries=1,
        )
        assert torch.equal(OPS.attention(q[token : token + 1], layer, single, 0.2, window)[0], together[token])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("programs", [1, 12, 24])
def test_a_program_that_takes_several_splits_leaves_the_same_bits(programs, window, generator):
    # One program to a request and key head, two, or four: of the second request's ten splits, three groups.
    q, layer, batch = attention_sample([2, 4, 1], [70, 300, 20], 16, (8, 2, 32), generator, torch.bfloat16)
    few = triton_ops(attention=dataclasses.replace(small_tuning().attention, programs=programs))
    assert torch.equal(few.attention(q, layer, batch, 0.2, window), OPS.attention(q, layer, batch, 0.2, window))


@pytest.mark.parametrize(("programs", "share", "window"), [(1056, 1, None), (12, 1, 90), (1056, 3, 300)])
def test_splits_shared_out_and_one_query_merged_compactly_leave_the_same_bits(programs, share, window, generator):
    q, layer, batch = attention_sample([1, 1], [520, 70], 16, (6, 2, 16), generator, torch.bfloat16)  # 17 splits, and 3
    batch = dataclasses.replace(batch, max_queries=1)
    config = dataclasses.replace(small_tuning().attention, programs=programs)
    plain, changed = (
        triton_ops(attention=dataclasses.replace(config, **changes))
        for changes in ({}, {"share": share, "compact": True})
    )
    expected = plain.attention(q, layer, batch, 0.2, window)
    torch.testing.assert_close(
        expected.float(),
        REFERENCE.attention(q.float(), layer_to_device(layer), batch, 0.2, window),
        rtol=2e-2,
        atol=2e-2,
    )
    assert torch.equal(changed.attention(q, layer, batch, 0.2, window), expected)


@pytest.mark.parametrize("programs", [1056, 1])
@pytest.mark.parametrize(
    ("counts", "shape"), [([2, 4, 1], (8, 2, 32)), ([1, 1], (9, 3, 64)), ([6, 2], (16, 2, 24))], ids=str
)
def test_the_largest_magnitude_of_every_head_is_left_if_there_is_room_for_it(counts, shape, programs, generator):
    # The last shape takes two tiles to a request, of heads that are padded.
    q, layer, batch = attention_sample(counts, [100, 70, 20][: len(counts)], 16, shape, generator, torch.bfloat16)
    config = dataclasses.replace(small_tuning().attention, programs=programs)
    launch = AttentionLaunch(config, torch.zeros(64, dtype=torch.int32, device=DEVICE), dependent=False)
    maxima = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    out = attention(q, layer, batch, 0.2, None, launch, maxima)
    torch.testing.assert_close(out, REFERENCE.attention(q, layer, batch, 0.2, None), rtol=2e-2, atol=2e-2)
    assert torch.equal(maxima, out.float().abs().amax(2))
    assert not launch.counters.any()


EVEN_CASES = [
    ([2, 4, 1], [70, 100, 20], (8, 2, 32)),
    ([1, 1], [520, 70], (6, 2, 16)),
    ([1, 0, 3, 0, 1], [3, 40, 300, 0, 129], (4, 2, 16)),  # some requests bring no query
    ([4] * 7, [124, 125, 128, 252, 256, 10, 383], (8, 2, 16)),  # around the borders of groups, which have 128 keys
    ([2, 3], [40, 130], (9, 3, 24)),  # heads that are padded
]


@pytest.mark.parametrize("programs", [1, 6, 40])
@pytest.mark.parametrize(("counts", "before", "shape"), EVEN_CASES, ids=str)
def test_programs_that_share_all_requests_evenly_leave_the_same_bits(counts, before, shape, programs, generator):
    q, layer, batch = attention_sample(counts, before, 16, shape, generator, torch.bfloat16)
    batch = dataclasses.replace(batch, max_queries=max(counts))
    config = dataclasses.replace(small_tuning().attention, programs=1, compact=programs == 6)
    expected = triton_ops(attention=config).attention(q, layer, batch, 0.2, None)
    even = dataclasses.replace(config, even_programs=programs)
    assert torch.equal(triton_ops(attention=even).attention(q, layer, batch, 0.2, None), expected)


@pytest.mark.parametrize("page_size", [16, 64])
def test_programs_that_share_all_requests_evenly_see_a_trees_ancestors_alone(page_size, generator):
    q, layer, batch = attention_sample([4, 2], [70, 260], page_size, (8, 2, 16), generator)
    ancestors = batch.ancestors_T.clone()
    ancestors[2] &= ~2  # the third query is a sibling of the second
    batch = dataclasses.replace(batch, ancestors_T=ancestors, max_queries=4)
    even = triton_ops(attention=dataclasses.replace(small_tuning().attention, programs=1, even_programs=6))
    got = even.attention(q, layer, batch, 0.25, None)
    torch.testing.assert_close(got, REFERENCE.attention(q, layer, batch, 0.25, None), rtol=1e-5, atol=1e-5)


def test_evenly_shared_programs_leave_maxima_and_counters_as_the_others_do(generator):
    q, layer, batch = attention_sample([2, 4, 1], [100, 70, 20], 16, (8, 2, 32), generator, torch.bfloat16)
    batch = dataclasses.replace(batch, max_queries=4)
    config = dataclasses.replace(small_tuning().attention, programs=1, even_programs=10)
    launch = AttentionLaunch(config, torch.zeros(64, dtype=torch.int32, device=DEVICE), dependent=False)
    maxima = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    out = attention(q, layer, batch, 0.2, None, launch, maxima)
    assert torch.equal(maxima, out.float().abs().amax(2))
    assert not launch.counters.any()
