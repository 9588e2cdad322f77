import pytest
import torch
from cpu_samples import causal, filled_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import KernelError
from slipstream.kernels import AttentionBatch, KvLayer, Sight
from slipstream.kernels.cpu.library import ISAS, load_library
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps

REFERENCE = ReferenceOps(torch.device("cpu"))
SIGHTS = [None, 1, 5, 70, Sight(chunk=4), Sight(chunk=50), Sight(window=3, sinks_H=torch.linspace(-1, 1, 6))]


def random_case(counts, before, page_size, generator, heads=(6, 2), head_dim=64):
    batch = causal(counts, before, page_size, generator)
    lens = batch.kv_lens_R.tolist()
    keys = [torch.randn(n, heads[1], head_dim, generator=generator) for n in lens]
    values = [torch.randn(n, heads[1], head_dim, generator=generator) for n in lens]
    q = torch.randn(sum(counts), heads[0], head_dim, generator=generator)
    return q, filled_cache(batch, keys, values), batch, keys, values


@pytest.mark.parametrize("head_dim", [64, 128, 40, 5, 80])
@pytest.mark.parametrize("window", [None, 9, 100])
def test_attention_matches_the_reference(cpu_ops, generator, head_dim, window):
    q, layer, batch, _, _ = random_case([1, 5, 40, 0], [90, 3, 0, 8], 16, generator, head_dim=head_dim)
    expected = REFERENCE.attention(q, layer, batch, 0.2, window)
    assert torch.allclose(cpu_ops.attention(q, layer, batch, 0.2, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 40, 5, 80])
@pytest.mark.parametrize("requests", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_short_keys_give_the_bits_of_the_same_numbers_in_float32(cpu_ops, generator, head_dim, requests, dtype):
    counts, before = [3, 1, 40, 2, 7, 1][:requests], [90, 3, 0, 33, 64, 200][:requests]
    q, layer, batch, _, _ = random_case(counts, before, 16, generator, head_dim=head_dim)
    short = KvLayer(layer.keys_SGd.to(dtype), layer.values_SGd.to(dtype))
    long = KvLayer(short.keys_SGd.float(), short.values_SGd.float())
    got = cpu_ops.attention(q, short, batch, 0.2, None)
    assert torch.equal(got, cpu_ops.attention(q, long, batch, 0.2, None))
    assert not torch.equal(got, cpu_ops.attention(q, layer, batch, 0.2, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_short_keys_match_the_reference(cpu_ops, generator, dtype):
    q, layer, batch, _, _ = random_case([1, 5, 40, 0], [90, 3, 0, 8], 16, generator)
    short = KvLayer(layer.keys_SGd.to(dtype), layer.values_SGd.to(dtype))
    expected = REFERENCE.attention(q, short, batch, 0.2, None)
    assert torch.allclose(cpu_ops.attention(q, short, batch, 0.2, None), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), nodes=st.integers(1, 20), before=st.integers(0, 150), page_size=st.integers(1, 70),
    sight=st.sampled_from(SIGHTS),
)  # fmt: skip
def test_a_tree_node_attends_to_its_ancestors_only(seed, nodes, before, page_size, sight):
    ops = _ops()
    generator = torch.Generator().manual_seed(seed)
    q, layer, batch, _, _ = random_case([nodes], [before], page_size, generator)
    tree = with_ancestors(batch, *random_tree(nodes, generator))
    with torch.no_grad():
        expected = REFERENCE.attention(q, layer, tree, 0.125, sight)
        assert torch.allclose(ops.attention(q, layer, tree, 0.125, sight), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 60), before=st.integers(0, 200), sight=st.sampled_from(SIGHTS))
def test_a_tree_node_gets_the_bits_of_plain_decoding_along_its_path(seed, nodes, before, sight):
    ops = _ops()
    generator = torch.Generator().manual_seed(seed)
    q, layer, batch, keys, values = random_case([nodes], [before], 16, generator)
    parents, bits = random_tree(nodes, generator)
    with torch.no_grad():
        tree = with_ancestors(batch, parents, bits)
        in_tree = ops.attention(q, layer, tree, 0.125, sight)
        by_torch = REFERENCE.attention(q, layer, tree, 0.125, sight)
        path, node = [], nodes - 1
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        seen = [*range(before), *(before + node for node in path)]
        plain = causal([1], [len(seen) - 1], 8, generator)
        cache = filled_cache(plain, [keys[0][seen]], [values[0][seen]])
        alone = ops.attention(q[-1:], cache, plain, 0.125, sight)
        alone_by_torch = REFERENCE.attention(q[-1:], cache, plain, 0.125, sight)
    assert torch.equal(in_tree[-1:], alone)
    assert torch.allclose(by_torch[-1:], alone_by_torch, rtol=1e-4, atol=1e-5)


def test_bits_do_not_depend_on_batch_pages_threads_chunks_or_instruction_set(generator):
    isas = _isas()
    q, layer, batch, keys, values = random_case([50, 7, 1], [0, 60, 33], 16, generator)
    whole = CpuOps(2, isas[-1]).attention(q, layer, batch, 0.125, 48)
    for isa in isas:
        for threads in (1, 2):
            ops = CpuOps(threads, isa)
            assert torch.equal(ops.attention(q, layer, batch, 0.125, 48), whole)
            for page_size in (1, 5, 64):
                for row, (start, count, before) in enumerate([(0, 50, 0), (50, 7, 60), (57, 1, 33)]):
                    for chunk in (1, 3, 50):
                        for at in range(0, count, chunk):
                            size = min(chunk, count - at)
                            alone = causal([size], [before + at], page_size, generator)
                            seen = before + at + size
                            cache = filled_cache(alone, [keys[row][:seen]], [values[row][:seen]])
                            part = ops.attention(q[start + at : start + at + size], cache, alone, 0.125, 48)
                            assert torch.equal(part, whole[start + at : start + at + size])


def test_indices_outside_the_cache_are_refused(fast_ops, generator):
    q, layer, batch, _, _ = random_case([2], [3], 4, generator)
    broken = AttentionBatch(
        batch.query_starts_R1,
        batch.kv_lens_R,
        batch.page_table_RP + 50,
        batch.kv_index_T,
        batch.ancestors_T,
        batch.page_size,
    )
    with pytest.raises(KernelError, match="outside"):
        fast_ops.attention(q, layer, broken, 0.125, None)
    with pytest.raises(KernelError, match="outside"):
        fast_ops.write_kv(layer, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), torch.tensor([1000]))


