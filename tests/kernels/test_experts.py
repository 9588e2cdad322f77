"""A layer of experts adds up what each token's own experts say, in the arithmetic its weights are stored for."""

import pytest
import torch

from slipstream.checkpoint.spec import RoutingSpec
from slipstream.errors import KernelError
from slipstream.kernels import select
from slipstream.quant.packed import ExpertWeights, stack_experts
from slipstream.quant.scheme import dequantize, scheme_named

CPU = torch.device("cpu")
WIDTH, INNER, EXPERTS = 128, 64, 5
# How far quantized inputs may move the output, relative to it.
SCHEMES = {
    "dense": (None, 1e-6),
    "w4a8": (None, 0.02),
    "int4": (None, 1e-6),
    "int4_group": (32, 1e-6),
    "mxfp4_weight_only": (None, 1e-6),
    "mxfp4": (None, 0.3),
    "ptpc_fp8": (None, 0.08),
    "int4_fp8": (None, 0.08),
}


def stacked(name: str, weight_ENK: torch.Tensor) -> ExpertWeights:
    if name == "dense":
        return ExpertWeights("dense", *weight_ENK.shape[1:], weight_ENK)
    group_size = SCHEMES[name][0]
    scheme = scheme_named(name.removesuffix("_group"), group_size)
    parts = [scheme.encode(weight, "best", weight.abs().max().item()) for weight in weight_ENK]
    return stack_experts(parts, len(parts), CPU)


def case(name, generator):
    gate_up = stacked(name, torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator) * 0.1)
    down = stacked(name, torch.randn(EXPERTS, WIDTH, INNER, generator=generator) * 0.1)
    x = torch.randn(7, WIDTH, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(7)])
    return x, gate_up, down, ids, torch.rand(7, 3, generator=generator)


def plain(x, gate_up, down, ids, weights):
    """The same in float32 with decoded weights."""

    def decoded(stack, expert):
        part = stack.expert(expert)
        return part.codes if part.format == "dense" else dequantize(part)

    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert >= 0:
                gate, up = (decoded(gate_up, expert) @ x[token]).chunk(2)
                out[token] += weight * (decoded(down, expert) @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_the_weighted_sum_of_the_chosen_experts_but_for_the_inputs_rounding(name, generator):
    args = case(name, generator)
    expected = plain(*args)
    error = (select(CPU, "reference").experts(*args) - expected).norm() / expected.norm()
    assert error < SCHEMES[name][1]
    if SCHEMES[name][1] > 1e-3:
        assert error > 1e-4, "the inputs were not quantized at all"


@pytest.mark.parametrize("path", ["reference", "auto"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_has_the_same_bits_alone_as_in_company(name, path, generator):
    ops = select(CPU, path)
    x, gate_up, down, ids, weights = case(name, generator)
    together = ops.experts(x, gate_up, down, ids, weights)
    for token in range(len(x)):
        row = slice(token, token + 1)
        assert torch.equal(ops.experts(x[row], gate_up, down, ids[row], weights[row])[0], together[token])


def test_experts_that_lie_elsewhere_add_nothing(generator):
    x, gate_up, down, ids, weights = case("dense", generator)
    ids[:, 1] = -1
    ids[3] = -1
    got = select(CPU, "reference").experts(x, gate_up, down, ids, weights)
    torch.testing.assert_close(got, plain(x, gate_up, down, ids, weights), atol=1e-5, rtol=0)
    assert not got[3].any()


def test_the_sum_is_rounded_once(generator):
    """In bfloat16 the K terms are added in float32, so the order of equal experts cannot matter beyond float32."""
    x, gate_up, down, _, _ = case("dense", generator)
    ids = torch.zeros(7, 3, dtype=torch.int64)
    x = x.bfloat16()
    one = select(CPU, "reference").experts(x, gate_up, down, ids, torch.tensor([[0.6, 0.3, 0.1]]).expand(7, 3))
    whole = select(CPU, "reference").experts(x, gate_up, down, ids[:, :1], torch.ones(7, 1))
    assert one.dtype == torch.bfloat16
    assert torch.equal(one, whole)


def test_a_stack_holds_each_experts_weight_with_its_scales_by_row():
    weights = [scheme_named("int4_fp8").encode(torch.randn(4, 8) * i, "best", 3.0 * i) for i in (1, 2, 3)]
    stack = stack_experts(iter(weights), 3, CPU)
    assert stack.scales["scale"].shape == stack.scales["scale_2"].shape == (3, 4)
    for index, weight in enumerate(weights):
        torch.testing.assert_close(dequantize(stack.expert(index)), dequantize(weight), rtol=0, atol=0)


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_experts_are_chosen_by_biased_score_and_weighted_by_score(path):
    ops = select(CPU, path)
    weight = torch.eye(4)
    x = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-9.0, 0.0, 0.0, 0.9])
    ids, weights = ops.route(x, weight, bias, RoutingSpec(2, normalise=False, scale=2.0))
    assert ids.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, 2 * x[0, [3, 1]].sigmoid()[None])
    _, normalised = ops.route(x, weight, bias, RoutingSpec(2))
    torch.testing.assert_close(normalised, weights / weights.sum())


def test_only_the_groups_with_the_best_pairs_are_kept():
    weight = torch.eye(6)
    x = torch.tensor([[3.0, -9.0, 1.0, 0.9, 0.8, 0.7]])  # groups of two: (3, -9), (1, 0.9), (0.8, 0.7)
    ids, _ = select(CPU, "reference").route(x, weight, torch.zeros(6), RoutingSpec(2, num_groups=3, kept_groups=1))
    assert ids.tolist() == [[2, 3]]


def test_equal_experts_are_taken_in_order():
    ids, _ = select(CPU, "reference").route(torch.ones(1, 4), torch.ones(300, 4), torch.zeros(300), RoutingSpec(8))
    assert ids.tolist() == [list(range(8))]


def test_a_format_without_arithmetic_is_refused(generator):
    x, _, down, ids, weights = case("dense", generator)
    odd = ExpertWeights("q9", 2 * INNER, WIDTH, torch.zeros(EXPERTS, 2 * INNER, WIDTH))
    with pytest.raises(KernelError, match="'q9'"):
        select(CPU, "reference").experts(x, odd, down, ids, weights)
