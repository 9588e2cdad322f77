import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.summary import summarise
from slipstream.cli.main import app
from tiny_families import folder_of

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


def test_a_draft_is_told_with_the_published_targets_whose_sizes_it_has(tmp_path):
    sizes = {"hidden_size": 4096, "vocab_size": 151936, "eagle_config": None, "draft_vocab_size": 32000}
    tensors = {"fc.weight": torch.zeros(2, 2)}
    both = summarise(open_folder(tmp_path, {**DRAFT, **sizes}, tensors))
    assert both.same_sizes == ("Qwen3-8B and Qwen3-VL-8B", "Qwen3-235B-A22B and Qwen3-VL-235B-A22B")
    late = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}
    assert summarise(open_folder(tmp_path, {**DRAFT, **sizes, **late}, tensors)).same_sizes == both.same_sizes[1:]


def test_inspect_says_whether_a_draft_fits_a_target_and_why_not(tmp_path):
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    open_folder(tmp_path / "draft", DRAFT, {"fc.weight": torch.zeros(64, 192)})
    target = {key: value for key, value in DRAFT.items() if key not in ("draft_vocab_size", "eagle_config")}
    target |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}

    def said(**changes):
        open_folder(tmp_path / "target", target | changes, {"w": torch.zeros(2)})
        command = ["inspect", str(tmp_path / "draft"), "--target", str(tmp_path / "target")]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "yes, by its sizes and captured layers" in said()
    assert "hidden size of its target is 64, the target's is 128" in said(hidden_size=128)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gpt-oss", ["2 block(s): the last 7 keys; 2 block(s): all keys; a learned score for no key"]),
        ("Llama 4", ["3 block(s): chunks of 16 keys; 1 block(s): all keys, no positions"]),
        ("Gemma 4", ["the last 7 keys", "2 block(s): all keys, 1 key head(s) of 32", "8 of 32 dimensions turned"]),
        ("Qwen3-MoE", []),
    ],
)
def test_inspect_says_what_tokens_see(family, said, tmp_path):
    result = CliRunner().invoke(app, ["inspect", str(folder_of(family, tmp_path))], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert all(words in result.output for words in said)
    assert ("attention" in result.output) == bool(said)


def test_inspect_says_how_a_draft_reads_its_layers_once_and_how_far_it_looks(tmp_path, caplog):
    config = DRAFT | {"sliding_window": 512, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 15, 28]}}
    open_folder(tmp_path, config, {"fc.weight": torch.zeros(64, 192)})
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "300"})
    assert "the last 512 keys" in result.output
    assert len([record for record in caplog.records if "do not tell their convention" in record.getMessage()]) == 1
