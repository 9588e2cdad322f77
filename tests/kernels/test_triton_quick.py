"""Attention's short chain compiles for sm_90, and is for it alone; Triton's interpreter does not know it."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from triton_samples import attention_sample, compiled_by, small_tuning

from interpreted import DEVICE
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.tuning import architecture_of, read_tuning

READ_EARLY = {"starts_ptr", "lens_ptr", "pages_ptr", "index_ptr", "ancestors_ptr", "k_ptr", "v_ptr"}


def test_the_short_chain_fits_hardly_spills_and_folds_nothing():
    assert len(compiled_by("compile_quick.py")) == 4
    for row in compiled_by("compile_quick.py"):
        assert row["shared"] <= 40 << 10 and row["spills"] <= 80, row  # bytes of stack
        assert row["matrix"] and not row["folded"], row


def test_it_reads_keys_and_the_batchs_description_before_it_waits_and_nothing_else():
    for row in compiled_by("compile_quick.py"):
        assert row["waits"] >= 2, row  # with keys and without
        assert set(row["touches"]) == READ_EARLY, row


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_no_other_gpu_is_given_it(architecture):
    config = read_tuning(architecture).attention
    assert not config.quick_warps


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
        for config in (plain, dataclasses.replace(plain, quick_warps=warps)):
            launch = AttentionLaunch(
                config, torch.zeros(64, dtype=torch.int32, device=DEVICE), dependent=True, early=True
            )
            maxima = torch.zeros(q.shape[:2], device=DEVICE)
            found += [(attention(q, layer, batch, 0.1, None, launch, maxima), maxima)]
            assert not launch.counters.any()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), warps
