"""The generator's Triton kernels against the plain versions, on a GPU or in Triton's interpreter."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.kernels import KvLayer
from slipstream.train import sampling, static_cache, triton_decode

ON_GPU = DEVICE.type == "cuda"
ROWS, LENGTH, VOCAB = (64, 736, 49152) if ON_GPU else (4, 200, 5000)
ERROR = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_decode_attention_equals_the_plain_version(window, dtype):
    torch.manual_seed(0)
    layer = KvLayer(*(torch.randn(ROWS, 3, LENGTH, 64, device=DEVICE).to(dtype) for _ in range(2)))
    q = torch.randn(ROWS, 9, 64, device=DEVICE).to(dtype)
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), device=DEVICE)
    exact = KvLayer(layer.keys_SGd.float(), layer.values_SGd.float())
    plain = static_cache.decode_attention(q.float(), exact, lengths, 0.125, window)
    fast = triton_decode.decode_attention(q, layer, lengths, 0.125, window)
    assert fast.dtype == dtype
    assert float((plain - fast.float()).norm() / plain.norm()) < ERROR[dtype]


def test_sampling_draws_the_same_tokens_for_the_same_numbers():
    torch.manual_seed(0)
    logits = torch.randn(4 * ROWS, VOCAB, device=DEVICE) * 4
    temperature, top_p = torch.rand(4 * ROWS, device=DEVICE), torch.rand(4 * ROWS, device=DEVICE) * 0.5 + 0.5
    temperature[:ROWS] = 0
    uniform = torch.rand(4 * ROWS, sampling.NUM_DRAWS, device=DEVICE)
    plain = sampling.sample(logits, temperature, top_p, uniform)
    same = plain == triton_decode.sample(logits, temperature, top_p, uniform)
    assert bool(same[:ROWS].all())  # greedy rows exactly; of the others a few lie on the edge of top_p
    assert float(same.float().mean()) > (0.97 if ON_GPU else 0.85)
