"""A DFlash draft from folder to text: its tensors are accounted for, and what cannot run it says so."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts import DraftShelf
from slipstream.engine.loading import LoadOptions, load
from slipstream.errors import CheckpointError, ConfigError, DraftMismatchError, SlipstreamError
from slipstream.executors.eager import EagerExecutor
from slipstream.models.load import load_block_draft
from slipstream.models.topology import Topology
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.draft.compare import compare_drafts
from tiny import DEVICE, VOCAB, block_draft, run, stored_tensors, tiny_target
from training import write_target_folder

CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    "num_target_layers": 4,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": 8,
    "mask_token_id": 7,
    "draft_vocab_size": 20,
    "aux_hidden_state_layer_ids": [2, 4],
    "transformer_layer_config": {
        key: value for key, value in CONFIG.items() if key not in ("architectures", "block_size", "dflash_config")
    },
}


def tensors(target, **changes):
    """Return what the authors' checkpoints hold: neither a table of embeddings nor a head."""
    found = stored_tensors(block_draft(target, **changes))
    return {name: tensor.contiguous() for name, tensor in found.items() if not name.startswith(("embed", "lm_head"))}


def write(folder, config, stored):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.cpu() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def test_the_authors_files_are_loaded_and_share_the_targets_table_and_head(tmp_path):
    target = tiny_target()
    stored = tensors(target)
    draft = load_block_draft(open_checkpoint(write(tmp_path / "draft", CONFIG, stored)), target, torch.float32)
    assert draft.spec == dataclasses.replace(block_draft(target).spec, target_layers=4)
    assert draft.embed_tokens is target.embed_tokens and draft.lm_head is target.lm_head
    loaded = stored_tensors(draft)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


def test_speculators_files_have_a_table_and_a_head_of_their_own_and_a_small_vocabulary(tmp_path):
    target = tiny_target()
    known = torch.arange(20) * 3 + 1
    own = {
        "lm_head.weight": torch.randn(20, 32),
        "embed_tokens.weight": torch.randn(VOCAB, 32),
        "d2t": known - torch.arange(20),
        "t2d": torch.isin(torch.arange(VOCAB), known),
    }
    source = open_checkpoint(write(tmp_path / "draft", SPECULATORS, tensors(target) | own))
    draft = load_block_draft(source, target, torch.float32)
    assert torch.equal(draft.token_ids_V.cpu(), known) and draft.spec.captured_layers == (2, 4)
    assert torch.equal(draft.lm_head.weight.cpu(), own["lm_head.weight"])
    assert torch.equal(draft.embed_tokens.weight.cpu(), own["embed_tokens.weight"])


def without(name):
    return lambda stored: {key: tensor for key, tensor in stored.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "change", "error", "words"),
    [
        ({}, without("hidden_norm.weight"), CheckpointError, r"missing hidden_norm.weight \[32\]"),
        ({}, lambda stored: stored | {"markov_head.weight": torch.ones(2)}, CheckpointError, "unknown markov_head"),
        ({}, lambda stored: stored | {"fc.weight": torch.ones(32, 96)}, CheckpointError, "misshapen fc.weight"),
        ({}, lambda stored: {"fc.weight": torch.ones(1)}, CheckpointError, "2 layers, 2 tensors at the least"),
        ({"num_target_layers": 36}, dict, DraftMismatchError, "a target of 36 layers, not 4"),
        ({"vocab_size": 99}, dict, DraftMismatchError, "vocabulary size is 99"),
    ],
)
def test_every_tensor_is_accounted_for_and_the_target_must_be_its_own(changes, change, error, words, tmp_path):
    target = tiny_target()
    folder = write(tmp_path / "draft", CONFIG | changes, change(tensors(target)))
    with pytest.raises(error, match=words):
        load_block_draft(open_checkpoint(folder), target, torch.float32)


def test_an_embedding_kept_apart_is_refused(tmp_path):
    target = tiny_target()
    folder = write(tmp_path / "draft", CONFIG, tensors(target))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt, which slipstream does not read"):
        load_block_draft(open_checkpoint(folder), target, torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a target's folder and a DFlash draft's for it."""
    root = tmp_path_factory.mktemp("models")
    target = write_target_folder(root / "target", unused_tokens=1)
    spec = model_spec(open_checkpoint(target).config, target)
    sizes = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
    widths = {"hidden_size": spec.hidden_size, "target_hidden_size": spec.hidden_size}
    stored = tensors(tiny_target(vocab_size=spec.vocab_size), **widths)
    draft = write(root / "draft", {**CONFIG, **sizes, "num_target_layers": spec.num_layers}, stored)
    return target, draft


def test_a_folder_named_as_the_draft_is_served_in_eager_steps_and_the_text_is_the_same(folders):
    target, draft = folders
    options = {"model": target, "device": DEVICE.type, "max_context": 96, "memory_fraction": 0.2}
    plain, drafted = (load(LoadOptions(**options, draft=name)) for name in ("none", draft))
    line = next(line for line in drafted.summary if line.startswith("draft: "))
    assert "DFlash, blocks of 8" in line and "chain of 7, in eager steps" in line
    assert type(drafted.engine.executor) is EagerExecutor
    prompt = plain.tokenizer.encode("the quick brown fox")
    for temperature in (0.0, 0.9):
        params = [SamplingParams(max_tokens=12, temperature=temperature)]
        assert run(drafted.engine, [prompt], params, [5]) == run(plain.engine, [prompt], params, [5])
    assert drafted.engine.stats.acceptance.drafted > 0
    with pytest.raises(ConfigError, match=r"What drafts here is DFlash; start with an EAGLE-3 draft"):
        DraftShelf(drafted.engine).read(draft)


def test_it_is_compared_with_other_drafts(folders):
    target, draft = folders
    loaded = load(LoadOptions(target, "none", device="cpu", max_requests=2, max_context=96))
    prompts = [[{"role": "user", "content": "one"}]] * 2
    params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    compared = compare_drafts(loaded, [str(draft)], [TreeShape.chain(3)], prompts, params)[1]
    assert compared.num_identical == len(prompts) and compared.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tree": TreeShape.chain(8)}, "--depth 7 or less"),
        ({"topology": Topology(tp=2)}, "runs beside a target on one device"),
        ({"draft_window": 64}, "draft_window is given"),
        ({"engine": EngineConfig(copied_tokens=4)}, "copied_tokens is given"),
    ],
    ids=["too deep", "split", "a window", "copies"],
)
def test_what_a_dflash_draft_cannot_do_is_refused_before_it_serves(folders, options, words):
    target, draft = folders
    with pytest.raises(SlipstreamError, match=words):
        load(LoadOptions(model=target, draft=draft, device="cpu", max_context=96, **options))
