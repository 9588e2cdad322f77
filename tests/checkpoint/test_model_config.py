import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.checkpoint.config import model_config, model_spec
from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.errors import CheckpointError

SOURCE = Path("some/model")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(architecture="LlamaForCausalLM", **changes):
    return {"architectures": [architecture], **SMALL, **changes}


@pytest.mark.parametrize(
    "hf_config",
    [
        transformers.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], eos_token_id=[2, 5]),
        transformers.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True),
        transformers.MistralConfig(**SMALL, architectures=["MistralForCausalLM"], head_dim=32, sliding_window=16),
        transformers.Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
        transformers.Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"], head_dim=48),
    ],
    ids=lambda hf_config: hf_config.model_type,
)
def test_a_config_saved_by_transformers_is_read_and_written_back_so_that_transformers_agrees(hf_config, tmp_path):
    hf_config.save_pretrained(tmp_path)
    spec = model_spec(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    assert spec.num_layers == 6
    assert spec.num_kv_heads == 2
    assert spec.head_dim == hf_config.head_dim if hasattr(hf_config, "head_dim") else 16
    assert spec.qk_norm == (hf_config.model_type == "qwen3")
    assert spec.qkv_bias == (hf_config.model_type == "qwen2" or getattr(hf_config, "attention_bias", False))
    written = tmp_path / "written"
    written.mkdir()
    (written / "config.json").write_text(json.dumps(model_config(spec)))
    again = transformers.AutoConfig.from_pretrained(written)
    ours, theirs = again.to_dict(), hf_config.to_dict()
    for key in (*SMALL, "rope_parameters", "eos_token_id", "tie_word_embeddings", "sliding_window", "attention_bias"):
        assert key not in theirs or ours[key] == theirs[key], key
    assert model_spec(model_config(spec), SOURCE) == spec


def test_both_transformers_spellings_of_rope_mean_the_same():
    old = config(rope_theta=500000.0, rope_scaling=LLAMA3_SCALING)
    new = config(rope_parameters={"rope_theta": 500000.0, **LLAMA3_SCALING})
    assert model_spec(old, SOURCE).rope == model_spec(new, SOURCE).rope
    assert model_spec({**old, **new}, SOURCE).rope == model_spec(old, SOURCE).rope
    oldest = config(rope_theta=500000.0, rope_scaling={**LLAMA3_SCALING, "type": "llama3", "rope_type": None})
    assert model_spec(oldest, SOURCE).rope == model_spec(new, SOURCE).rope


def test_rope_spellings_that_disagree_are_refused_with_both_values():
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_theta = 500000, rope_theta = 10000"):
        model_spec(config(rope_theta=1e4, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), SOURCE)
    with pytest.raises(CheckpointError, match="make them agree"):
        model_spec(config(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=LLAMA3_SCALING), SOURCE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
    ],
)
def test_yarns_attention_factor_is_the_one_transformers_computes(scaling):
    hf_config = transformers.LlamaConfig(**SMALL, rope_parameters={"rope_theta": 1e4, **scaling})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](hf_config, "cpu")
    rope = model_spec(config(rope_theta=1e4, rope_scaling=scaling), SOURCE).rope
    assert rope.attention_factor == pytest.approx(expected)
    assert (rope.factor, rope.original_max_position) == (scaling["factor"], 32)


def test_defaults_for_absent_fields_are_those_of_transformers():
    spec = model_spec(config(num_key_value_heads=None), SOURCE)
    reference = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": None})
    assert spec.num_kv_heads == reference.num_key_value_heads == 4
    assert spec.rms_eps == reference.rms_norm_eps
    assert spec.rope.theta == reference.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == reference.tie_word_embeddings
    assert (
        model_spec(config("MistralForCausalLM"), SOURCE).sliding_window == transformers.MistralConfig().sliding_window
    )
    assert model_spec(config("MistralForCausalLM", sliding_window=None), SOURCE).sliding_window is None
    assert model_spec(config("Qwen3ForCausalLM"), SOURCE).head_dim == transformers.Qwen3Config().head_dim


