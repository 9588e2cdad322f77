import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.checkpoint.config import DraftOrigin, draft_config, draft_spec
from slipstream.checkpoint.spec import DraftSpec, RopeSpec
from slipstream.errors import CheckpointError

SOURCE = Path("some/draft")
LAYERS = 32
DEFAULT = (2, 16, 29)  # k convention, 32 layers
IDS = "eagle_aux_hidden_state_layer_ids"
BLOCK = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
SAFEAILAB = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BLOCK, "draft_vocab_size": 32}
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **BLOCK,
    "draft_vocab_size": 32,
    "rope_theta": 500000.0,
    "eagle_config": {IDS: [1, 15, 28], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama", **BLOCK},
    "draft_vocab_size": 32,
    "norm_before_residual": True,
    IDS: [2, 16, 29],
}
NVIDIA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **BLOCK,
    "draft_vocab_size": 32,
    "eagle_config": {
        IDS: [1, 15, 28],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
}
MODEL_OPTIMIZER = {
    **NVIDIA,
    "eagle_config": {**NVIDIA["eagle_config"], "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1},
}
ANGELSLIM = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", **BLOCK, "draft_vocab_size": 32}
DEEPSPEC = {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    **BLOCK,
    "head_dim": 32,
    "target_layer_ids": [1, 8, 15, 22, 28],
    "ttt_length": 7,
}


def read(config, layers=LAYERS):
    return draft_spec(config, SOURCE, layers)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SAFEAILAB, {"captured_layers": None, "draft_vocab_size": 32, "residual": "raw", "feedback": "pre_norm"}),
        (SPECFORGE, {"captured_layers": DEFAULT, "rope": RopeSpec(500000.0, 16), "residual": "raw"}),
        (SPECULATORS, {"captured_layers": DEFAULT, "residual": "normed", "vocab_size": 128}),
        (NVIDIA, {"captured_layers": DEFAULT, "residual": "raw", "feature_norm": "none"}),
        (MODEL_OPTIMIZER, {"captured_layers": DEFAULT, "residual": "raw", "feature_norm": "none"}),
        (ANGELSLIM, {"captured_layers": None, "num_features": 3}),
        (
            DEEPSPEC,
            {"captured_layers": (2, 9, 16, 23, 29), "num_features": 5, "qk_norm": True, "draft_vocab_size": 128},
        ),
    ],
    ids=["safeailab", "specforge", "speculators", "nvidia", "model-optimizer", "angelslim", "deepspec"],
)
def test_every_dialect_becomes_one_spec(config, expected):
    spec = read(config)
    assert {key: getattr(spec, key) for key in expected} == expected
    assert (spec.hidden_size, spec.target_hidden_size, spec.num_layers) == (64, 64, 1)


def test_a_draft_without_rope_theta_keeps_the_old_default_rather_than_its_targets():
    assert read(SAFEAILAB).rope.theta == 10000.0


@pytest.mark.parametrize(
    ("ids", "place", "extra", "expected"),
    [
        ([1, 15, 28], "eagle_config", {}, (2, 16, 29)),
        ([2, 16, 29], "eagle_config", {}, (2, 16, 29)),
        ([2, 16, 29], "top", {}, (2, 16, 29)),
        ([20, 26, 32], "eagle_config", {}, (20, 26, 32)),  # 32 of 32 layers: only the state after all blocks
        ([5, 10, 20], "eagle_config", {}, (6, 11, 21)),
        ([5, 10, 20], "top", {}, (5, 10, 20)),
        ([2, 16, 29], "eagle_config", {"capture_convention": "block_output"}, (3, 17, 30)),
        ([1, 15, 28], "top", {"capture_convention": "blocks_applied"}, (1, 15, 28)),
        ([1, 15, 28], "eagle_config", {"slipstream": {"captured_layers": [4, 5, 6]}}, (4, 5, 6)),
    ],
)
def test_captured_layers_get_one_meaning(ids, place, extra, expected):
    config = {**SPECFORGE, "eagle_config": {}, **extra}
    config = {**config, "eagle_config": {IDS: ids}} if place == "eagle_config" else {**config, IDS: ids}
    assert read(config).captured_layers == expected


