import json
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from slipstream.checkpoint.reader import CheckpointReader
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.errors import CheckpointError


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), limit=st.integers(1, 400))
def test_what_is_written_is_read_back_from_shards_within_the_limit(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp("writer") / "model"
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    with CheckpointWriter(folder, max_shard_bytes=limit) as writer:
        writer.write_json("config.json", {"a": 1})
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    reader = CheckpointReader(folder)
    assert reader.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor)
    files = {reader.info(name).file for name in tensors}
    for file in files:
        inside = [reader.info(name).nbytes for name in tensors if reader.info(name).file == file]
        assert sum(inside) <= limit or len(inside) == 1
    assert (folder / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_views_tied_tensors_and_every_dtype_are_written_as_they_are(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "view": whole[1:3],
        "transposed": whole.t(),
        "tied": whole,
        "tied too": whole,
        "half": whole.bfloat16(),
        "flags": whole > 3,
        "fp8": whole.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
    }
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_json("config.json", {})
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    reader = CheckpointReader(tmp_path / "model")
    for name, tensor in tensors.items():
        assert reader.tensor(name).dtype == tensor.dtype
        assert torch.equal(reader.tensor(name).float(), tensor.float())
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1  # weights are as readable as config.json
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers insists


def write(folder, value, **settings):
    with CheckpointWriter(folder, **settings) as writer:
        writer.write_json("config.json", {"value": value})
        writer.add("t", torch.full((3,), float(value)))


def test_a_folder_is_replaced_only_when_asked(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, 1)  # an empty folder is no loss
    with pytest.raises(CheckpointError, match="already there"):
        write(folder, 2)
    assert json.loads((folder / "config.json").read_text()) == {"value": 1}
    (folder / "stale").touch()
    write(folder, 2, overwrite=True)
    assert CheckpointReader(folder).tensor("t").tolist() == [2.0] * 3
    assert not (folder / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_half_way_leaves_the_previous_folder_and_nothing_else(tmp_path):
    folder = tmp_path / "model"
    write(folder, 1)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(folder, max_shard_bytes=4, overwrite=True) as writer:
        writer.add("a", torch.ones(4))
        writer.add("b", torch.ones(4))
        raise KeyboardInterrupt
    assert CheckpointReader(folder).tensor("t").tolist() == [1.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("what", ["tensor", "file"])
def test_a_disk_that_takes_no_more_is_a_clear_error_and_leaves_nothing(tmp_path, what):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model: cannot be written .*Free space"):  # noqa: SIM117
            with CheckpointWriter(tmp_path / "model") as writer:
                if what == "tensor":
                    writer.add("t", torch.ones(100_000))
                else:
                    writer.write_text("tokenizer.json", "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_added_twice_and_a_hopeless_limit_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'t' was added twice"), CheckpointWriter(tmp_path / "model") as writer:
        writer.add("t", torch.ones(1))
        writer.add("t", torch.ones(1))
    with pytest.raises(CheckpointError, match="0 bytes"):
        CheckpointWriter(tmp_path / "model", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
