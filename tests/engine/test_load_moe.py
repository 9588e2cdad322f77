"""A published layout, from folder to text: Kimi's config, names, tokenizer file, packed experts and draft."""

import json
import shutil

import pytest
import torch

from slipstream.engine.loading import LoadOptions, load
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import run
from tiny_moe import (
    BY_HEAD,
    EXPERTS_ONLY,
    LIGHTSEEK,
    as_kimi,
    deepseek,
    draft_shapes,
    quantized,
    save,
    tensors_of,
    weights,
    write,
)
from tiny_tiktoken import FIRST, write_tokenizer

VOCAB = FIRST + 256


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    root = tmp_path_factory.mktemp("kimi")
    dense = save(deepseek(vocab_size=VOCAB, num_hidden_layers=3).to(torch.bfloat16), root / "dense")
    int4 = quantized(dense, root / "int4", "int4", 32, "compressed-tensors", EXPERTS_ONLY)
    return write_tokenizer(as_kimi(int4, root / "kimi"))


def test_kimi_loads_and_answers_the_same_with_its_draft(kimi, tmp_path, caplog):
    doubtful = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    config = {**LIGHTSEEK, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, **doubtful}
    shapes = {**draft_shapes(BY_HEAD), "lm_head.weight": (VOCAB, 64)}
    draft = write(tmp_path / "draft", config, weights(shapes))
    options = {"model": kimi, "device": "cpu", "tree": TreeShape.chain(3), "max_context": 96}
    plain = load(LoadOptions(**options, draft="none"))
    drafted = load(LoadOptions(**options, draft=draft, memory_fraction=0.2))
    assert caplog.text.count("do not tell their convention") == 1
    prompt = plain.tokenizer.encode_chat([{"role": "user", "content": "the 中文"}])
    for temperature in (0.0, 0.9):
        params = [SamplingParams(max_tokens=12, temperature=temperature)]
        assert run(drafted.engine, [prompt], params, [5]) == run(plain.engine, [prompt], params, [5])
    assert "KimiK25ForConditionalGeneration" in plain.summary[0]


def test_the_memory_of_packed_experts_is_counted(kimi):
    loaded = load(LoadOptions(model=kimi, draft="none", device="cpu", max_context=96))
    experts = loaded.target.layers[1].mlp.experts
    packed = sum(stack.nbytes for stack in experts.packed)
    stored = sum(
        tensor.nbytes
        for name, tensor in tensors_of(kimi).items()
        if ".layers.1.mlp.experts." in name and not name.endswith("_shape")
    )
    assert stored <= packed <= 1.3 * stored, "codes are as stored; their scales are widened to float32"


def test_the_config_written_for_the_text_part_needs_no_top_level_ids(kimi, tmp_path):
    config = json.loads((kimi / "config.json").read_text())
    config["text_config"]["eos_token_id"] = config.pop("eos_token_id")
    folder = tmp_path / "moved"
    folder.mkdir()
    for path in kimi.iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(LoadOptions(model=folder, draft="none", device="cpu", max_context=64))
    assert loaded.target.spec.eos_token_ids == (2,)
    assert 2 in loaded.tokenizer.eos_token_ids
