"""A checkpoint that is not what it claims to be is refused with a sentence that names file, tensor or value."""

import json

import pytest
import torch
from draft_files import BASE, tensors
from safetensors.torch import load_file, save_file

from slipstream.checkpoint.config import model_config
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError, DraftMismatchError
from slipstream.models.accounting import places
from slipstream.models.load import load_draft, load_target
from tiny import TARGET_SPEC, tiny_target

CPU = torch.device("cpu")
TARGET = tiny_target()


@pytest.fixture
def target_folder(tmp_path):
    """A tiny target on disk."""
    named = {}
    for name, place in places(TARGET).items():
        rows = getattr(place.module, place.parameter)[place.start : place.start + place.shape[0]]
        named[name if name.startswith("lm_head") else f"model.{name}"] = rows.clone()
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model_config(TARGET_SPEC)))
    return tmp_path


def change(folder, **changes):
    """Replace (or with None remove) tensors of a folder's one file; names use __ for dots."""
    path = folder / "model.safetensors"
    named = load_file(path)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del named[key]
        else:
            named[key] = value
    save_file(named, path)


def load(folder):
    return load_target(open_checkpoint(folder), torch.float32, CPU)


def test_a_written_target_loads_back_bit_for_bit(target_folder):
    loaded = load(target_folder)
    for name, parameter in TARGET.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_unknown_missing_and_misshapen_tensors_are_all_listed(target_folder):
    change(
        target_folder,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__bias=torch.zeros(32),
        model__layers__1__mlp__up_proj__weight=torch.zeros(7, 32),
    )
    with pytest.raises(CheckpointError) as error:
        load(target_folder)
    text = str(error.value)
    assert str(target_folder) in text
    assert "missing model.norm.weight [32]" in text
    assert "unknown model.layers.0.self_attn.q_proj.bias [32]" in text
    assert "misshapen model.layers.1.mlp.up_proj.weight [7, 32], expected [48, 32]" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(target_folder, value):
    change(target_folder, model__norm__weight=torch.full((32,), value))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or infinite"):
        load(target_folder)


def test_numbers_whose_sum_is_too_large_for_their_type_are_read_all_the_same(target_folder):
    change(target_folder, model__norm__weight=torch.full((32,), 60_000.0, dtype=torch.float16))
    assert load(target_folder).norm.weight.eq(60_000).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_type_that_nothing_explains_are_refused(target_folder, dtype):
    change(target_folder, model__layers__0__self_attn__q_proj__weight=torch.ones(32, 32).to(dtype))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*q_proj\.weight is stored as"):
        load(target_folder)


@pytest.mark.parametrize("field", ["num_hidden_layers", "max_position_embeddings", "head_dim"])
def test_a_number_no_model_has_is_refused_before_memory_is_asked_for(target_folder, field):
    config = json.loads((target_folder / "config.json").read_text())
    (target_folder / "config.json").write_text(json.dumps({**config, field: 10**9}))
    with pytest.raises(CheckpointError, match=f"field '{field}' is 1000000000"):
        load(target_folder)


def test_a_truncated_file_is_named(target_folder):
    path = target_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(target_folder)


def test_a_tied_head_that_differs_is_refused(target_folder):
    config = json.loads((target_folder / "config.json").read_text())
    (target_folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="ties the head"):
        load(target_folder)


def write_draft(folder, config, named):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 64}, ["64", "32", "hidden size"]),
        ({"vocab_size": 99}, ["99", "61", "vocabulary"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 30]}}, ["31", "4 layers"]),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_values(tmp_path, changes, words):
    folder = write_draft(tmp_path / "draft", {**BASE, **changes}, tensors("midlayer"))
    with pytest.raises(CheckpointError) as error:
        load_draft(open_checkpoint(folder), TARGET, torch.float32)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_draft_for_another_width_is_a_mismatch(tmp_path):
    folder = write_draft(tmp_path / "draft", {**BASE, "target_hidden_size": 64}, tensors("midlayer"))
    with pytest.raises(DraftMismatchError):
        load_draft(open_checkpoint(folder), TARGET, torch.float32)


def test_a_draft_vocabulary_without_a_map_is_refused(tmp_path):
    named = tensors("midlayer")
    del named["d2t"], named["t2d"]
    folder = write_draft(tmp_path / "draft", BASE, named)
    with pytest.raises(CheckpointError, match="no d2t"):
        load_draft(open_checkpoint(folder), TARGET, torch.float32)


def test_maps_that_disagree_are_refused(tmp_path):
    named = tensors("midlayer")
    named["t2d"] = named["t2d"].roll(1)
    folder = write_draft(tmp_path / "draft", BASE, named)
    with pytest.raises(CheckpointError, match="disagree"):
        load_draft(open_checkpoint(folder), TARGET, torch.float32)


def test_a_map_out_of_range_is_refused(tmp_path):
    named = tensors("midlayer")
    named["d2t"] = named["d2t"] + 1000
    folder = write_draft(tmp_path / "draft", BASE, named)
    with pytest.raises(CheckpointError, match="d2t does not map"):
        load_draft(open_checkpoint(folder), TARGET, torch.float32)