def test_speculators_ids_count_blocks_even_when_the_first_is_1():
    assert read({**SPECULATORS, IDS: [1, 15, 28]}).captured_layers == (1, 15, 28)


def test_both_readings_are_logged_and_a_guess_is_a_warning(caplog):
    with caplog.at_level(logging.INFO):
        read(SPECFORGE)
    assert "[1, 15, 28]" in caplog.text
    assert "[2, 16, 29]" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    read({**SPECFORGE, "eagle_config": {IDS: [5, 10, 20]}})
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]


def test_nothing_is_said_of_a_draft_that_slipstream_wrote(caplog):
    with caplog.at_level(logging.INFO):
        read({**SPECFORGE, "norm_output": True, "slipstream": {"captured_layers": [4, 5, 6]}})
    assert not caplog.records


def test_speculators_absent_flag_is_read_as_vllm_reads_it_and_other_dialects_as_raw():
    without = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    assert read(without).residual == "normed"
    assert read({**SPECULATORS, "norm_before_residual": False}).residual == "raw"
    assert read(SPECFORGE).residual == "raw"


def test_speculators_leaves_out_what_equals_transformers_defaults():
    config = {**SPECULATORS, "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1}}
    spec = read(config)
    assert (spec.hidden_size, spec.vocab_size, spec.num_heads, spec.head_dim) == (4096, 32000, 32, 128)
    spec = read({**SPECULATORS, "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 1}})
    assert (spec.head_dim, spec.intermediate_size, spec.qk_norm) == (128, 22016, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fc_norm": True}, {"feature_norm": "per_layer"}),
        ({"use_aux_norm": True}, {"feature_norm": "per_layer"}),
        ({"norm_before_fc": True}, {"feature_norm": "concat"}),
        ({"eagle_config": {"norm_before_fc": True}}, {"feature_norm": "concat"}),
        ({"norm_output": True}, {"feedback": "post_norm"}),
        ({"draft_vocab_size": None}, {"draft_vocab_size": 128}),
        ({"target_hidden_size": 96}, {"target_hidden_size": 96}),
        ({"num_aux_hidden_states": 4, "eagle_config": None}, {"num_features": 4}),
        ({"sliding_window": 64}, {"sliding_window": 64}),
        ({"sliding_window": 64, "use_sliding_window": False}, {"sliding_window": None}),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, {"sliding_window": None}),
        ({"torch_dtype": "float16"}, {"dtype": "float16"}),
    ],
)
def test_flags_are_read(changes, expected):
    spec = read({**SPECFORGE, **changes})
    assert {key: getattr(spec, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SPECFORGE, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, r"\(MLA\).*LlamaForCausalLMEagle3"),
        ({**SPECFORGE, "kv_lora_rank": 512}, r"\(MLA\)"),
        ({**SPECFORGE, "architectures": ["MambaModel"]}, "'MambaModel'.*It reads .*speculators_model_type"),
        ({**SPECFORGE, "architectures": None}, "'none'"),
        ({"architectures": ["LlamaForCausalLM"], **BLOCK}, "neither 'draft_vocab_size' nor 'eagle_config'"),
        ({**SPECULATORS, "speculators_model_type": "peagle"}, "'mask_token_id' is missing"),
        ({**SPECULATORS, "transformer_layer_config": {"model_type": "gpt2"}}, "transformer_layer_config.model_type"),
        ({**SPECFORGE, "fc_norm": True, "norm_before_fc": True}, "together with 'fc_norm'"),
        ({**SPECFORGE, "draft_vocab_size": 129}, "more than vocab_size = 128"),
        ({**SPECFORGE, "num_aux_hidden_states": 2}, "3 captured layers are named"),
        ({**SPECFORGE, IDS: [2, 16, 29]}, "make them agree"),
        ({**SPECFORGE, "eagle_config": {IDS: [1, 15, 40]}}, r"a target of 32 layers does not have"),
        ({**SPECFORGE, "eagle_config": {IDS: []}}, "empty list"),
        ({**SPECFORGE, "eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        (
            {**NVIDIA, "eagle_config": {"parallel_draft_step": 2}},
            "eagle_config.parallel_draft_step' is 2: .*Medusa heads",
        ),
        ({**SPECFORGE, "capture_convention": "later"}, "blocks_applied or block_output"),
        ({**SPECFORGE, "num_key_value_heads": 3}, "num_attention_heads' is 4, no multiple of num_key_value_heads = 3"),
        ({**SPECFORGE, "architectures": ["Glm4MoeForCausalLMEagle3"], "use_moe": True}, "dense feed-forward part"),
        ({key: value for key, value in SPECFORGE.items() if key != "hidden_size"}, "'hidden_size' is missing"),
    ],
)
def test_a_draft_that_cannot_be_read_is_refused_by_file_and_field(config, message):
    with pytest.raises(CheckpointError, match=rf"^some/draft/config\.json: .*{message}"):
        read(config)


specs = st.builds(
    DraftSpec,
    architecture=st.just("any"),
    vocab_size=st.just(128),
    draft_vocab_size=st.sampled_from([32, 128]),
    hidden_size=st.just(64),
    target_hidden_size=st.sampled_from([64, 96]),
    intermediate_size=st.just(80),
    num_layers=st.integers(1, 3),
    num_heads=st.just(4),
    num_kv_heads=st.sampled_from([2, 4]),
    head_dim=st.sampled_from([16, 32]),
    rms_eps=st.just(1e-5),
    rope=st.sampled_from([RopeSpec(1e5, 16), RopeSpec(5e5, 16, "llama3", 8.0, 8192)]),
    max_position=st.just(2048),
    captured_layers=st.none() | st.tuples(st.integers(1, 10), st.integers(11, 20), st.integers(21, 32)),
    feedback=st.sampled_from(["pre_norm", "post_norm"]),
    residual=st.sampled_from(["raw", "normed"]),
    feature_norm=st.sampled_from(["none", "concat", "per_layer"]),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    sliding_window=st.none() | st.just(64),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)


def write(spec, dialect):
    return json.loads(json.dumps(draft_config(spec, dialect, DraftOrigin("org/target"))))


def without_name(spec):
    return replace(spec, architecture="", rope=replace(spec.rope, rotary_dim=spec.head_dim))


@given(spec=specs, dialect=st.sampled_from(["sglang", "vllm", "speculators"]), ours=st.booleans())
def test_a_written_draft_config_reads_back_as_the_same_spec(spec, dialect, ours):
    spec = without_name(spec)
    if dialect == "sglang" and (spec.residual == "normed" or spec.qk_norm):
        with pytest.raises(CheckpointError, match="SGLang"):
            write(spec, dialect)
        return
    config = write(spec, dialect)
    if not ours:  # the reader's own fields alone must say the same
        del config["slipstream"]
    assert without_name(read(config)) == spec


def test_each_engine_finds_the_captured_layers_in_its_own_convention_and_place():
    spec = read(SPECFORGE)
    assert write(spec, "sglang")["eagle_config"][IDS] == [1, 15, 28]  # it adds one
    assert IDS not in write(spec, "sglang")
    assert write(spec, "vllm")["eagle_config"][IDS] == write(spec, "vllm")[IDS] == [2, 16, 29]
    assert write(spec, "speculators")[IDS] == [2, 16, 29]
    for dialect in ("sglang", "vllm", "speculators"):
        config = write(spec, dialect)
        assert config["slipstream"]["captured_layers"] == [2, 16, 29]
        assert config["norm_before_residual"] is False
        block = config.get("transformer_layer_config", config)
        assert block["rope_theta"] == block["rope_parameters"]["rope_theta"] == 500000.0
    verifier = write(spec, "speculators")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": []}, "none is known, so none is named"
    known = draft_config(spec, "speculators", DraftOrigin("org/target", "Qwen3ForCausalLM"))["speculators_config"]
    assert known["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(CheckpointError, match="--target"):
        draft_config(spec, "speculators")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slipstream": {"captured_layers": []}}, "captured_layers' is an empty list"),
        ({"hidden_act": "gelu"}, "hidden_act' is 'gelu'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers' is 1000000"),
    ],
)
def test_a_draft_that_cannot_be_is_refused_by_field(change, words):
    with pytest.raises(CheckpointError, match=words):
        draft_spec({**SPECFORGE, **change}, SOURCE, LAYERS)
