"""What the families beyond Llama's need of the Triton kernels, held to the reference in the interpreter."""

import dataclasses

import pytest
import torch
from triton_samples import attention_sample, layer_to_device

from interpreted import DEVICE
from slipstream.checkpoint.spec import Activation, RoutingSpec
from slipstream.kernels import Sight, select
from slipstream.kernels.triton.ops import TritonOps
from slipstream.quant.packed import ExpertWeights, stack_experts
from slipstream.quant.scheme import scheme_named

OPS = TritonOps(DEVICE)
REFERENCE = select(DEVICE, "reference")
CLAMPED = Activation("clamped", 1.5, 1.702)


@pytest.mark.parametrize(
    "routing",
    [
        RoutingSpec(3, scoring="softmax", bias="logits"),
        RoutingSpec(1, scoring="sigmoid", bias="none", normalise=False),
    ],
    ids=str,
)
def test_a_router_chooses_and_weighs_as_the_reference_and_alone_as_in_company(routing):
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_ED = (torch.randn(size, 64, generator=generator).to(DEVICE) for size in (5, 12))
    bias_E = None if routing.bias == "none" else torch.randn(12, generator=generator).to(DEVICE)
    ids_TK, weights_TK = OPS.route(x_TD, weight_ED, bias_E, routing)
    expected_ids_TK, expected_TK = REFERENCE.route(x_TD, weight_ED, bias_E, routing)
    assert torch.equal(ids_TK, expected_ids_TK)
    torch.testing.assert_close(weights_TK, expected_TK, atol=1e-6, rtol=0)
    alone_ids_1K, alone_1K = OPS.route(x_TD[3:4], weight_ED, bias_E, routing)
    assert torch.equal(alone_ids_1K[0], ids_TK[3]) and torch.equal(alone_1K[0], weights_TK[3])


@pytest.mark.parametrize(("window", "chunk", "sinks"), [(21, None, True), (None, 32, False)])
def test_attention_with_sinks_windows_and_chunks_is_the_references(window, chunk, sinks, generator):
    q, layer, batch = attention_sample([3, 1], [63, 100], 16, (4, 2, 24), generator)
    sight = Sight(window, chunk, torch.randn(4, generator=generator).to(DEVICE) if sinks else None)
    got = OPS.attention(q, layer, batch, 0.25, sight)
    torch.testing.assert_close(got, REFERENCE.attention(q, layer, batch, 0.25, sight), rtol=1e-5, atol=1e-5)
    plain = OPS.attention(q, layer, batch, 0.25, None)
    assert not torch.allclose(got, plain, atol=1e-3), "what is seen made no difference"


@pytest.mark.parametrize("before", [0, 5, 90])
@pytest.mark.parametrize("sight", [1, 5, 70, Sight(chunk=4), Sight(window=3, chunk=50)], ids=str)
def test_windows_and_chunks_of_a_tree_count_the_positions_of_its_paths(before, sight, generator):
    q, layer, batch = attention_sample([13, 1], [before, 70], 4, (4, 2, 16), generator)
    bits = [-1]
    for node in range(1, 13):
        parent = int(torch.randint(max(0, node - 4), node, (1,), generator=generator))
        bits.append((bits[parent] << (node - parent)) | 1)
    ancestors_T = torch.tensor([*bits, -1], device=batch.ancestors_T.device)
    tree = dataclasses.replace(batch, ancestors_T=ancestors_T)
    got = OPS.attention(q, layer, tree, 0.25, sight)
    torch.testing.assert_close(got, REFERENCE.attention(q, layer, tree, 0.25, sight), rtol=1e-5, atol=1e-5)


def test_a_query_with_sinks_has_the_same_bits_alone_as_in_company(generator):
    q, layer, batch = attention_sample([4, 1], [100, 70], 16, (8, 2, 16), generator, torch.bfloat16)
    layer = layer_to_device(layer, torch.bfloat16)
    sight = Sight(21, sinks_H=torch.randn(8, generator=generator).to(DEVICE))
    together = OPS.attention(q, layer, batch, 0.25, sight)
    alone = dataclasses.replace(
        batch,
        query_starts_R1=batch.query_starts_R1.new_tensor([0, 1]),
        kv_lens_R=batch.kv_index_T[2:3].int() + 1,
        page_table_RP=batch.page_table_RP[:1],
        kv_index_T=batch.kv_index_T[2:3],
        ancestors_T=batch.ancestors_T[2:3],
    )
    assert torch.equal(OPS.attention(q[2:3], layer, alone, 0.25, sight)[0], together[2])


@pytest.mark.parametrize(
    ("format", "activation"),
    [("dense", CLAMPED), ("mxfp4_weight_only", CLAMPED), ("dense", Activation("gelu"))],
)
def test_experts_with_biases_and_other_activations_are_the_references(format, activation, generator):
    def weights(outputs, inputs):
        numbers = torch.randn(4, outputs, inputs, generator=generator)
        bias_EN = torch.randn(4, outputs, generator=generator).to(DEVICE)
        if format == "dense":
            return ExpertWeights(format, outputs, inputs, numbers.to(DEVICE), bias_EN=bias_EN)
        parts = [scheme_named(format).encode(weight, "best", 1.0) for weight in numbers]
        return dataclasses.replace(stack_experts(parts, 4, DEVICE), bias_EN=bias_EN)

    gate_up, down = weights(64, 64), weights(64, 32)
    x_TD = torch.randn(3, 64, generator=generator).to(DEVICE)
    ids_TK = torch.tensor([[0, 2], [3, 1], [-1, 2]], device=DEVICE)
    chosen = (ids_TK, torch.rand(3, 2, generator=generator).to(DEVICE))
    got = OPS.experts(x_TD, gate_up, down, *chosen, activation)
    expected = REFERENCE.experts(x_TD, gate_up, down, *chosen, activation)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    alone = OPS.experts(x_TD[1:2], gate_up, down, chosen[0][1:2], chosen[1][1:2], activation)
    assert torch.equal(alone[0], got[1])
