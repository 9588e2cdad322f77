"""The generator's Triton kernels against the plain versions; only where there is a GPU."""

import pytest
import torch

from slipstream.kernels import KvLayer
from slipstream.train import sampling, static_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels run on a GPU")


@pytest.mark.parametrize("window", [None, 100])
def test_decode_attention_equals_the_plain_version(window):
    from slipstream.train import triton_decode

    torch.manual_seed(0)
    layer = KvLayer(*(torch.randn(64, 3, 736, 64, device="cuda").bfloat16() for _ in range(2)))
    q = torch.randn(64, 9, 64, device="cuda").bfloat16()
    lengths = torch.randint(1, 737, (64,), device="cuda")
    exact = KvLayer(layer.keys_SGd.float(), layer.values_SGd.float())
    plain = static_cache.decode_attention(q.float(), exact, lengths, 0.125, window)
    fast = triton_decode.decode_attention(q, layer, lengths, 0.125, window).float()
    assert float((plain - fast).norm() / plain.norm()) < 1e-2


def test_sampling_draws_the_same_tokens_for_the_same_numbers():
    from slipstream.train import triton_decode

    torch.manual_seed(0)
    logits = torch.randn(256, 49152, device="cuda") * 4
    temperature, top_p = torch.rand(256, device="cuda"), torch.rand(256, device="cuda") * 0.5 + 0.5
    temperature[:64] = 0
    uniform = torch.rand(256, sampling.NUM_DRAWS, device="cuda")
    plain = sampling.sample(logits, temperature, top_p, uniform)
    same = plain == triton_decode.sample(logits, temperature, top_p, uniform)
    assert bool(same[:64].all())  # greedy rows exactly; of the others a few lie on the edge of top_p
    assert float(same.float().mean()) > 0.97
