"""llama.cpp, compiled here, decodes our GGUF files to our tokens and accepts our drafts as our engine does.

pytest tests/interop/test_llama.py -m interop      (compiles llama.cpp on the first call; minutes)
"""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import save_file

from slipstream.bench.peers.environments import LLAMA_DRAFTS, llama_environment
from slipstream.checkpoint.draft_gguf import write_gguf_draft
from slipstream.checkpoint.embedded import embedded_draft, embedded_model
from slipstream.checkpoint.gguf_header import read_gguf_header
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.llm import LLM
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.prompts import read_prompts
from tiny import engine_of, run
from tiny_families import some_tokens
from tiny_gguf import FOLDERS, write_gguf

pytestmark = pytest.mark.interop
HERE = Path(__file__).parent
TOKEN_LIST = "tokenizer.ggml.tokens"
CHAIN = 3
TOKENS = 64
CLOSE = 1e-3  # of two logits, which rounding may swap


def called(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", FOLDERS)
def test_llama_cpp_decodes_a_file_of_every_family_to_our_tokens(kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", kind, FOLDERS[kind](tmp_path / "folder"))
    prompt, count = some_tokens(24).tolist(), 48  # longer than every window, alone and together
    target = load_target(open_checkpoint(path), torch.float32, torch.device("cpu"))
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    (ours,) = run(engine_of(target), [prompt], [params], [0])
    request = json.dumps({"prompt": prompt, "count": count})
    output = called(llama_environment() / "python", HERE / "llama_tokens.py", path, request)
    theirs = json.loads(output.strip().splitlines()[-1])
    differ = (i for i, (mine, other) in enumerate(zip(ours, theirs["tokens"], strict=True)) if mine != other)
    first = next(differ, None)
    assert first is None or theirs["margins"][first] < CLOSE


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gemma-4", "llama-bpe", "qwen2"])
def test_tokenizers_of_published_files_give_llama_cpp_s_tokens(name):
    """Gemma 4's vocabulary is read as Gemma 3's files have theirs, with scores in place of its merges."""
    path = llama_environment().parent / f"models/ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip("llama.cpp was compiled before its vocabularies were kept; remove its environment")
    metadata = dict(read_gguf_header(path).metadata)
    if name == "gemma-4":
        ranks = {"".join(merge.split(" ")): -rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        metadata["tokenizer.ggml.scores"] = [float(ranks.get(token, -1e7)) for token in metadata[TOKEN_LIST]]
        metadata["tokenizer.ggml.model"] = "llama"
    config = {"max_position_embeddings": 4096}
    reader = SimpleNamespace(path=path, metadata=metadata, config=config, text=metadata.__getitem__)
    tokenizer = gguf_tokenizer(reader).tokenizer
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [list(map(int, line.split())) for line in path.with_suffix(".gguf.out").read_text().splitlines()]
    assert len(texts) > 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The embedded model in float32, so that both programs compute the same."""
    path = tmp_path_factory.mktemp("target") / "model.gguf"
    header = read_gguf_header(embedded_model())
    source, writer = gguf.GGUFReader(embedded_model()), gguf.GGUFWriter(path, header.metadata["general.architecture"])
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1])
    for name, tensor in header.tensors.items():
        writer.add_tensor(name, gguf.quants.dequantize(tensor.data, tensor.quant_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def drafts(target, tmp_path_factory):
    """A draft that llama.cpp can compute, as a folder and as its file: the shipped one, no window, no EAGLE-3.1 norms.

    It guesses worse than the shipped one, but both programs guess alike. What the norms divided by is divided out of
    the weights once and for all: about the size that states of these layers have.
    """
    folder = tmp_path_factory.mktemp("draft") / "folder"
    folder.mkdir()
    shipped = open_checkpoint(embedded_draft())
    tensors = {name: shipped.tensor(name) for name in shipped.names()}
    sizes = (2.8, 6.6, 22.1)
    scale = torch.cat([tensors.pop(f"fc_norm.{i}.weight").float() / size for i, size in enumerate(sizes)])
    tensors["fc.weight"] = (tensors["fc.weight"].float() * scale).bfloat16()
    config = {**shipped.config, "fc_norm": False, "norm_output": False, "use_sliding_window": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    file = folder.with_name("draft.gguf")
    write_gguf_draft(open_checkpoint(folder), target, file)
    return folder, file


def test_both_programs_accept_as_much_of_one_draft(target, drafts, tmp_path):
    prompts = read_prompts(HERE.parents[1] / "recipes/bench/prompts/mixed.jsonl")[:6]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    lengths, texts = [], []
    for draft in drafts:
        llm = LLM(target, draft, tree=TreeShape.chain(CHAIN), device="cpu", dtype="float32", borrowed_tokens=0)
        completions = llm.generate(prompts, params)
        stats = AcceptanceStats()
        for completion in completions:
            stats.add(completion.stats)
        lengths.append(stats.acceptance_length)
        texts.append([completion.text for completion in completions])
    assert texts[0] == texts[1]
    assert lengths[0] == lengths[1]
    emitted = passes = same = 0
    options = ["--spec-type", "draft-eagle3", "--spec-draft-n-max", CHAIN, "--spec-draft-p-min", 0, "--temp", 0]
    exact = ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off", "-t", 1, "-c", 1024]
    for completion in completions:
        asked = tmp_path / "prompt.txt"
        asked.write_text(llm.tokenizer.decode(list(completion.prompt_tokens), skip_special=False))
        models = ["-m", target, "-md", drafts[1], "-f", asked, "-n", TOKENS - 1, "--ignore-eos"]
        output = called(llama_environment() / LLAMA_DRAFTS, *models, *options, *exact)
        counts = {name: int(re.search(rf"{name}\s*=\s*(\d+)", output)[1]) for name in ("n_predict", "n_accept")}
        emitted += counts["n_predict"]
        passes += counts["n_predict"] - counts["n_accept"]
        same += completion.text.strip()[: TOKENS * 2] in output
    print(f"ours {lengths[0]:.3f}, llama.cpp {emitted / passes:.3f}; {same} of {len(prompts)} texts equal")  # noqa: T201
    assert emitted / passes == pytest.approx(lengths[0], rel=0.03)
    assert same >= 0.8 * len(prompts)
