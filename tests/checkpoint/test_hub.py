import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.checkpoint.hub import resolve
from slipstream.errors import CheckpointError

ASK = """
import sys
from slipstream.checkpoint.hub import resolve
from slipstream.errors import CheckpointError
try:
    print(resolve(sys.argv[1]))
except CheckpointError as error:
    print("refused:", error)
"""


def ask(repo_id: str, home: Path) -> str:
    """Resolve in a fresh process, as huggingface_hub reads its settings once, with a hub that does not answer."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", ASK, repo_id]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def cached_snapshot(home: Path) -> Path:
    repository = home / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_cached_repository_needs_no_hub_but_a_broken_off_download_does(tmp_path):
    snapshot = cached_snapshot(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ask("org/model", tmp_path).startswith("refused: org/model: what is in the Hugging Face cache lacks")
    save_file({"a": torch.ones(2)}, snapshot / "model-00001-of-00001.safetensors")
    assert ask("org/model", tmp_path) == str(snapshot)


def test_a_kimi_is_fetched_with_its_tokenizer_and_again_where_that_was_left_out(tmp_path, monkeypatch):
    """The hub's own client is replaced: what it is asked for is the point."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"]}))
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    asked = []

    def snapshot_download(repo_id, allow_patterns=None, local_files_only=False):
        asked.append(allow_patterns)
        if not local_files_only:
            (folder / "tiktoken.model").touch()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("moonshotai/Kimi-K2.5") == folder
    assert "tiktoken.model" in asked[1]
    assert resolve("moonshotai/Kimi-K2.5") == folder
    assert len(asked) == 3  # the last time, the cache was enough


def test_an_unknown_name_without_network_says_what_to_do(tmp_path):
    answer = ask("org/absent", tmp_path)
    assert "not in the Hugging Face cache" in answer
    assert "hf download org/absent" in answer


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "a/b/c", "with space"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(name):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        resolve(name)


def test_paths_that_exist_win(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == Path("org/model")
    (tmp_path / "m.gguf").touch()
    assert resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    (tmp_path / "weights.txt").touch()
    with pytest.raises(CheckpointError, match=r"weights\.txt: is a file"):
        resolve(tmp_path / "weights.txt")
