"""What the families beyond Llama's need of the Triton kernels, held to the reference in the interpreter."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.checkpoint.spec import RoutingSpec
from slipstream.kernels import select
from slipstream.kernels.triton.ops import TritonOps

OPS = TritonOps(DEVICE)
REFERENCE = select(DEVICE, "reference")


@pytest.mark.parametrize(
    "routing",
    [
        RoutingSpec(3, scoring="softmax", bias="none"),
        RoutingSpec(3, scoring="softmax", bias="logits", normalise=False),
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
