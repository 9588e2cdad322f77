"""Which layers are quantized, and how the rest is named for readers."""

import re

import pytest
import torch
from folders import write_folder

from slipstream.errors import ConfigError
from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.scheme import scheme_named
from slipstream.quant.select import linear_modules, reader_patterns, select

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DRAFT = ["fc", "lm_head", *(f"midlayer.self_attn.{name}" for name in PROJECTIONS), "midlayer.mlp.down_proj"]
TARGET = [f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in PROJECTIONS] + ["lm_head"]


def excluded_by_reader(patterns: list[str], name: str) -> bool:
    """What vLLM and SGLang do with an exclude list."""
    return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)


def test_embeddings_norms_and_integers_are_no_linear_layers_but_a_projection_of_embeddings_is():
    shapes = {
        "embed_tokens.weight": ((8, 4), "BF16"),
        "vision_model.embeddings.position_embedding.weight": ((8, 4), "BF16"),
        "visual.pos_embed.weight": ((8, 4), "BF16"),
        "language_model.embed_tokens_per_layer.weight": ((8, 4), "BF16"),
        "input_embed_proj.weight": ((8, 4), "BF16"),
        "norm.weight": ((4,), "BF16"),
        "q_proj.weight": ((4, 4), "F16"),
        "q_proj.bias": ((4,), "F16"),
        "conv.weight": ((4, 4, 3), "BF16"),
        "table.weight": ((4, 4), "I64"),
    }
    assert linear_modules(shapes) == ["input_embed_proj", "q_proj"]


def test_fusion_and_head_are_kept_unless_included():
    assert select(DRAFT, (), ()).kept == ("fc", "lm_head")
    assert select(DRAFT, (), ("fc",)).kept == ("lm_head",)
    assert select(DRAFT, ("midlayer.mlp.*",), ()).kept == ("fc", "lm_head", "midlayer.mlp.down_proj")
    assert "midlayer.self_attn.o_proj" in select(DRAFT, ("re:.*o_proj",), ()).kept
    assert "midlayer.self_attn.o_proj" in select(DRAFT, ("midlayer.self_attn.o_proj.weight",), ()).kept


@pytest.mark.parametrize("pattern", ["nothing", "*.nothing", "re:nothing"])
@pytest.mark.parametrize("option", ["exclude", "include"])
def test_a_pattern_that_matches_nothing_is_an_error_that_names_it(pattern, option):
    with pytest.raises(ConfigError, match=f"--{option} '{re.escape(pattern)}' matches no linear layer"):
        select(DRAFT, (pattern,) if option == "exclude" else (), (pattern,) if option == "include" else ())


def test_a_published_exclude_list_may_name_what_is_never_quantized():
    found = select(DRAFT, ("embed_tokens", "lm_head", "fc", "*norm"), (), {"embed_tokens", "midlayer.hidden_norm"})
    assert (found.kept, found.moot) == (("fc", "lm_head"), ("embed_tokens", "*norm"))
    with pytest.raises(ConfigError, match="'nothing' matches no linear layer"):
        select(DRAFT, ("nothing",), (), {"embed_tokens"})
    with pytest.raises(ConfigError, match="--include 'embed_tokens' matches no linear layer"):
        select(DRAFT, (), ("embed_tokens",), {"embed_tokens"})


def test_a_broken_expression_an_empty_choice_and_a_split_of_joined_layers_are_errors():
    with pytest.raises(ConfigError, match="no valid expression"):
        select(DRAFT, ("re:(",), ())
    with pytest.raises(ConfigError, match="Nothing is left"):
        select(DRAFT, ("*",), ())
    with pytest.raises(ConfigError, match="joins them into one qkv_proj"):
        select(DRAFT, ("*.q_proj",), ())


def test_readers_leave_out_fusion_and_head_of_a_draft_under_their_own_names_and_nothing_else():
    patterns = reader_patterns(select(DRAFT, (), ()))
    assert {"fc", "lm_head"} <= set(patterns)  # Quark's own loader goes by names
    for name in ("model.fc", "fc", "lm_head", "model.lm_head"):
        assert excluded_by_reader(patterns, name), name
    for name in ("model.layers.61.self_attn.qkv_proj", "model.qkv_proj", "model.down_proj", "model.fc_up", "xfc"):
        assert not excluded_by_reader(patterns, name), name


def test_readers_leave_out_a_joined_layer_by_its_joined_name():
    patterns = reader_patterns(select(DRAFT, ("re:.*[qkv]_proj",), ()))
    for name in ("model.layers.61.self_attn.qkv_proj", "model.qkv_proj", "midlayer.self_attn.q_proj"):
        assert excluded_by_reader(patterns, name), name
    assert not excluded_by_reader(patterns, "model.layers.61.self_attn.o_proj")


def test_one_layer_of_a_target_is_left_out_alone():
    patterns = reader_patterns(select(TARGET, ("model.layers.1.self_attn.o_proj",), ()))
    assert excluded_by_reader(patterns, "model.layers.1.self_attn.o_proj")
    assert excluded_by_reader(patterns, "language_model.model.layers.1.self_attn.o_proj")
    assert not excluded_by_reader(patterns, "model.layers.0.self_attn.o_proj")
    assert not excluded_by_reader(patterns, "model.layers.11.self_attn.o_proj")


def test_readers_leave_out_experts_that_are_stacked_in_one_tensor_and_stay_as_they_are(tmp_path):
    layer = "model.layers.0"
    tensors = {
        f"{layer}.self_attn.o_proj.weight": torch.ones(64, 64, dtype=torch.bfloat16),
        f"{layer}.mlp.experts.gate_up_proj": torch.ones(2, 64, 128, dtype=torch.bfloat16),
        f"{layer}.mlp.experts.down_proj": torch.ones(2, 64, 64, dtype=torch.bfloat16),
        f"{layer}.mlp.experts.down_proj_bias": torch.ones(2, 64, dtype=torch.bfloat16),
    }
    plan = plan_quantize(write_folder(tmp_path / "target", tensors), QuantizeOptions(scheme_named("ptpc_fp8")))
    assert plan.selection.quantized == (f"{layer}.self_attn.o_proj",)
    patterns = reader_patterns(plan.selection)
    for name in (f"{layer}.mlp.experts", f"language_model.{layer}.mlp.experts"):
        assert excluded_by_reader(patterns, name), name
    assert not excluded_by_reader(patterns, f"{layer}.self_attn.o_proj")
    assert f"{layer}.mlp.experts" in plan.quantization_config()["exclude"]
