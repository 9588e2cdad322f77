"""What goes wrong ends in a sentence, leaves nothing half-written, and can be taken up again."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from folders import draft_tensors, write_folder

from slipstream.errors import CheckpointError, ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8", "int4", "w8a8_int8", "mxfp4", "int4_fp8"])
def test_nan_and_inf_are_refused_by_name_and_nothing_is_written(tmp_path, run, scheme, value):
    tensors = draft_tensors()
    tensors["midlayer.mlp.up_proj.weight"][5, 7] = value
    source = write_folder(tmp_path / "draft", tensors)
    with pytest.raises(CheckpointError, match=r"midlayer\.mlp\.up_proj\.weight holds NaN or Inf"):
        run(source, tmp_path / "out", scheme)
    assert names(tmp_path) == ["draft"]


def test_a_truncated_file_is_refused(draft, tmp_path, run):
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        run(draft, tmp_path / "out")
    assert names(tmp_path) == ["draft"]


def test_unknown_schemes_dialects_and_group_sizes_are_named(draft, tmp_path, run):
    with pytest.raises(ConfigError, match="no scheme 'int3'"):
        run(draft, tmp_path / "out", "int3")
    with pytest.raises(ConfigError, match="no dialect 'gguf'"):
        run(draft, tmp_path / "out", dialect="gguf")
    with pytest.raises(ConfigError, match="takes no group size"):
        run(draft, tmp_path / "out", "fp8", 32)
    with pytest.raises(ConfigError, match="multiple of 8"):
        run(draft, tmp_path / "out", "int4", 12)
    with pytest.raises(ConfigError, match="no form in the compressed-tensors dialect"):
        run(draft, tmp_path / "out", "mxfp4", dialect="compressed-tensors")


def test_a_layer_whose_columns_do_not_divide_says_what_to_exclude(tmp_path, run):
    tensors = draft_tensors()
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:, :90].contiguous()
    source = write_folder(tmp_path / "draft", tensors)
    with pytest.raises(CheckpointError, match=r"Exclude 'midlayer\.mlp\.down_proj'"):
        run(source, tmp_path / "out", "mxfp4")
    run(source, tmp_path / "out", "mxfp4", exclude=("midlayer.mlp.down_proj",))


def test_a_quantized_checkpoint_is_not_quantized_again(draft, tmp_path, run):
    run(draft, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already quantized"):
        run(tmp_path / "out", tmp_path / "again")


def test_an_existing_folder_is_kept_unless_overwriting_was_asked_for(draft, tmp_path, run):
    out = tmp_path / "out"
    run(draft, out)
    (out / "stale").write_text("of the run before")
    with pytest.raises(CheckpointError, match="--overwrite"):
        run(draft, out)
    assert "stale" in names(out)
    run(draft, out, overwrite=True)
    assert "stale" not in names(out) and "config.json" in names(out)
    assert names(tmp_path) == ["draft", "out"]
    for inside in (draft, draft / "inside", tmp_path):
        with pytest.raises(CheckpointError, match="in or around the source"):
            run(draft, inside, overwrite=True)


def test_what_slipstream_did_not_write_is_never_replaced(draft, tmp_path, run):
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    for precious in (folder / "precious", file):
        precious.write_text("mine")
    for out in (folder, file):
        with pytest.raises(CheckpointError, match="did not write it"):
            run(draft, out, overwrite=True)
    assert (folder / "precious").read_text() == file.read_text() == "mine"
    assert names(tmp_path) == ["draft", "file", "folder"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_projection_that_is_no_plain_float_is_refused_and_not_kept_unsaid(tmp_path, run, dtype):
    tensors = draft_tensors()
    name = "midlayer.self_attn.q_proj.weight"
    source = write_folder(tmp_path / "draft", {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(CheckpointError, match=f"{name} is stored as"):
        run(source, tmp_path / "out")
    assert names(tmp_path) == ["draft"]


def test_a_disk_too_small_is_seen_before_anything_is_written(draft, tmp_path, run, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"the disk has 0\.00 GB free"):
        run(draft, tmp_path / "out")
    assert names(tmp_path) == ["draft"]


def test_a_disk_that_fills_up_half_way_leaves_no_folder_and_the_rest_can_follow(tmp_path, run, monkeypatch):
    source = write_folder(tmp_path / "draft", draft_tensors(), shards=4)
    pwrite, written = os.pwrite, []

    def full(descriptor, data, offset):
        written.append(len(data))
        if sum(written) > 40_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run(source, tmp_path / "out", max_shard_bytes=20_000)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    result = run(source, tmp_path / "out", max_shard_bytes=20_000)
    assert result.resumed_shards > 0
    assert names(tmp_path) == ["draft", "out"]


def test_a_run_with_other_settings_does_not_take_up_an_unfinished_one(tmp_path, run, monkeypatch):
    source = write_folder(tmp_path / "draft", draft_tensors())
    _stop_after_first_shard(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="unfinished run with other settings"):
        run(source, tmp_path / "out", "int4", max_shard_bytes=20_000)
    run(source, tmp_path / "out", "int4", max_shard_bytes=20_000, overwrite=True)
    assert names(tmp_path) == ["draft", "out"]


def test_a_killed_run_is_taken_up_and_ends_the_same_as_an_undisturbed_one(tmp_path, run):
    source = write_folder(tmp_path / "draft", draft_tensors())
    _stop_after_first_shard(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    result = run(source, tmp_path / "out", max_shard_bytes=20_000)
    assert result.resumed_shards == 1
    run(source, tmp_path / "undisturbed", max_shard_bytes=20_000)
    assert names(tmp_path) == ["draft", "out", "undisturbed"]
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert json.loads((tmp_path / "out" / "slipstream.json").read_text())["quantize"]["layers"]


def test_two_runs_into_one_folder_do_not_mix(tmp_path, run):
    import fcntl

    source = write_folder(tmp_path / "draft", draft_tensors())
    work = tmp_path / ".out.partial"
    work.mkdir()
    with (work / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another slipstream quantize is writing it"):
            run(source, tmp_path / "out")


def _stop_after_first_shard(source, out):
    """Run the pass in a process of its own that is killed once its first file is done."""
    program = f"""
        import os, signal
        from pathlib import Path
        from slipstream.quant import destination
        from slipstream.quant.plan import QuantizeOptions, plan_quantize
        from slipstream.quant.quantize import quantize
        from slipstream.quant.scheme import scheme_named

        class Stopping(destination.Destination):
            def finish(self, shard, summary):
                super().finish(shard, summary)
                os.kill(os.getpid(), signal.SIGKILL)

        import slipstream.quant.quantize as module
        module.Destination = Stopping
        options = QuantizeOptions(scheme_named("ptpc_fp8"), max_shard_bytes=20_000)
        quantize(plan_quantize(Path({str(source)!r}), options), Path({str(out)!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
