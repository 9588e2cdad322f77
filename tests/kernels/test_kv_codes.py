"""Keys and values in FP8: what codes stand for, who writes them, and that attention is over just those numbers."""

import pytest
import torch
from cpu_samples import causal, filled_cache
from layer_samples import make_target

from slipstream.kernels import KvLayer
from slipstream.kernels.reference.kv_fp8 import FP8, decode_kv, encode_kv, keys_and_values
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache

REFERENCE = ReferenceOps(torch.device("cpu"))


def in_fp8(layer: KvLayer) -> tuple[KvLayer, KvLayer]:
    """Return a cache's keys and values in FP8, and the numbers those stand for."""
    (keys, key_scales), (values, value_scales) = encode_kv(layer.keys_SGd), encode_kv(layer.values_SGd)
    short = KvLayer(keys, values, (key_scales, value_scales))
    return short, KvLayer(*keys_and_values(short, torch.arange(len(keys)), torch.float32))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 447.0, 449.0, 1e30])
def test_codes_keep_four_digits_of_the_largest_numbers_and_are_exact_in_bfloat16(generator, size):
    rows = size * torch.randn(40, 3, 64, generator=generator)
    codes, scales = encode_kv(rows)
    again = decode_kv(codes, scales, torch.float32)
    most = rows.abs().amax(-1, keepdim=True)
    # Three bits of mantissa round by a sixteenth at most; far below the largest, steps are a part of that.
    assert ((again - rows).abs() <= torch.maximum(rows.abs() / 16, most * 2.0**-17)).all()
    assert (codes.float().abs().amax(-1) > 208).all(), "the largest number uses the format's range"
    assert torch.equal(again.to(torch.bfloat16).float(), again)
    assert torch.equal(decode_kv(*encode_kv(again), torch.float32), again), "numbers the format has stay as they are"


def test_zeros_infinities_and_a_token_among_others(generator):
    rows = torch.randn(6, 2, 16, generator=generator)
    rows[1] = 0.0
    rows[2, 0, 3] = torch.inf
    codes, scales = encode_kv(rows)
    again = decode_kv(codes, scales, torch.float32)
    assert not again[1].any()
    assert torch.isfinite(again).all()
    alone = encode_kv(rows[4:5])
    assert torch.equal(alone[0].view(torch.uint8)[0], codes.view(torch.uint8)[4])
    assert torch.equal(alone[1][0], scales[4])


@pytest.mark.parametrize("head_dim", [64, 128, 40, 5, 80])
@pytest.mark.parametrize("requests", [1, 6])
@pytest.mark.parametrize("window", [None, 30])
def test_attention_has_the_bits_of_attention_over_the_numbers(cpu_ops, generator, head_dim, requests, window):
    counts, before = [3, 1, 40, 2, 7, 1][:requests], [90, 3, 0, 33, 64, 200][:requests]
    batch = causal(counts, before, 16, generator)
    lens = batch.kv_lens_R.tolist()
    keys, values = ([10 * torch.randn(n, 2, head_dim, generator=generator) for n in lens] for _ in range(2))
    short, long = in_fp8(filled_cache(batch, keys, values))
    q = torch.randn(sum(counts), 6, head_dim, generator=generator)
    assert torch.equal(cpu_ops.attention(q, short, batch, 0.2, window), cpu_ops.attention(q, long, batch, 0.2, window))
    expected = REFERENCE.attention(q, long, batch, 0.2, window)
    assert torch.equal(REFERENCE.attention(q, short, batch, 0.2, window), expected)


def test_outputs_are_within_the_formats_error(cpu_ops, generator):
    batch = causal([2, 1], [100, 30], 16, generator)
    lens = batch.kv_lens_R.tolist()
    keys, values = ([torch.randn(n, 2, 64, generator=generator) for n in lens] for _ in range(2))
    layer = filled_cache(batch, keys, values)
    short, _ = in_fp8(layer)
    q, scale = torch.randn(3, 6, 64, generator=generator), 0.125
    got, exact = (cpu_ops.attention(q, one, batch, scale, None) for one in (short, layer))
    # Codes are off by a sixteenth at most: scores by as much of |q| . |k|, weights by e to twice that, then values.
    off = scale * max(q.abs().sum(-1).max() * key.abs().max() for key in keys) / 16
    assert (got - exact).abs().max() < (off.exp().square() - 1 + 1 / 16) * max(value.abs().max() for value in values)
    assert (got - exact).abs().mean() < 0.02 * exact.abs().mean() + 0.01
    assert not torch.equal(got, exact)


def test_moved_slots_take_their_scales_along(generator):
    rows = torch.randn(8, 2, 16, generator=generator) * torch.arange(1, 9)[:, None, None]
    short, long = in_fp8(KvLayer(rows, 2 * rows))
    REFERENCE.move_kv(short, torch.tensor([5, 7]), torch.tensor([1, 5]))
    keys, values = keys_and_values(short, torch.tensor([1, 5]), torch.float32)
    assert torch.equal(keys, long.keys_SGd[[5, 7]])
    assert torch.equal(values, long.values_SGd[[5, 7]])


def test_a_page_takes_half_the_bytes():
    shape = make_target(torch.Generator().manual_seed(0), head_dim=128).kv_shape
    halves = shape.bytes_per_token(torch.bfloat16)
    assert shape.bytes_per_token(FP8) == halves // 2 + 2 * sum(heads for heads, _ in shape.layers)
    layer = KvCache.allocate(shape, 3, 4, FP8, torch.device("cpu")).layers[0]
    taken = sum(part.nbytes for part in (layer.keys_SGd, layer.values_SGd, *layer.scales))
    assert taken * len(shape.layers) == 12 * shape.bytes_per_token(FP8)