def test_qwens_window_is_read_only_when_it_is_switched_on_for_every_layer():
    assert model_spec(config("Qwen2ForCausalLM", sliding_window=32), SOURCE).sliding_window is None
    on = config("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=True)
    assert model_spec({**on, "max_window_layers": 6}, SOURCE).sliding_window is None
    assert model_spec({**on, "max_window_layers": 0}, SOURCE).sliding_window == 32
    with pytest.raises(CheckpointError, match="max_window_layers"):
        model_spec({**on, "max_window_layers": 3}, SOURCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0 where a whole number of at least 1"),
        ({"num_hidden_layers": "six"}, "'num_hidden_layers' is 'six'"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1"),
        ({"num_attention_heads": 5}, "num_attention_heads|head_dim"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads = 3"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"architectures": None}, "'architectures' is missing.*LlamaForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not one.*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'rope_scaling.rope_type' is 'dynamic'.*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'rope_scaling.factor' is missing"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear' where an object"),
        ({"eos_token_id": ["</s>"]}, "'eos_token_id'"),
    ],
)
def test_a_field_that_cannot_be_read_is_named_with_its_file(changes, message):
    with pytest.raises(CheckpointError, match=rf"^some/model/config\.json: .*({message})"):
        model_spec(config(**changes), SOURCE)


ropes = st.one_of(
    st.builds(RopeSpec, theta=st.sampled_from([1e4, 1e5, 5e5]), rotary_dim=st.sampled_from([8, 16])),
    st.builds(RopeSpec, theta=st.just(1e4), rotary_dim=st.just(16), scaling=st.just("linear"), factor=st.just(2.0)),
    st.builds(
        RopeSpec,
        theta=st.just(5e5),
        rotary_dim=st.just(16),
        scaling=st.just("llama3"),
        factor=st.floats(1, 64),
        original_max_position=st.integers(1, 9000),
    ),
    st.builds(
        RopeSpec,
        theta=st.just(5e5),
        rotary_dim=st.just(16),
        scaling=st.just("yarn"),
        factor=st.floats(1, 64),
        original_max_position=st.integers(1, 9000),
        beta_fast=st.floats(1, 64),
        attention_factor=st.floats(0.5, 2),
    ),
)


@given(
    rope=ropes,
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    window=st.none() | st.integers(1, 4096),
    tie=st.booleans(),
    bias=st.booleans(),
    eos=st.lists(st.integers(0, 95), max_size=3),
)
def test_a_written_target_config_reads_back_as_the_same_spec(rope, architecture, window, tie, bias, eos):
    spec = ModelSpec(
        architecture, 96, 64, 80, 6, 4, 2, 16, 1e-5, rope, 128, tie, eos_token_ids=tuple(eos), bos_token_id=1,
        qkv_bias=bias or architecture == "Qwen2ForCausalLM", output_bias=bias and architecture != "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM", dtype="bfloat16",
    )  # fmt: skip
    if architecture != "LlamaForCausalLM":
        spec = replace(spec, sliding_window=window)
    assert model_spec(json.loads(json.dumps(model_config(spec))), SOURCE) == spec


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 256},
            r"256 experts.*Ling 2.*Qwen3MoeForCausalLM",
        ),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, r"by an index\. The nearest it runs is DeepseekV3ForCausalLM"),
        ({"architectures": ["NewMlaForCausalLM"], "kv_lora_rank": 8}, "nearest it runs is DeepseekV3ForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "6 blocks, 64 wide.*nearest it runs is LlamaForCausalLM"),
    ],
)
def test_an_unknown_family_gets_a_sentence_with_the_nearest_one_and_what_to_do(fields, words):
    with pytest.raises(CheckpointError, match=rf"{words}.*slipstream serve MODEL --draft DRAFT --engine vllm"):
        model_spec({**config(), **fields}, SOURCE)
