"""Whatever is broken in a checkpoint, from a seed, ends in one of slipstream's own errors: nothing else comes out."""

import json
import random
import shutil

import pytest
from gguf_samples import write_gguf
from mutations import mutate_bytes, mutate_header, mutate_json, use, use_tokenizer

import tiny_moe
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.errors import SlipstreamError
from training import write_target_folder

FEW, MANY = 8, 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("whole")
    deepseek = tiny_moe.save(tiny_moe.deepseek(), base / "deepseek")
    packed = tiny_moe.quantized(deepseek, base / "int4", "int4", 32, "compressed-tensors", tiny_moe.EXPERTS_ONLY)
    fp8 = tiny_moe.quantized(deepseek, base / "fp8", "ptpc_fp8", None, "quark", ())
    return [write_target_folder(base / "llama"), deepseek, packed, fp8, tiny_moe.as_kimi(deepseek, base / "kimi")]


def damaged(folder, kind, rng):
    """Break one file of a folder."""
    if kind in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
        path = folder / kind
        if path.exists() and rng.random() < 0.9:
            path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), rng)))
        elif path.exists():
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        return
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    path.write_bytes((mutate_header if kind == "header" else mutate_bytes)(path.read_bytes(), rng))


def break_and_use(folders, kind, seeds, tmp_path):
    refused = 0
    for seed in seeds:
        rng = random.Random(f"{kind} {seed}")
        work = tmp_path / "work"
        shutil.copytree(rng.choice(folders), work)
        damaged(work, kind, rng)
        try:
            refusal = use_tokenizer(work) if kind.startswith("tokenizer") else use(work)
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}") from error
        assert len(refusal) < 5000, f"{kind}, seed {seed}: a message of {len(refusal)} characters"
        refused += bool(refusal)
        shutil.rmtree(work)
    assert refused, "nothing was broken"


KINDS = ["config.json", "header", "bytes", "model.safetensors.index.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_is_refused_in_a_sentence(folders, kind, tmp_path):
    break_and_use(folders, kind, range(FEW), tmp_path)


@pytest.mark.crash
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_folders_are_refused_in_a_sentence(folders, kind, tmp_path):
    break_and_use(folders, kind, range(1000, 1000 + MANY), tmp_path)


def test_a_damaged_tokenizer_is_refused_in_a_sentence(folders, tmp_path):
    break_and_use(folders[:1], "tokenizer.json", range(FEW), tmp_path)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer_config.json"])
def test_many_damaged_tokenizers_are_refused_in_a_sentence(folders, kind, tmp_path):
    break_and_use(folders[:1], kind, range(1000, 1000 + MANY), tmp_path)


def use_gguf(path):
    try:
        reader = GgufReader(path)
        for name in reader.names():
            reader.tensor(name)
        gguf_tokenizer(reader)
    except SlipstreamError as error:
        return str(error)
    return use(path)


@pytest.fixture(scope="module")
def gguf_content(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def check_ggufs(content, seeds, path):
    for seed in seeds:
        path.write_bytes(mutate_bytes(content, random.Random(seed)))
        try:
            use_gguf(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_a_damaged_gguf_is_refused_in_a_sentence(gguf_content, tmp_path):
    check_ggufs(gguf_content, range(60), tmp_path / "model.gguf")


@pytest.mark.crash
def test_many_damaged_ggufs_are_refused_in_a_sentence(gguf_content, tmp_path):
    check_ggufs(gguf_content, range(1000, 6000), tmp_path / "model.gguf")
