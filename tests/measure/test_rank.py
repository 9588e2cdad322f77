"""Rank mode builds one rank's share, counts what it reads, and says which splits are impossible."""

import json

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.bench import app
from slipstream.errors import ConfigError, KernelError
from slipstream.kernels import select
from slipstream.measure.rank_models import MODELS, build_target, random_experts, rank_of
from slipstream.quant.formats.nibbles import unpack_signed
from slipstream.quant.scheme import dequantize

CPU = torch.device("cpu")


def test_a_rank_of_kimi_has_the_published_share_of_the_shapes():
    spec = rank_of("kimi-k2.5", 8).target
    assert (spec.num_heads, spec.vocab_size, spec.num_layers, spec.hidden_size) == (8, 20480, 61, 7168)
    assert spec.moe is not None and spec.mla is not None
    assert (spec.moe.num_experts, spec.moe.intermediate_size, spec.mla.latent_dim) == (384, 256, 576)


@pytest.mark.parametrize("num_ranks", [3, 128])
def test_ranks_that_cannot_share_the_heads_are_refused(num_ranks):
    with pytest.raises(ConfigError, match=rf"--tp {num_ranks}: .* cannot share"):
        rank_of("kimi-k2.5", num_ranks)


def test_an_unknown_model_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=next(iter(MODELS))):
        rank_of("kimi-k9", 8)


@pytest.mark.parametrize("name", ["w4a8", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act", "fp8_block", "dense"])
def test_random_experts_have_the_bytes_of_their_format(name):
    spec = rank_of("kimi-k2.5", 1, tiny=True).target
    experts = build_target(spec, name, 16, CPU).layers[1].mlp.experts
    bits = sum(weights.codes.nbytes for weights in experts.weights) * 8 / (8 * 3 * 64 * 128)
    assert bits == {"fp8_block": 8, "dense": 16}.get(name, 4)


@pytest.mark.parametrize("name", ["w4a8", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act"])
def test_random_experts_are_as_large_as_random_weights(name):
    torch.manual_seed(0)
    weights = random_experts(name, (2, 64, 256), CPU)
    assert 0.6 < dequantize(weights.expert(1)).std() * 16 < 1.6  # powers of two come within a factor


def test_codes_have_no_mean_unless_rows_shall_choose_alike():
    spec = rank_of("kimi-k2.5", 1, tiny=True).target
    means = {}
    for routing in ("spread", "clustered"):
        torch.manual_seed(0)
        codes = build_target(spec, "w4a8", 16, CPU, routing).layers[1].mlp.experts.weights[0].codes
        means[routing] = float(unpack_signed(codes).float().mean())
    assert abs(means["spread"]) < 0.05
    assert means["clustered"] < -0.4
    with pytest.raises(ConfigError, match="--routing even"):
        build_target(spec, "w4a8", 16, CPU, "even")


def test_the_verb_prints_steps_and_writes_what_it_counted(tmp_path):
    path = tmp_path / "rank.json"
    arguments = ["rank", "--tiny", "--tp", "2", "--device", "cpu", "--batch", "1,2", "--context", "70"]
    done = CliRunner().invoke(app, [*arguments, "--all-reduce-us", "8", "--routing", "clustered", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert "(modelled)" in done.output and "clustered routing" in done.output
    written = json.loads(path.read_text())
    assert written["routing"] == "clustered"
    assert [step["step"] for step in written["steps"]] == ["decode", "verify", "draft"] * 2
    decode, verify = written["steps"][:2]
    assert decode["experts_hit"] == 2 and 2 <= verify["experts_hit"] <= 8
    assert verify["read_bytes"] > decode["read_bytes"] or verify["experts_hit"] == decode["experts_hit"]
    assert decode["floor_ms"] is None, "a CPU has no measured floor"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "stage2.block_k"], "NAME=NUMBER"),
        (["--set", "stage2.block_k=128"], "Triton"),
        (["--batch", "1,x"], "whole numbers"),
        (["--format", "int3"], "w4a8"),
    ],
)
def test_mistakes_are_answered_with_sentences(arguments, words):
    done = CliRunner().invoke(app, ["rank", "--tiny", "--tp", "2", "--device", "cpu", *arguments])
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)


def test_a_rank_of_minimax_has_the_published_share_and_runs_in_tiny_with_its_own_defaults():
    shape = rank_of("minimax-m2.5", 8)
    assert (shape.target.num_heads, shape.target.num_kv_heads, shape.target.moe.intermediate_size) == (6, 1, 192)
    assert shape.experts == "fp8_block"
    with pytest.raises(ConfigError, match="key heads 8"):
        rank_of("minimax-m2.5", 16)
    result = CliRunner().invoke(app, ["rank", "--tiny", "--model", "minimax-m2.5", "--batch", "1", "--context", "16"])
    assert result.exit_code == 0, result.output
    assert "one of 2 ranks, fp8_block experts" in result.output
    assert [line.split()[0] for line in result.output.splitlines()[-3:]] == ["decode", "verify", "draft"]


def test_tiles_are_refused_where_no_kernel_has_any():
    with pytest.raises(KernelError, match="Tile shapes are those of the Triton kernels"):
        select(CPU, "auto", {"stage2.block_k": 256})
