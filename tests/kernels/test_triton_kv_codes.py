"""Keys and values in FP8 on the GPU kernels: the reference's codes, and the bits of attention over their numbers."""

import dataclasses

import pytest
import torch
from triton_samples import REFERENCE, attention_sample, numbers, small_tuning, triton_ops

from interpreted import DEVICE
from slipstream.kernels import KV_FP8, KvLayer, Sight, keys_and_values
from slipstream.kernels.reference.kv_fp8 import encode_kv
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.rope import Rope, RopeWrite, rope_and_write

SMALL = small_tuning().attention
WAYS = {
    "splits": SMALL,
    "groups": dataclasses.replace(SMALL, programs=12),
    "all groups": dataclasses.replace(SMALL, programs=1, even_programs=6),
    "one program": dataclasses.replace(SMALL, serial_from=1),
}


def in_fp8(layer: KvLayer) -> tuple[KvLayer, KvLayer]:
    """Return a cache in FP8, and the numbers of its codes in bfloat16."""
    (keys, key_scales), (values, value_scales) = encode_kv(9 * layer.keys_SGd), encode_kv(3 * layer.values_SGd)
    short = KvLayer(keys, values, (key_scales, value_scales))
    return short, KvLayer(*keys_and_values(short, torch.arange(len(keys), device=DEVICE), torch.bfloat16))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("counts", "shape"), [([2, 4, 1], (8, 2, 32)), ([1, 1, 1], (9, 3, 64)), ([2, 3], (4, 2, 24))])
def test_attention_has_the_bits_of_attention_over_the_numbers(way, counts, shape, generator):
    q, layer, batch = attention_sample(counts, [70, 100, 20][: len(counts)], 16, shape, generator, torch.bfloat16)
    batch = dataclasses.replace(batch, max_queries=max(counts))
    short, long = in_fp8(layer)
    ops = triton_ops(attention=WAYS[way])
    got = ops.attention(q, short, batch, 0.02, None)
    assert torch.equal(got, ops.attention(q, long, batch, 0.02, None))
    expected = REFERENCE.attention(q.float(), short, batch, 0.02, None)
    torch.testing.assert_close(got.float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("sight", [Sight(21), Sight(None, 32)], ids=str)
def test_windows_chunks_and_sinks_too(sight, generator):
    q, layer, batch = attention_sample([2, 4, 1], [70, 100, 20], 16, (8, 2, 32), generator, torch.bfloat16)
    sight = dataclasses.replace(sight, sinks_H=numbers(8, generator=generator))
    short, long = in_fp8(layer)
    ops = triton_ops()
    got = ops.attention(q, short, batch, 0.02, sight)
    assert torch.equal(got, ops.attention(q, long, batch, 0.02, sight))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotary"), [((4, 2), 16, 16), ((3, 1), 24, 16), ((8, 8), 64, 64)])
def test_keys_and_values_are_written_as_the_references_codes(heads, width, rotary, qk_norm, generator):
    num_heads, groups = heads
    qkv = numbers(3, (num_heads + 2 * groups) * width, generator=generator, dtype=torch.bfloat16)
    cos, sin = (numbers(50, rotary // 2, generator=generator) for _ in range(2))
    slots, positions = torch.tensor([7, 0, 30], device=DEVICE), torch.tensor([3, 49, 0], device=DEVICE)
    norms = [Norm(numbers(width, generator=generator, dtype=torch.bfloat16), 1e-5) for _ in range(2)]
    rope = Rope(slots, positions, cos, sin)
    numbers_ = [torch.zeros(32, groups, width, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    codes = [torch.zeros(32, groups, width, dtype=KV_FP8, device=DEVICE) for _ in range(2)]
    scales = tuple(torch.zeros(32, groups, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    plain, short = KvLayer(*numbers_), KvLayer(*codes, scales)
    for layer in (plain, short):
        rope_and_write(qkv, RopeWrite(heads, rope, layer), tuple(norms) if qk_norm else None, qkv.dtype, False)
    expected = KvLayer(*(torch.zeros_like(part) for part in codes), tuple(torch.zeros_like(part) for part in scales))
    REFERENCE.write_kv(expected, plain.keys_SGd[slots], plain.values_SGd[slots], slots)
    for mine, theirs in zip((*codes, *scales), (expected.keys_SGd, expected.values_SGd, *expected.scales), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
