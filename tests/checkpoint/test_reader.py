import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.checkpoint.reader import CheckpointReader, open_checkpoint
from slipstream.errors import CheckpointError


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(5, 4, generator=generator),
        "b.weight": torch.randn(3, generator=generator).bfloat16(),
        "ids": torch.arange(7),
        "flags": torch.tensor([True, False]),
    }


def write_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for name, shard in shards.items():
        save_file(shard, folder / name)
    if index:
        weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def two_shards(tensors):
    first = {name: tensors[name] for name in ("a.weight", "ids")}
    second = {name: tensors[name] for name in ("b.weight", "flags")}
    return {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}


@pytest.mark.parametrize("layout", ["one file", "shards", "shards with index", "pickle"])
def test_every_layout_gives_the_same_tensors(tmp_path, tensors, layout):
    if layout == "pickle":
        folder = write_folder(tmp_path, {})
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "one file":
        folder = write_folder(tmp_path, {"model.safetensors": tensors})
    else:
        folder = write_folder(tmp_path, two_shards(tensors), index="index" in layout)
    source = open_checkpoint(folder)
    assert source.names() == sorted(tensors)
    for name, expected in tensors.items():
        assert torch.equal(source.tensor(name), expected)
        assert source.info(name).shape == tuple(expected.shape)
        assert source.info(name).nbytes == expected.numel() * expected.element_size()
    assert [source.info(name).dtype for name in ("a.weight", "b.weight", "ids", "flags")] == [
        "F32",
        "BF16",
        "I64",
        "BOOL",
    ]
    assert torch.equal(source.rows("a.weight", 1, 3), tensors["a.weight"][1:3])
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    assert source.folder == folder


def test_an_old_style_pickle_is_read_too(tmp_path, tensors):
    folder = write_folder(tmp_path, {})
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(CheckpointReader(folder).tensor("ids"), tensors["ids"])


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = write_folder(tmp_path, {})
    torch.save({"a": Path("code")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: holds more than tensors"):
        CheckpointReader(folder)


@settings(max_examples=30, deadline=None)
@given(cut=st.floats(min_value=0, max_value=1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, cut):
    folder = write_folder(tmp_path_factory.mktemp("cut"), {"model.safetensors": {"a": torch.ones(8, 8)}})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(truncated|corrupt)"):
        CheckpointReader(folder)


def test_a_truncated_pickle_is_refused_by_name(tmp_path, tensors):
    folder = write_folder(tmp_path, {})
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is truncated"):
        CheckpointReader(folder)


def test_a_corrupt_header_is_refused_by_name(tmp_path):
    folder = write_folder(tmp_path, {})
    (folder / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"{ not json at al" + bytes(32))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its safetensors header is corrupt"):
        CheckpointReader(folder)


def test_a_header_whose_shapes_do_not_fit_its_data_is_refused(tmp_path):
    folder = write_folder(tmp_path, {"model.safetensors": {"a": torch.ones(8, 8)}})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[8,8]", b"[8,9]"))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: .*shape \[8, 9\] and 256 bytes, which do not agree"
    ):
        CheckpointReader(folder)


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, tensors, index):
    folder = write_folder(tmp_path, two_shards(tensors), index)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        CheckpointReader(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path, tensors):
    shards = two_shards(tensors)
    shards["model-00002-of-00002.safetensors"]["ids"] = tensors["ids"]
    with pytest.raises(CheckpointError, match=r"tensor 'ids' is also in model-00001-of-00002\.safetensors"):
        CheckpointReader(write_folder(tmp_path, shards))


@pytest.mark.parametrize(("entry", "message"), [("ghost", "does not hold it"), ("ids", "but it is in")])
def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path, tensors, entry, message):
    folder = write_folder(tmp_path, two_shards(tensors), index=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][entry] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"index\.json: places tensor '{entry}' .*{message}"):
        CheckpointReader(folder)


def test_what_is_absent_is_named(tmp_path, tensors):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    folder = write_folder(tmp_path, {})
    with pytest.raises(CheckpointError, match="holds no weights"):
        CheckpointReader(folder)
    write_folder(tmp_path, {"model.safetensors": tensors})
    with pytest.raises(CheckpointError, match="no tensor named 'c'"):
        CheckpointReader(folder).tensor("c")
    with pytest.raises(CheckpointError, match=r"rows 4 to 9 .* \[5, 4\]"):
        CheckpointReader(folder).rows("a.weight", 4, 9)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds a JSON list"):
        CheckpointReader(folder)
