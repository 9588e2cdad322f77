"""Products of 1 to 4 rows in which one warp asks for weights: they compile for sm_90, and have the others' bits."""

import dataclasses

import pytest

pytest.importorskip("triton")

import torch
from layer_samples import SHAPE, run

from interpreted import DEVICE
from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.kernels.triton.gemm.small_m_launch import plan_of
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import LinearConfig, architecture_of, read_tuning
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.quant.formats import fp8
from slipstream.quant.packed import PackedWeight

PROCESSOR, RESERVED = 228 << 10, 1 << 10
"""Bytes of shared memory that a processor has, and that a program needs of it for itself."""


def test_what_does_not_fit_is_left_to_other_kernels():
    config = LinearConfig(128, 256, 4, 4, 4, program_n=32, sliced_k=True, gemv_stages=6)
    plan = plan_of(config, 3, 1024, 1, "plain", "maxima", 1)
    assert plan is not None and (plan.mp, plan.bn, plan.steps) == (4, 16, 8)
    assert plan_of(config, 5, 1024, 1, "plain", "maxima", 1) is None
    assert plan_of(config, 2, 1280, 1, "plain", "norm", 1) is None
    assert plan_of(config, 1, 1000, 1, "plain", "maxima", 1) is None


def llama_8b_layers(ops, *, packed):
    """Return two blocks of that shape with random weights."""
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope": RopeSpec(10000.0, 128)}
    wide = {"num_layers": 2, "hidden_size": 4096, "intermediate_size": 14336, **heads}
    spec = ModelSpec(architecture="llama", tie_embeddings=False, **{**SHAPE, **wide})
    with torch.device(DEVICE):
        model = Target(spec).to(torch.bfloat16)
    model.rotary.fill(DEVICE)
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
    for module in model.layers.modules():
        if packed and isinstance(module, Linear):
            codes, scale = fp8.encode_per_channel(module.weight, "best")
            stored = PackedWeight("fp8_per_channel", len(codes), module.in_features, codes, {"scale": scale})
            module.pack(ops.prepare(stored))
    return model


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="a warp of its own asks for weights on Hopper alone")
@pytest.mark.parametrize("packed", [False, True])
def test_layers_have_the_bits_that_other_products_give(packed):
    tuning = read_tuning("sm_90")
    few = {name: dataclasses.replace(config, gemv_stages=0) for name, config in tuning.linear_few.items()}
    gemv_stages, plain = (TritonOps(DEVICE, one) for one in (tuning, dataclasses.replace(tuning, linear_few=few)))
    model = llama_8b_layers(gemv_stages, packed=packed)
    passes = [9, 1, 2, 3, 4, 1, 1]
    for _ in range(5):
        assert torch.equal(run(model, gemv_stages, passes), run(model, plain, passes))
