import json

import pytest
import torch
from safetensors.torch import save_file

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.summary import summarise

DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": 128,
    "draft_vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
}
QUARK_INT4 = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_channel"}},
    "exclude": ["lm_head", "fc"],
}
COMPRESSED_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
    "ignore": ["lm_head"],
}


def open_folder(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_a_drafts_captured_layers_are_shown_as_spelled_and_as_meant(tmp_path):
    tensors = {"fc.weight": torch.zeros(64, 192).bfloat16(), "d2t": torch.zeros(32, dtype=torch.int64)}
    tensors["t2d"] = torch.zeros(128, dtype=torch.bool)
    summary = summarise(open_folder(tmp_path, DRAFT, tensors), target_layers=32)
    assert summary.kind == "draft"
    assert summary.captures is not None
    assert (summary.captures.raw, summary.captures.layers) == ((1, 15, 28), (2, 16, 29))
    assert summary.captures.convention == "block_output"
    assert summary.spec is not None and summary.spec.captured_layers == (2, 16, 29)
    assert [(row.dtype, row.num_parameters, row.nbytes) for row in summary.dtypes] == [
        ("BF16", 64 * 192, 64 * 192 * 2),
        ("I64", 0, 256),
        ("BOOL", 0, 128),
    ]
    assert summary.num_parameters == 64 * 192
    assert summary.files == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    ("quantization", "brief"),
    [
        (QUARK_INT4, "quark, weights int4 per_channel, 2 patterns left out"),
        (COMPRESSED_INT4, "compressed-tensors, weights 4 int group 32, 1 patterns left out"),
    ],
)
def test_packed_weights_are_counted_singly_and_the_scheme_is_named(tmp_path, quantization, brief):
    tensors = {
        "midlayer.mlp.up_proj.weight": torch.zeros(80, 8, dtype=torch.int32),
        "midlayer.mlp.up_proj.weight_scale": torch.zeros(80),
    }
    summary = summarise(open_folder(tmp_path, {**DRAFT, "quantization_config": quantization}, tensors))
    assert summary.num_parameters == 80 * 64
    assert summary.quantization == brief


def test_what_slipstream_cannot_run_is_still_described_with_the_reason(tmp_path):
    summary = summarise(open_folder(tmp_path, {"architectures": ["GPT2LMHeadModel"]}, {"w": torch.zeros(3, 2)}))
    assert (summary.kind, summary.spec, summary.num_parameters) == ("target", None, 6)
    assert summary.problem is not None and "GPT2LMHeadModel" in summary.problem
