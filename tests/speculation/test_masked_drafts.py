"""P-EAGLE drafts: all tokens of a chain come of one pass over masks, and the text stays plain decoding's."""

import random

import pytest
import torch
from tests.launch.settings import launch

from slipstream.checkpoint.draft_config import draft_spec, is_draft
from slipstream.checkpoint.draft_rewrite import rewrite_draft
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, TrainingError
from slipstream.executors.eager import EagerExecutor
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.launch.settings import Draft, Speculation
from slipstream.launch.vllm import VllmServer
from slipstream.models.load import load_draft
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.draft.packing import PackedContext
from slipstream.train.run.output import Lineage, add_draft
from tiny import DEVICE, engine_of, follower_draft, run, stammering_target

MASK, VOCAB = 7, 61
CHAIN, TREE = TreeShape.chain(4), TreeShape(depth=4, width=3, budget=9)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 128,
         "intermediate_size": 64, "draft_vocab_size": 100}  # fmt: skip
on_a_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with sums in another order")


def masked_draft(target):
    """Return a draft of two blocks whose first guess is good and whose masks stand for a state of the target's."""
    draft = follower_draft(target, num_layers=2, mask_token_id=MASK)
    draft.mask_features_C = torch.randn(len(draft.mask_features_C), generator=torch.Generator().manual_seed(3)) * 2
    return draft.to(DEVICE)


def work():
    order = random.Random(5)
    prompts = [[order.randrange(VOCAB) for _ in range(order.randrange(3, 30))] for _ in range(5)]
    sampling = [SamplingParams(max_tokens=20, temperature=0.9 * (i % 2), top_p=0.9) for i in range(5)]
    return prompts, sampling, [11 * i for i in range(5)]


@on_a_cpu
def test_a_chain_is_what_one_pass_over_the_text_and_masks_behind_it_foretells():
    target = stammering_target(VOCAB)
    draft, proposed = masked_draft(target), []
    engine = engine_of(target, draft, CHAIN, max_context=96)
    drafter = engine.executor.drafter
    propose = drafter.propose

    def recorded(views):
        trees = propose(views)
        proposed.extend(zip([list(view.tokens) for view in views], trees.unpack(), strict=True))
        return trees

    drafter.propose = recorded
    prompt = work()[0][0]
    run(engine, [prompt], [SamplingParams(max_tokens=16, temperature=0.0)], [0])
    assert len([tree for _, tree in proposed if len(tree.tokens) == 5]) > 5
    for tokens, tree in proposed:
        drafted = list(tree.tokens[1:])
        assert drafted == reference_chain(target, draft, tokens)[: len(drafted)]


@torch.no_grad()
def reference_chain(target, draft, tokens):
    """Draft by one pass over the whole text: a slot for every position but the last, and three masks."""
    ops = TrainOps(DEVICE)

    def context(count):
        return PackedContext(ops, torch.arange(count)[None], Seen(torch.zeros(1, count, dtype=torch.int64)))

    states = target(torch.tensor([tokens]), context(len(tokens)), (4, 4, 4)).captured
    slots = draft.fuse(tuple(state[:, :-1] for state in states), ops)
    mask = draft.fuse(draft.mask_features_C.view(1, 1, -1).chunk(3, dim=-1), ops)
    hidden = torch.cat([slots, mask.expand(-1, 3, -1)], 1)
    ids = torch.tensor([[*tokens[1:], MASK, MASK, MASK]])
    normed = draft(hidden, ids, context(ids.shape[1])).normed_TD[0, -4:]
    return draft.logits(normed, ops).argmax(-1).tolist()


