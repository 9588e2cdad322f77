"""Attention over latents equals attention with the latent as every head's key and value, and each token is its own."""

import pytest
import torch

from slipstream.kernels import AttentionBatch, KvLayer, select
from slipstream.models.context import QueryTokens, page_table, paged_context
from tiny import DEVICE, OPS

HEADS, WIDTH, VALUES = 6, 24, 16


def latent_layer(num_slots: int, generator: torch.Generator) -> KvLayer:
    keys = torch.randn(num_slots, 1, WIDTH, generator=generator).to(DEVICE)
    return KvLayer(keys, keys[..., :VALUES])


def case(generator, page_size=4) -> tuple[torch.Tensor, KvLayer, AttentionBatch]:
    """Two requests: a causal chunk of 3 behind 5 keys, and a tree of 4 nodes (two branches) behind 9."""
    layer = latent_layer(16 * page_size, generator)
    index = torch.tensor([5, 6, 7, 9, 10, 11, 12], device=DEVICE)
    ancestors = torch.tensor([-1, -1, -1, -1, -1, ~0b10, ~0b110], device=DEVICE)
    table = page_table([[3, 1, 6], [2, 9, 4, 7]], DEVICE)
    queries = QueryTokens([3, 4], index, index, ancestors)
    ctx = paged_context(OPS, _Pages(page_size), table, queries)
    return torch.randn(7, HEADS, WIDTH, generator=generator).to(DEVICE), layer, ctx.batch


class _Pages:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size


def test_it_is_attention_whose_one_head_of_keys_and_values_is_the_latent(generator):
    q, layer, batch = case(generator)
    expected = OPS.attention(q, KvLayer(layer.keys_SGd, layer.keys_SGd.clone()), batch, 0.3, None)[..., :VALUES]
    torch.testing.assert_close(OPS.latent_attention(q, layer, batch, 0.3, VALUES), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_a_token_has_the_same_bits_alone_as_in_company(path, generator):
    ops = select(DEVICE, path)
    q, layer, batch = case(generator)
    together = ops.latent_attention(q, layer, batch, 0.3, VALUES)
    for token in range(len(q)):
        row = 0 if token < 3 else 1
        alone = AttentionBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            batch.kv_index_T[token : token + 1].int() + 1,
            batch.page_table_RP[row : row + 1],
            batch.kv_index_T[token : token + 1],
            batch.ancestors_T[token : token + 1],
            batch.page_size,
        )
        assert torch.equal(ops.latent_attention(q[token : token + 1], layer, alone, 0.3, VALUES)[0], together[token])


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_moving_slots_that_overlap_moves_latents_whole(path, generator):
    """Values are a view of the keys: writing one before reading the other would move a latent twice."""
    layer = latent_layer(8, generator)
    before = layer.keys_SGd.clone()
    select(DEVICE, path).move_kv(layer, *torch.tensor([[5, 7], [3, 5]], device=DEVICE))
    assert torch.equal(layer.keys_SGd[[3, 5, 7]], before[[5, 7, 7]])
    assert torch.equal(layer.values_SGd, layer.keys_SGd[..., :VALUES])


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_latents_are_written_where_keys_and_values_both_read_them(path, generator):
    layer = latent_layer(8, generator)
    latent = torch.randn(2, 1, WIDTH, generator=generator).to(DEVICE)
    select(DEVICE, path).write_kv(layer, latent, latent[..., :VALUES], torch.tensor([6, 1], device=DEVICE))
    assert torch.equal(layer.keys_SGd[[6, 1]], latent)
    assert torch.equal(layer.values_SGd[[6, 1]], latent[..., :VALUES])


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_each_head_is_multiplied_by_its_own_weight(path, generator):
    x = torch.randn(5, 3, 8, generator=generator).to(DEVICE)
    weight = torch.randn(3, 12, 8, generator=generator).to(DEVICE)
    got = select(DEVICE, path).head_linear(x, weight)
    for head in range(3):
        torch.testing.assert_close(got[:, head], x[:, head] @ weight[head].t(), atol=1e-5, rtol=0)
