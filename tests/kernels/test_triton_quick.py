"""Attention's short chain compiles for sm_90, and is for it alone; Triton's interpreter does not know it."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from triton_samples import attention_sample, small_tuning

from interpreted import DEVICE
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.tuning import architecture_of


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="it runs on Hopper alone")
@pytest.mark.parametrize("shape", [(8, 2, 128), (9, 3, 64), (16, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize(
    ("counts", "before"), [([1], [1151]), ([1, 1], [0, 700]), ([4], [1300]), ([3, 0, 1], [62, 9, 64])]
)
def test_it_gives_the_bits_of_other_programs(shape, counts, before, generator):
    q, layer, batch = attention_sample(counts, before, 16, shape, generator, torch.bfloat16)
    batch = dataclasses.replace(batch, max_queries=max(counts))
    plain = dataclasses.replace(small_tuning().attention, split=64, block=64, share=2)
    for warps in (4, 8):
        found = []
        for config in (plain, dataclasses.replace(plain, hopper_split_warps=warps)):
            launch = AttentionLaunch(
                config, torch.zeros(64, dtype=torch.int32, device=DEVICE), dependent=True, early=True
            )
            maxima = torch.zeros(q.shape[:2], device=DEVICE)
            found += [(attention(q, layer, batch, 0.1, None, launch, maxima), maxima)]
            assert not launch.counters.any()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), warps
