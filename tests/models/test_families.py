"""Every family gives transformers' logits, over texts longer than every window; the CPU kernels keep their bits."""

import json

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels import select
from slipstream.models.load import load_target
from tiny_families import CONFIGS, folder_of, some_tokens, tiny
from tiny_moe import passes, save, tensors_of, write

CPU = torch.device("cpu")
T = 40


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_and_do_not_depend_on_chunks(name, tmp_path):
    theirs = tiny(name)
    ours = load_target(open_checkpoint(save(theirs, tmp_path)), torch.float32, CPU)
    tokens_T = some_tokens(T)
    with torch.inference_mode():
        seen = theirs(tokens_T[None], output_hidden_states=True)
    expected_TV = seen.logits[0]
    assert expected_TV.std() > 0.1, "logits that say nothing prove nothing"
    logits_TV, first_TD = passes(ours, tokens_T, [T], prompt=True)
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
    torch.testing.assert_close(first_TD, seen.hidden_states[1][0], atol=1e-4, rtol=0)
    whole, _ = passes(ours, tokens_T, [T], True, "auto")
    chunked, _ = passes(ours, tokens_T, [7, 20, 1, 12], True, "auto")
    torch.testing.assert_close(whole, expected_TV, atol=1e-4, rtol=0)
    if select(CPU).row_invariant:
        assert torch.equal(whole, chunked)


def test_stacked_experts_load_alike_whichever_way_round_they_are_stored(tmp_path):
    """Qwen publishes matrices [in, out]; transformers 5 writes them [out, in]."""
    folder = folder_of("Qwen3-VL-MoE", tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: value.transpose(1, 2) if ".experts." in name else value for name, value in tensors_of(folder).items()
    }
    saved = load_target(open_checkpoint(folder), torch.float32, CPU)
    published = load_target(open_checkpoint(write(tmp_path / "published", config, tensors)), torch.float32, CPU)
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, published.get_parameter(name)), name


def test_a_flat_config_and_the_names_of_older_files_load_alike(tmp_path):
    """Qwen2.5-VL was published before transformers put the text part's fields and tensors a level down."""
    folder = folder_of("Qwen2.5-VL", tmp_path / "nested")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {
        **text, **config, "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }  # fmt: skip
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in tensors_of(folder).items()
    }
    nested = load_target(open_checkpoint(folder), torch.float32, CPU)
    older = load_target(open_checkpoint(write(tmp_path / "flat", flat, tensors)), torch.float32, CPU)
    assert older.spec == nested.spec
    for name, parameter in nested.named_parameters():
        assert torch.equal(parameter, older.get_parameter(name)), name


def test_a_joined_tensor_of_another_height_is_named(tmp_path):
    folder = folder_of("Phi-4", tmp_path / "whole")
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(folder)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    cut = write(tmp_path / "cut", config, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \[127, 64\], where config.json speaks of 128 rows of q_proj"
    ):
        load_target(open_checkpoint(cut), torch.float32, CPU)


def test_long_contexts_turn_phi_by_its_long_divisors(tmp_path):
    source = open_checkpoint(folder_of("Phi-4-mini", tmp_path))
    short, long = (load_target(source, torch.float32, CPU, max_context=size).spec.rope.divisors for size in (32, 33))
    assert short[-1] == 1.5 and long[-1] == 5.0
