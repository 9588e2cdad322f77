"""A draft written again for another engine: the same weights and the same meaning, in that engine's words."""

import dataclasses
import json
import shutil

import pytest
import torch

from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.draft_rewrite import rewrite_draft
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.names import canonical_draft_name, canonical_names
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError


def meaning(folder):
    opened = open_checkpoint(folder)
    names = canonical_names(opened.names(), canonical_draft_name)
    return draft_spec(opened.config, opened.folder, None), {ours: opened.tensor(name) for ours, name in names.items()}


@pytest.mark.parametrize("dialect", ["vllm", "speculators", "sglang"])
def test_a_rewritten_draft_is_the_same_draft(dialect, tmp_path):
    shipped = embedded_draft()
    rewrite_draft(shipped, dialect, tmp_path / "once", target="embedded")
    rewrite_draft(tmp_path / "once", "sglang", tmp_path / "back")
    spec, tensors = meaning(shipped)
    for folder in (tmp_path / "once", tmp_path / "back"):
        other_spec, others = meaning(folder)
        assert dataclasses.replace(other_spec, architecture=spec.architecture) == spec
        assert others.keys() == tensors.keys()
        assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


def test_vllm_is_told_captured_layers_in_its_own_counting(tmp_path):
    rewrite_draft(embedded_draft(), "vllm", tmp_path / "draft")
    config = open_checkpoint(tmp_path / "draft").config
    assert config["eagle_aux_hidden_state_layer_ids"] == config["slipstream"]["captured_layers"] == [2, 15, 27]


def test_speculators_is_told_the_architecture_of_a_target_that_is_here(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    for target, known in ((tmp_path / "target", ["Qwen3ForCausalLM"]), ("org/target", [])):
        rewrite_draft(embedded_draft(), "speculators", tmp_path / str(len(known)), str(target))
        written = open_checkpoint(tmp_path / str(len(known))).config["speculators_config"]["verifier"]
        assert written == {"name_or_path": str(target), "architectures": known}


def test_a_quantized_draft_is_refused_since_its_scheme_names_tensors(tmp_path):
    shipped = embedded_draft()
    folder = tmp_path / "quantized"
    folder.mkdir()
    for file in shipped.iterdir():
        shutil.copyfile(file, folder / file.name)
    config = {**open_checkpoint(shipped).config, "quantization_config": {"quant_method": "quark"}}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="then quantize"):
        rewrite_draft(folder, "vllm", tmp_path / "out")
