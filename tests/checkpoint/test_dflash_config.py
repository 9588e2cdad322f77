"""DFlash drafts as their authors and speculators write them: what config.json means, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from slipstream.checkpoint.dflash_config import dflash_spec
from slipstream.checkpoint.draft_config import draft_spec, is_dflash, is_draft
from slipstream.cli.main import app
from slipstream.errors import CheckpointError, SlipstreamError

# As z-lab's drafts for Qwen3-8B are laid out, without what has no part in it.
QWEN = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SLIDING = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 18, 33],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 6144, "rope_parameters": {"rope_theta": 1e6},
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024,
    },
}  # fmt: skip


def test_the_authors_name_blocks_whose_output_is_captured_and_masks_inside_dflash_config(tmp_path):
    spec = dflash_spec(QWEN, tmp_path, 36)
    assert spec.captured_layers == (2, 10, 18, 26, 34) and spec.num_features == 5 and spec.target_layers == 36
    assert (spec.block_size, spec.mask_token_id, spec.head_dim, spec.rope.theta) == (16, 151669, 128, 1e6)
    assert spec.windows == (None,) * 5 and spec.causal == (False,) * 5 and spec.widest_window is None
    assert is_draft(QWEN) and is_dflash(QWEN)


def test_layers_with_a_window_see_only_what_is_before_them_unless_the_file_says_otherwise(tmp_path):
    spec = dflash_spec({**QWEN, **SLIDING}, tmp_path, None)
    assert spec.windows == (2048,) * 4 + (None,) and spec.causal == (True,) * 4 + (False,)
    inside = {**QWEN["dflash_config"], "causal": True, "block_size": 12, "num_anchors": 4096}
    spec = dflash_spec({**QWEN, **SLIDING, "block_size": None, "dflash_config": inside}, tmp_path, None)
    assert spec.causal == (True,) * 5 and spec.block_size == 12


def test_speculators_counts_blocks_and_leaves_out_what_equals_a_default(tmp_path):
    spec = dflash_spec(SPECULATORS, tmp_path, None)
    assert spec.captured_layers == (2, 18, 33) and (spec.head_dim, spec.max_position) == (128, 32768)
    assert (spec.draft_vocab_size, spec.vocab_size, spec.block_size) == (32000, 151936, 8)
    assert spec.windows == (1024, None) and spec.causal == (True, False)
    assert is_draft(SPECULATORS) and is_dflash(SPECULATORS)


def changed(config, path, value):
    """Return a config with one field, however deep, of another value."""
    first, _, rest = path.partition(".")
    return {**config, first: changed(config.get(first, {}), rest, value) if rest else value}


@pytest.mark.parametrize(
    ("base", "field", "value", "words"),
    [
        (QWEN, "block_size", None, "block_size.*is missing"),
        (QWEN, "block_size", 1, "at least 2"),
        (QWEN, "dflash_config.mask_token_id", None, r"dflash_config\.mask_token_id.*is missing"),
        (QWEN, "dflash_config.mask_token_id", 151936, "mask_token_id"),
        (QWEN, "dflash_config.target_layer_ids", [], r"dflash_config\.target_layer_ids.*empty"),
        (QWEN, "dflash_config.target_layer_ids", [1, 36], "after .2, 37. blocks"),
        (QWEN, "eagle_aux_hidden_state_layer_ids", [1, 9, 17, 25, 33], "make them agree"),
        (QWEN, "dflash_config.projector_type", "domino", "is 'domino'; slipstream computes DFlash with 'dflash' only"),
        (QWEN, "dflash_config.causal_head", True, "causal_head.*not known"),
        (QWEN, "dflash_config.attention_sink_bias", True, "with False only"),
        (QWEN, "dflash_config.use_aux_hidden_state", False, "with True only"),
        (QWEN, "is_neox_style", False, "with True only"),
        (QWEN, "logit_scale", 0.5, "logit_scale"),
        (QWEN, "model_type", "laguna", "qwen3 blocks"),
        (QWEN, "hidden_act", "gelu", "silu"),
        (QWEN, "layer_types", ["full_attention"] * 4, "5 layers"),
        (QWEN, "layer_types", ["linear_attention"] * 5, "full_attention or sliding_attention"),
        ({**QWEN, "layer_types": None}, "use_sliding_window", True, "layer_types"),
        ({**QWEN, **SLIDING}, "is_causal", False, "a window whose tokens see those after them"),
        (QWEN, "num_key_value_heads", 5, "no multiple"),
        (QWEN, "draft_vocab_size", 151937, "draft_vocab_size"),
        (SPECULATORS, "aux_hidden_state_layer_ids", None, "aux_hidden_state_layer_ids"),
        (SPECULATORS, "sample_from_anchor", True, "sample_from_anchor.*with False only"),
        (SPECULATORS, "sliding_window_non_causal", True, "a window whose tokens see"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_in_a_sentence(base, field, value, words, tmp_path):
    with pytest.raises(CheckpointError, match=rf"config\.json: field .*{words}"):
        dflash_spec(changed(base, field, value), tmp_path, 36)


def test_what_takes_an_eagle_3_draft_says_that_dflash_is_only_served(tmp_path):
    for config in (QWEN, SPECULATORS):
        with pytest.raises(CheckpointError, match=r"is a DFlash draft.*serves \(--draft\).*train TARGET"):
            draft_spec(config, tmp_path, None)


def test_any_one_damaged_field_is_a_sentence_or_another_draft(tmp_path):
    for field in QWEN:
        for value in (None, -1, 0, True, "x", [], {}, 1 << 40, [None], 0.5):
            try:
                dflash_spec({**QWEN, field: value}, tmp_path, 36)
            except SlipstreamError as error:
                assert len(str(error)) < 600


def test_inspect_names_a_dflash_draft_and_what_it_sees(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **SLIDING}))
    save_file({"fc.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    for words in ("DFlashDraftModel", "after [2, 10, 18, 26, 34] blocks", "tokens of a block", "151669", "Qwen3-8B",
                  "4 layer(s): the last 2048 keys, causal; 1 layer(s): all keys, both ways"):  # fmt: skip
        assert words in shown
