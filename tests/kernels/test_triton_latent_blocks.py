"""Fused blocks of latent attention and experts do what the reference's blocks do, row by row."""

from interpreted import DEVICE  # first: it decides whether kernels are interpreted

from dataclasses import replace  # isort: skip

import pytest
import torch

from slipstream.checkpoint.spec import RoutingSpec
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.moe.tiles import MoeOptions
from slipstream.kernels.triton.ops import TritonOps
from slipstream.measure.rank_models import build_target, rank_of
from slipstream.models.context import KvCache, QueryTokens, paged_context
from slipstream.models.fused.mla import MlaBlocks

PAGE = 16


def tiny_target(expert_format):
    torch.manual_seed(3)
    return build_target(rank_of("kimi-k2.5", 2, tiny=True).target, expert_format, 64, DEVICE).float()


@pytest.fixture(scope="module")
def target():
    return tiny_target("w4a8")


def context(target, ops, lengths, width):
    """Requests of so many keys, whose last `width` are the tokens of the pass; the cache is random, always the same."""
    kv = KvCache.allocate(target.kv_shape, 4 * len(lengths), PAGE, torch.float32, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(5)
    for layer in kv.layers:
        layer.keys_SGd.normal_(generator=generator)
    table = torch.arange(4 * len(lengths), dtype=torch.int32, device=DEVICE).view(-1, 4)
    index = torch.cat([torch.arange(length - width, length, device=DEVICE) for length in lengths])
    return paged_context(ops, kv, table, QueryTokens([width] * len(lengths), index, index, torch.full_like(index, -1)))


@pytest.mark.parametrize("expert_format", ["w4a8", "int4_fp8", "mxfp4_act"])
@torch.no_grad()
def test_a_fused_pass_gives_the_references_stream_and_captures(expert_format):
    target = tiny_target(expert_format)
    ids = torch.arange(6, device=DEVICE) * 7
    chosen = []
    fast = target(ids, context(target, TritonOps(DEVICE, moe=MoeOptions({}, chosen.append)), [20, 35], 3), (0, 1))
    plain = target(ids, context(target, ReferenceOps(DEVICE), [20, 35], 3), (0, 1))
    assert len(chosen) == 1, "the one layer of experts went through the fused path"
    for got, expected in zip((fast.last_TD, *fast.captured), (plain.last_TD, *plain.captured), strict=True):
        # A code of the requantized inner row may fall to its neighbour where float sums differ in their last bits.
        assert float((got - expected).norm() / expected.norm()) < 2e-3


@torch.no_grad()
def test_a_token_checked_beside_others_has_the_bits_of_plain_decoding(target):
    ops = TritonOps(DEVICE)
    ids = torch.tensor([5, 9, 13], device=DEVICE)
    verified = target(ids, context(target, ops, [30], 3)).last_TD
    decoded = target(ids[:1], context(target, ops, [28], 1)).last_TD
    assert torch.equal(verified[:1], decoded)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_router_chooses_the_references_experts(normalise):
    torch.manual_seed(1)
    x, weight = torch.randn(5, 96, device=DEVICE), torch.randn(40, 96, device=DEVICE)
    bias, routing = torch.randn(40, device=DEVICE) * 0.1, RoutingSpec(6, normalise=normalise, scale=2.5)
    ids, weights = TritonOps(DEVICE).route(x, weight, bias, routing)
    expected_ids, expected_weights = ReferenceOps(DEVICE).route(x, weight, bias, routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_equal_scores_go_to_the_lower_id():
    x, weight, bias = torch.ones(1, 32, device=DEVICE), torch.zeros(9, 32, device=DEVICE), torch.zeros(9, device=DEVICE)
    ids, _ = TritonOps(DEVICE).route(x, weight, bias, RoutingSpec(4))
    assert ids.tolist() == [[0, 1, 2, 3]]


@torch.no_grad()
def test_tokens_of_prompts_take_the_expanded_form(target):
    ops = TritonOps(DEVICE)
    ctx = context(target, ops, [3], 3)
    prompt = replace(ctx, prompt_rows=[True] * 3)
    assert "prompts" in MlaBlocks(ops.fused).unfit(list(target.layers), prompt)
    assert not MlaBlocks(ops.fused).unfit(list(target.layers), ctx)


@torch.no_grad()
def test_latents_that_fill_no_tiles_take_one_operation_at_a_time():
    spec = rank_of("kimi-k2.5", 1, tiny=True).target
    small = build_target(replace(spec, mla=replace(spec.mla, kv_rank=24)), "w4a8", 64, DEVICE).float()
    ids = torch.arange(2, device=DEVICE)
    fast = small(ids, context(small, TritonOps(DEVICE), [9], 2)).last_TD
    plain = small(ids, context(small, ReferenceOps(DEVICE), [9], 2)).last_TD
    torch.testing.assert_close(fast, plain, atol=2e-3, rtol=2e-3)


def test_heads_narrower_than_a_matrix_instruction_are_multiplied(generator):
    x, weight = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((5, 3, 8), (3, 12, 8)))
    expected = ReferenceOps(DEVICE).head_linear(x, weight)
    torch.testing.assert_close(TritonOps(DEVICE).head_linear(x, weight), expected, atol=1e-5, rtol=0)