@pytest.mark.parametrize("heads", [(4, 3), (2, 4), (257, 1)])
def test_query_heads_that_cannot_share_the_key_heads_are_refused(cpu_ops, generator, heads):
    q, layer, batch, _, _ = random_case([2], [3], 4, generator, heads=heads, head_dim=5)
    with pytest.raises(KernelError, match="no multiple of the key heads, or more than 256"):
        cpu_ops.attention(q, layer, batch, 0.125, None)


def test_as_many_query_heads_as_may_share_a_key_head_match_the_reference(cpu_ops, generator):
    q, layer, batch, _, _ = random_case([2, 1], [3, 40], 4, generator, heads=(256, 1), head_dim=5)
    expected = REFERENCE.attention(q, layer, batch, 0.2, None)
    assert torch.allclose(cpu_ops.attention(q, layer, batch, 0.2, None), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_keys_and_values_that_are_no_numbers_give_the_same_bits_on_every_instruction_set(generator, bad):
    for at in (0, 5, 15, 18):
        for kind in ("keys_SGd", "values_SGd"):
            q, layer, batch, _, _ = random_case([1, 3], [20, 2], 16, generator, head_dim=16)
            getattr(layer, kind)[int(batch.page_table_RP[0, at // 16]) * 16 + at % 16, 0, 3] = bad
            first, *others = (CpuOps(1, isa).attention(q, layer, batch, 0.25, None) for isa in _isas())
            for other in others:
                torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


def test_keys_are_written_and_moved_like_the_reference(fast_ops, generator):
    _, layer, _, _, _ = random_case([2], [30], 4, generator)
    _, expected, _, _, _ = random_case([2], [30], 4, torch.Generator().manual_seed(7))
    keys = torch.randn(5, 4, 64, generator=generator)[:, 1:3]
    slots = torch.tensor([3, 30, 4, 0, 17])
    for ops, cache in ((fast_ops, layer), (REFERENCE, expected)):
        ops.write_kv(cache, keys, keys * 2, slots)
        ops.move_kv(cache, torch.tensor([3, 4, 5]), torch.tensor([4, 3, 9]))
    assert torch.equal(layer.keys_SGd, expected.keys_SGd)
    assert torch.equal(layer.values_SGd, expected.values_SGd)


def random_tree(nodes, generator):
    """Parents of nodes in order (-1: none), and each node's ancestor bits, counted back from itself."""
    parents, bits = [-1], [1]
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 6), node, (1,), generator=generator))
        parents.append(parent)
        bits.append(1 | (bits[parent] << (node - parent)))
    return parents, bits


def with_ancestors(batch, parents, bits):
    """Set a tree's bits; keys before the tree are everyone's."""
    ones = (1 << 64) - 1
    full = [(b | (ones << (node + 1))) & ones for node, b in enumerate(bits)]
    ancestors = torch.tensor([b - (1 << 64) if b >> 63 else b for b in full])
    return AttentionBatch(
        batch.query_starts_R1, batch.kv_lens_R, batch.page_table_RP, batch.kv_index_T, ancestors, batch.page_size
    )


def _isas():
    try:
        return ISAS[: load_library().slip_best_isa() + 1]
    except KernelError:
        pytest.skip("CPU kernels not built")


def _ops():
    return CpuOps(2, _isas()[-1])


@pytest.mark.parametrize(("window", "chunk", "sinks"), [(None, None, True), (9, None, True), (None, 32, False)])
def test_sinks_and_chunks_are_the_references_and_alone_as_in_company(cpu_ops, generator, window, chunk, sinks):
    q, layer, batch, _, _ = random_case([1, 5, 40, 0], [90, 3, 0, 8], 16, generator)
    sight = Sight(window, chunk, torch.randn(6, generator=generator) if sinks else None)
    got = cpu_ops.attention(q, layer, batch, 0.2, sight)
    assert torch.allclose(got, REFERENCE.attention(q, layer, batch, 0.2, sight), rtol=1e-4, atol=1e-5)
    row = 30  # of the third request
    alone = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32), batch.kv_index_T[row : row + 1].int() + 1, batch.page_table_RP[2:3],
        batch.kv_index_T[row : row + 1], batch.ancestors_T[row : row + 1], batch.page_size,
    )  # fmt: skip
    assert torch.equal(cpu_ops.attention(q[row : row + 1], layer, alone, 0.2, sight)[0], got[row])
