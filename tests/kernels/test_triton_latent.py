"""The Triton latent attention against the reference: trees, pages of any size, far slots, bits of a token's own."""

from interpreted import DEVICE  # first: it decides whether kernels are interpreted

import pytest  # isort: skip
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.reference.attention import latent_attention as reference
from slipstream.kernels.triton.mla.attention import LatentTiles, latent_attention

HEADS, WIDTH, ROPE, SCALE = 3, 24, 8, 0.2
TILES = LatentTiles(near=32, near_keys=64, split=64, block=32, rows=16, warps=4)


def make_batch(kv_lens, counts, page_size, ancestors=None, seed=0):
    """Requests whose last `counts` keys are their query tokens, on shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = -(-max(kv_lens) // page_size)
    table = torch.randperm(len(kv_lens) * num_pages, generator=generator).reshape(len(kv_lens), num_pages)
    starts = torch.tensor([0, *counts]).cumsum(0)
    index = torch.cat([torch.arange(n - count, n) for n, count in zip(kv_lens, counts, strict=True)])
    bits = torch.full_like(index, -1) if ancestors is None else torch.tensor(ancestors)
    return AttentionBatch(
        starts.int().to(DEVICE), torch.tensor(kv_lens).int().to(DEVICE), table.int().to(DEVICE), index.to(DEVICE),
        bits.to(DEVICE), page_size,
    )  # fmt: skip


def make_layer(batch, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    num_slots = (int(batch.page_table_RP.max()) + 1) * batch.page_size
    keys = torch.randn(num_slots, 1, WIDTH + ROPE, generator=generator).to(dtype).to(DEVICE)
    return KvLayer(keys, keys[..., :WIDTH])


def make_queries(num_tokens, dtype):
    return torch.randn(num_tokens, HEADS, WIDTH + ROPE, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)


def relative_error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_chains_and_trees_see_what_the_reference_lets_them_see(dtype, limit, page_size):
    tree = [-1, -1, -1, ~0b10, ~0b110, -1, ~0b10]
    batch = make_batch([5, 130, 66], [1, 4, 2], page_size, tree)
    layer, q = make_layer(batch, dtype), make_queries(7, dtype)
    got = latent_attention(q, layer, batch, SCALE, WIDTH, TILES)
    assert relative_error(got, reference(q, layer, batch, SCALE, WIDTH)) < limit


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 150), st.integers(1, 9), st.sampled_from([16, 64]))
def test_a_token_has_the_same_bits_alone_as_in_company(kv_len, count, page_size):
    count = min(count, kv_len)
    batch = make_batch([kv_len, 40], [count, 1], page_size)
    layer, q = make_layer(batch, torch.bfloat16), make_queries(count + 1, torch.bfloat16)
    together = latent_attention(q, layer, batch, SCALE, WIDTH, TILES)
    own_key = kv_len - count  # the first of its request: the others' keys lie behind it
    alone = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.tensor([own_key + 1], dtype=torch.int32, device=DEVICE),
        batch.page_table_RP[:1], batch.kv_index_T[:1], batch.ancestors_T[:1], page_size,
    )  # fmt: skip
    assert torch.equal(latent_attention(q[:1], layer, alone, SCALE, WIDTH, TILES)[0], together[0])


def test_pages_of_another_size_give_the_same_bits():
    outputs = []
    for page_size in (16, 64):
        batch = make_batch([140], [4], page_size)
        num_pages = batch.page_table_RP.shape[1]
        in_order = AttentionBatch(
            batch.query_starts_R1, batch.kv_lens_R, torch.arange(num_pages, device=DEVICE)[None].int(),
            batch.kv_index_T, batch.ancestors_T, page_size,
        )  # fmt: skip
        keys = torch.randn(192, 1, WIDTH + ROPE, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
        layer = KvLayer(keys, keys[..., :WIDTH])
        outputs.append(latent_attention(make_queries(4, torch.bfloat16), layer, in_order, SCALE, WIDTH, TILES))
    assert torch.equal(*outputs)


def test_slots_beyond_two_to_the_31_values_are_found():
    """The cache is virtual: its pages lie 2^25 slots apart, and only those written to take memory."""
    page_size, far = 16, 5
    width = WIDTH + ROPE
    num_slots = (far << 25) // page_size * page_size
    assert (num_slots - page_size) * width > 2**32
    storage = torch.empty(num_slots * width, dtype=torch.bfloat16, device=DEVICE)
    keys = storage.view(num_slots, 1, width)
    near = make_layer(make_batch([48], [2], page_size), torch.bfloat16).keys_SGd
    pages = torch.tensor([[0, (3 << 25) // page_size, num_slots // page_size - 1]], dtype=torch.int32, device=DEVICE)
    for place, page in enumerate(pages[0].tolist()):
        keys[page * page_size : (page + 1) * page_size] = near[place * page_size : (place + 1) * page_size]
    batch = make_batch([48], [2], page_size)
    tables = [pages, torch.arange(3, dtype=torch.int32, device=DEVICE)[None]]
    q = make_queries(2, torch.bfloat16)
    outputs = [
        latent_attention(q, KvLayer(cache, cache[..., :WIDTH]), AttentionBatch(
            batch.query_starts_R1, batch.kv_lens_R, table, batch.kv_index_T, batch.ancestors_T, page_size
        ), SCALE, WIDTH, TILES)
        for cache, table in zip((keys, near), tables, strict=True)
    ]  # fmt: skip
    assert torch.equal(*outputs)