@pytest.mark.parametrize("shape", [CHAIN, TREE, TreeShape.chain(1)], ids=["chain", "tree", "one token"])
def test_text_is_plain_decodings_and_every_executor_drafts_the_same(shape):
    target, kept = stammering_target(VOCAB), []
    expected = run(engine_of(target), *work())
    for executor in ("eager", "captured", "native"):
        engine = engine_of(target, masked_draft(target), shape, cuda_graphs="on" if executor == "captured" else "off")
        if executor == "eager":
            engine = Engine(
                EagerExecutor(engine.executor.runner, engine.executor.drafter, 8), engine.config, target.spec
            )
        assert run(engine, *work()) == expected, executor
        stats = engine.stats.acceptance
        assert stats.acceptance_length > 1.1
        kept.append(list(stats.accepted))
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["PeagleLlamaForCausalLM"], "mask_token_id": MASK},
        {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK},
        {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "pard_token": MASK},
        {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": MASK,
         "transformer_layer_config": {**SIZES, "model_type": "llama", "num_hidden_layers": 4}},
    ],
    ids=["vLLM", "PTD", "a flag", "speculators"],
)  # fmt: skip
def test_a_p_eagle_draft_is_told_by_its_mask_token(config, tmp_path):
    spec = draft_spec({**SIZES, **config}, tmp_path, None)
    assert spec.mask_token_id == MASK and spec.residual == "raw" and is_draft({**SIZES, **config})


def test_a_mask_token_that_is_missing_or_none_of_the_vocabulary_is_refused(tmp_path):
    config = {**SIZES, "architectures": ["PeagleLlamaForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"mask_token_id.*is missing"):
        draft_spec(config, tmp_path, None)
    with pytest.raises(CheckpointError, match="mask_token_id"):
        draft_spec({**config, "mask_token_id": 100}, tmp_path, None)


def write_masked(folder, target, mask_hidden):
    """Write a draft's folder, and then as a P-EAGLE draft's."""
    with CheckpointWriter(folder.with_name(f"{folder.name}-plain")) as writer:
        add_draft(writer, follower_draft(target), "vllm", "tiny")
    source = open_checkpoint(folder.with_name(f"{folder.name}-plain"))
    with CheckpointWriter(folder) as writer:
        for name in source.names():
            writer.add(name, source.tensor(name))
        if mask_hidden is not None:
            writer.add("mask_hidden", mask_hidden)
        writer.write_json("config.json", {**source.config, "ptd_token_id": MASK})
    return folder


def test_mask_states_are_loaded_in_any_shape_and_exported_for_vllm_alone(tmp_path):
    target = stammering_target(VOCAB)
    width = 3 * target.spec.hidden_size
    states = torch.randn(1, 1, width)
    folder = write_masked(tmp_path / "draft", target, states)
    rewrite_draft(folder, "vllm", tmp_path / "vllm")
    assert open_checkpoint(tmp_path / "vllm").config["parallel_drafting"] is True
    for there in (folder, tmp_path / "vllm"):
        draft = load_draft(open_checkpoint(there), target, torch.float32)
        assert draft.spec.mask_token_id == MASK and torch.equal(draft.mask_features_C.cpu(), states.flatten())
    for dialect in ("sglang", "speculators"):
        with pytest.raises(CheckpointError, match="P-EAGLE"):
            rewrite_draft(folder, dialect, tmp_path / dialect, target="tiny")
    for name, wrong in (("none", None), ("short", states[..., 1:])):
        source = open_checkpoint(write_masked(tmp_path / name, target, wrong))
        with pytest.raises(CheckpointError, match=f"mask_hidden, where {width} numbers are needed"):
            load_draft(source, target, torch.float32)


def test_training_does_not_go_on_from_one(tmp_path):
    folder = write_masked(tmp_path / "draft", stammering_target(VOCAB), torch.zeros(1))
    with pytest.raises(TrainingError, match="is a P-EAGLE draft"):
        Lineage.read(folder, None)


def test_vllm_is_told_to_draft_in_one_pass(tmp_path):
    folder = write_masked(tmp_path / "draft", stammering_target(VOCAB), torch.zeros(1))
    rewrite_draft(folder, "vllm", tmp_path / "vllm")
    for there, told in ((folder, False), (tmp_path / "vllm", True)):
        draft, speculation = Draft("draft", "bf16", path=str(there)), Speculation("eagle3", 4)
        words = " ".join(VllmServer().command(launch(draft=draft, speculation=speculation)).argv)
        assert ('"parallel_drafting":true' in words) == told
