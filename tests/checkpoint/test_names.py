import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.checkpoint.names import (
    canonical_draft_name,
    canonical_names,
    canonical_target_name,
    draft_name,
    gguf_name,
    hf_name,
    is_harmless,
)
from slipstream.errors import CheckpointError

BLOCK_PARTS = [
    "hidden_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_norm.weight",
    "mlp.down_proj.weight",
]
CANONICAL = ["fc.weight", "fc_norm.1.weight", "input_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
CANONICAL += ["embed_tokens.weight", *(f"layers.0.{part}" for part in BLOCK_PARTS)]
CANONICAL += [f"layers.1.{part}" for part in BLOCK_PARTS[1:]]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"),
        ("aux_norm_low.weight", "fc_norm.0.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("model.aux_norm_high.weight", "fc_norm.2.weight"),
        ("model.fc.weight", "fc.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("draft_id_to_target_id", "d2t"),
        ("midlayer.self_attn.q_proj.weight_scale", "layers.0.self_attn.q_proj.weight_scale"),
    ],
)
def test_a_draft_tensor_has_one_name_whatever_wrote_it(theirs, ours):
    assert canonical_draft_name(theirs) == ours
    assert canonical_draft_name(ours) == ours


@given(name=st.sampled_from(CANONICAL), dialect=st.sampled_from(["sglang", "vllm", "speculators"]))
def test_a_dialects_draft_name_reads_back_as_ours(name, dialect):
    assert canonical_draft_name(draft_name(name, dialect)) == name


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "language_model."])
def test_a_target_tensor_has_one_name_with_any_prefix(prefix):
    for name in ("embed_tokens.weight", "layers.3.self_attn.q_proj.bias", "norm.weight"):
        assert canonical_target_name(prefix + name) == f"model.{name}"


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"])
def test_the_head_stands_beside_the_model(name):
    assert canonical_target_name(name) == "lm_head.weight"


def test_buffers_every_model_recomputes_are_left_out_and_two_spellings_are_refused():
    assert is_harmless("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_harmless("model.layers.0.self_attn.q_proj.weight")
    names = ["midlayer.mlp.up_proj.weight", "midlayer.self_attn.rotary_emb.inv_freq"]
    assert canonical_names(names, canonical_draft_name) == {"layers.0.mlp.up_proj.weight": names[0]}
    with pytest.raises(CheckpointError, match=r"'fc.weight' and 'model.fc.weight'"):
        canonical_names(["fc.weight", "model.fc.weight"], canonical_draft_name)


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
    ],
)
def test_gguf_and_hugging_face_names_translate_both_ways(gguf, hf):
    assert hf_name(gguf) == hf
    assert gguf_name(hf) == gguf


def test_names_outside_the_llama_family_have_no_translation():
    assert hf_name("blk.0.ffn_gate_exps.weight") is None
    assert hf_name("rope_freqs.weight") is None
    assert gguf_name("fc.weight") is None
