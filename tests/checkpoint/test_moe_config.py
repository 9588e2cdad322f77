"""The published configs of Kimi-K2.5 and MiniMax-M2.5 are read to the last tensor, and `inspect` tells of them."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.summary import summarise
from slipstream.cli.main import app
from slipstream.errors import CheckpointError
from slipstream.models.accounting import places
from slipstream.models.target import Target
from tiny_moe import as_kimi, deepseek, minimax, save, tensors_of, write

SOURCE = Path("some/model")
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vision_config": {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "attn_type_list": [1] * 62,
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Target(model_spec(config, SOURCE), max_position=8)
    return {name: place.shape for name, place in places(model).items()}


def count(named: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in named.values())


def test_kimi_at_full_size_has_the_published_shapes():
    spec = model_spec(KIMI, SOURCE)
    assert spec.mla is not None and spec.moe is not None
    assert spec.mla.scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    assert (spec.rope.attention_factor, spec.rope.rotary_dim) == (1.0, 64)
    assert (spec.bos_token_id, spec.eos_token_ids) == (163584, (163585,))
    found = shapes(KIMI)
    block = {name.removeprefix("layers.1."): shape for name, shape in found.items() if name.startswith("layers.1.")}
    assert len(block) == 7 + 2 + 2 + 3 + 3 * 384
    assert block["self_attn.q_a_proj.weight"] == (1536, 7168)
    assert block["self_attn.q_b_proj.weight"] == (12288, 1536)
    assert block["self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert block["self_attn.kv_b_proj.weight"] == (16384, 512)
    assert block["self_attn.o_proj.weight"] == (7168, 8192)
    assert block["mlp.gate.weight"] == (384, 7168) and block["mlp.gate.e_score_correction_bias"] == (384,)
    assert block["mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert "layers.0.mlp.gate_proj.weight" in found and "layers.0.mlp.gate.weight" not in found
    assert count(found) == pytest.approx(1.026e12, rel=1e-3)


def test_a_token_of_kimi_takes_one_latent_a_layer():
    with torch.device("meta"):
        shape = Target(model_spec(KIMI, SOURCE), max_position=8).kv_shape
    assert shape.bytes_per_token(torch.bfloat16) == 576 * 2 * 61


def test_minimax_at_full_size_has_the_published_shapes():
    spec = model_spec(MINIMAX, SOURCE)
    assert (spec.qk_norm, spec.rope.rotary_dim, spec.rope.theta) == ("full", 64, 5e6)
    found = shapes(MINIMAX)
    assert found["layers.0.self_attn.q_norm.weight"] == (6144,) and found["layers.0.self_attn.k_norm.weight"] == (1024,)
    assert found["layers.61.mlp.experts.255.up_proj.weight"] == (1536, 3072)
    assert count(found) == pytest.approx(228.7e9, rel=1e-3)


def test_inspect_tells_of_latents_experts_and_nested_quantization(tmp_path):
    plain = save(deepseek(), tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
        },
    }
    kimi = as_kimi(write(tmp_path / "int4", config, tensors_of(plain)), tmp_path / "kimi")
    result = CliRunner().invoke(app, ["inspect", str(kimi)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (
        "KimiK25ForConditionalGeneration",
        "compressed-tensors, weights 4 int group 32",
        "one latent of 32 + 8 rotary per token, queries through 48",
        "4 of 12, 32 wide, and one of 32 for all; the first 1 block(s) dense",
        "yarn scaling by 8",
    ):
        assert words in result.output
    assert "cannot run" not in result.output


def test_scales_of_blocks_are_no_parameters(tmp_path):
    config = json.loads((save(minimax(), tmp_path / "plain") / "config.json").read_text())
    config["quantization_config"] = MINIMAX["quantization_config"]
    tensors = {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.zeros(1, 1)}
    summary = summarise(open_checkpoint(write(tmp_path / "fp8", config, tensors)))
    assert summary.num_parameters == 16
    assert summary.quantization == "fp8, blocks of 128 x 128, 3 patterns left out"


def test_what_a_nested_config_lacks_is_named_where_it_belongs():
    text = {key: value for key, value in KIMI["text_config"].items() if key != "n_routed_experts"}
    with pytest.raises(CheckpointError, match=r"field 'text_config\.n_routed_experts' is missing"):
        model_spec({**KIMI, "text_config": text}, SOURCE)
