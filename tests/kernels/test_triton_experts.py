"""The Triton experts against the reference: the same numbers, and a token's bits are its own."""

from interpreted import DEVICE  # first: it decides whether kernels are interpreted

import pytest  # isort: skip
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError, KernelError
from slipstream.kernels.reference.experts import experts as reference
from slipstream.kernels.triton.moe.dispatch import ExpertOptions, experts
from slipstream.kernels.triton.moe.tiles import ExpertTiles, StageTiles, expert_tiles
from slipstream.quant.packed import ExpertWeights, stack_experts
from slipstream.quant.scheme import scheme_named

SMALL = ExpertTiles(16, StageTiles(32, 64, splits=2), StageTiles(32, 64))
WORDS = ExpertTiles(16, StageTiles(4, 64), StageTiles(32, 64), words=True)
# Weight-only formats round the scaled weight to the activations' type before it is multiplied.
FORMATS = {
    "dense": 1e-3,
    "w4a8": 1e-3,
    "int4_per_channel": 1e-3,
    "int4_group": 8e-3,
    "int4_fp8": 1e-3,
    "mxfp4": 1e-3,
    "mxfp4_act": 1e-3,
    "fp8_per_channel": 1e-3,
    "fp8_block": 1e-3,
}
SCHEMES = {
    "w4a8": "w4a8",
    "int4_per_channel": "int4",
    "int4_fp8": "int4_fp8",
    "mxfp4": "mxfp4_weight_only",
    "mxfp4_act": "mxfp4",
    "fp8_per_channel": "ptpc_fp8",
}


def stacked(name, weight_ENK, dtype):
    shape = weight_ENK.shape[1:]
    if name == "dense":
        return ExpertWeights(name, *shape, weight_ENK.to(dtype).to(DEVICE))
    if name == "fp8_block":
        groups = -(-shape[1] // 128)
        scale = torch.linspace(0.001, 0.004, groups).expand(*weight_ENK.shape[:2], groups).contiguous()
        codes = (weight_ENK * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
        return ExpertWeights(name, *shape, codes.to(DEVICE), {"scale": scale.to(DEVICE)})
    scheme = scheme_named("int4", 32) if name == "int4_group" else scheme_named(SCHEMES[name])
    parts = [scheme.encode(weight, "best", float(weight.abs().max())) for weight in weight_ENK]
    return stack_experts(parts, len(parts), DEVICE)


def case(name, dtype=torch.bfloat16, num_tokens=3, width=160, inner=32, num_experts=4, top_k=2):
    torch.manual_seed(7)
    gate_up = stacked(name, torch.randn(num_experts, 2 * inner, width) * width**-0.5, dtype)
    down = stacked(name, torch.randn(num_experts, width, inner) * inner**-0.5, dtype)
    x = torch.randn(num_tokens, width).to(dtype).to(DEVICE)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(DEVICE)
    return x, gate_up, down, ids, torch.rand(num_tokens, top_k).to(DEVICE)


def relative_error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_references_numbers(name):
    args = case(name)
    args[3][1, 0] = -1  # an expert that lies elsewhere
    args[3][2, :] = -1
    got = experts(*args, options=ExpertOptions(SMALL))
    assert relative_error(got, reference(*args)) < FORMATS[name]
    assert not got[2].any()


@pytest.mark.parametrize("name", ["w4a8", "dense", "mxfp4", "mxfp4_act", "int4_fp8"])
def test_float32_activations_lose_nothing(name):
    args = case(name, torch.float32, num_tokens=2)
    assert relative_error(experts(*args, options=ExpertOptions(SMALL)), reference(*args)) < 1e-5


@pytest.mark.parametrize("name", ["w4a8", "int4_group", "int4_fp8", "mxfp4_act", "fp8_block"])
def test_a_token_has_the_same_bits_alone_as_in_company(name):
    x, gate_up, down, ids, weights = case(name)
    together = experts(x, gate_up, down, ids, weights)
    for token in (0, 2):
        rows = slice(token, token + 1)
        assert torch.equal(experts(x[rows], gate_up, down, ids[rows], weights[rows])[0], together[token])


@settings(max_examples=3, deadline=None)
@given(block_t=st.sampled_from([16, 32]), splits=st.sampled_from([1, 3]), block_k=st.sampled_from([64, 128]))
def test_however_integers_are_cut_the_bits_are_the_same(block_t, splits, block_k):
    args = case("w4a8", num_tokens=2)
    tiles = ExpertTiles(block_t, StageTiles(64, block_k, splits), StageTiles(64, block_k))
    assert torch.equal(experts(*args, options=ExpertOptions(tiles)), experts(*args, options=ExpertOptions(SMALL)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_word_by_word_the_bits_are_those_of_the_matrix_kernels(dtype):
    x, gate_up, down, ids, weights = case("w4a8", dtype, width=168)
    ids[1, 0] = -1
    ids[2, :] = -1
    rest = torch.randn(3, 168).to(dtype).to(DEVICE)
    shared = torch.randn(3, 24).to(dtype).to(DEVICE), torch.randn(168, 24).to(dtype).to(DEVICE)
    words, matrix = (
        experts(x, gate_up, down, ids, weights, options=ExpertOptions(tiles, rest, shared=shared))
        for tiles in (WORDS, SMALL)
    )
    assert torch.equal(words, matrix)
    assert relative_error(words[2], rest[2] + shared[0][2] @ shared[1].T) < 1e-2


def test_an_expert_chosen_by_more_tokens_than_a_tile_holds_serves_them_all():
    x, gate_up, down, ids, weights = case("w4a8", num_tokens=19, width=64, inner=32, num_experts=3, top_k=2)
    ids[:, 0] = 1
    ids[:, 1] = 2
    got = experts(x, gate_up, down, ids, weights, options=ExpertOptions(SMALL))
    assert relative_error(got, reference(x, gate_up, down, ids, weights)) < 1e-3


def test_what_else_the_layer_gives_a_token_is_added_after_rounding():
    args = case("w4a8", num_tokens=2)
    rest = torch.randn(2, 160).bfloat16().to(DEVICE)
    assert torch.equal(
        experts(*args, options=ExpertOptions(SMALL, rest)), experts(*args, options=ExpertOptions(SMALL)) + rest
    )


def test_only_integers_have_tiles_by_the_number_of_pairs():
    for architecture in ("sm_90", "gfx942", "gfx950"):
        assert expert_tiles(architecture, "w4a8", 8) != expert_tiles(architecture, "w4a8", 1 << 20)
        for name in set(FORMATS) - {"w4a8"}:
            assert expert_tiles(architecture, name, 8) == expert_tiles(architecture, name, 1 << 20)


def test_each_knob_can_be_set_and_a_wrong_one_is_named():
    assert SMALL.changed({"stage2.block_k": 256, "block_t": 32}).stage2.block_k == 256
    with pytest.raises(ConfigError, match=r"stage3\.block_k"):
        SMALL.changed({"stage3.block_k": 1})
    with pytest.raises(ConfigError, match="Split stage 1 only"):
        SMALL.changed({"stage2.splits": 2})


def test_a_format_without_a_kernel_is_refused_by_name():
    x, gate_up, down, ids, weights = case("dense", num_tokens=1)
    odd = ExpertWeights("q4_0", gate_up.out_features, gate_up.in_features, gate_up.codes)
    with pytest.raises(KernelError, match="q4_0"):
        experts(x, odd, ExpertWeights("q4_0", down.out_features, down.in_features, down.codes), ids, weights)
