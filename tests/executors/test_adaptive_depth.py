"""Steps whose chains differ in length, or that drop drafts for a while, change the passes and not the text."""

import random

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.executors.cuda_graph import prepared as prepared_steps
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.state import Loaded, StepModels
from slipstream.executors.cuda_graph.step import StepKind
from slipstream.kernels import select
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache
from slipstream.speculation.lengths import Choice
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from step_parts import buffers_of
from tiny import DEVICE, follower_draft, stammering_target

TARGET = stammering_target(61)
DRAFT = follower_draft(TARGET)
OPS = select(DEVICE)
CHAIN, TREE = TreeShape.chain(4), TreeShape(depth=3, width=4, budget=20)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3] * 9, [11, 12], [20, 21, 22]]


def told(draft, seconds=None, monkeypatch=None, shape=CHAIN, **config):
    """Return each request's tokens with log probabilities, and the engine; requests arrive one after another."""
    if seconds is not None:
        monkeypatch.setattr(Prepared, "seconds", lambda self, kind, num_keys: seconds(kind))
    settings = EngineConfig(max_context=96, page_size=4, max_requests=4, num_pages=90, cuda_graphs="on", **config)
    engine = build_engine(TARGET, draft, shape, settings, OPS)
    said, waiting, steps = {}, list(enumerate(PROMPTS)), 0
    while engine.has_work or waiting:
        if waiting and steps % 5 == 0:
            number, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=24, temperature=0.7 * (number % 2), logprobs=0)
            said[engine.add(prompt, params, number)] = []
        for emission in engine.step():
            assert emission.error is None
            said[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
        engine.check_invariants()
        steps += 1
    return list(said.values()), engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_any_choices_in_any_order_give_the_text_of_plain_decoding(shape, seed, monkeypatch):
    plain, _ = told(None)
    choose, asked = random.Random(seed), set()

    def taken(kind):
        asked.add(kind.num_drafted)
        return choose.uniform(0.5, 1.5)

    adapted, engine = told(follower_draft(TARGET), taken, monkeypatch, shape, adaptive_depth=True)
    assert adapted == plain
    assert engine.stats.acceptance.acceptance_length > 1.0
    assert asked == ({0, 1, 3, 4} if shape is CHAIN else {0, 1, 3, 8, 16, 20})


def test_a_tree_is_left_for_a_smaller_one_where_its_nodes_cost_too_much(monkeypatch):
    _, dear = told(
        follower_draft(TARGET), lambda kind: 1 + 0.3 * kind.num_drafted, monkeypatch, TREE, adaptive_depth=True
    )
    _, cheap = told(
        follower_draft(TARGET), lambda kind: 1 + 0.001 * kind.num_drafted, monkeypatch, TREE, adaptive_depth=True
    )
    assert dear.stats.acceptance.drafted < 0.3 * cheap.stats.acceptance.drafted
    assert "trees of 20 nodes" in cheap.explain_drafting()["tokens_a_second"]


def test_cheap_nodes_are_drafted_and_dear_ones_are_not(monkeypatch):
    _, cheap = told(follower_draft(TARGET), lambda kind: 1 + 0.01 * kind.num_drafted, monkeypatch, adaptive_depth=True)
    _, dear = told(follower_draft(TARGET), lambda kind: 1.0 + 2.0 * kind.extends, monkeypatch, adaptive_depth=True)
    _, fixed = told(follower_draft(TARGET))
    assert cheap.stats.acceptance.acceptance_length > 1.2
    assert dear.stats.acceptance.drafted < 0.2 * fixed.stats.acceptance.drafted
    assert dear.explain_drafting()["chosen"] == "no drafts"
    assert str(Choice(3, follows=True)) in cheap.explain_drafting()["tokens_a_second"]
    assert fixed.explain_drafting() == {}


def test_where_nothing_was_measured_chains_have_their_whole_length():
    adapted, engine = told(follower_draft(TARGET), adaptive_depth=True)
    plain, fixed = told(follower_draft(TARGET))
    assert adapted == plain
    assert engine.stats.acceptance.passes == fixed.stats.acceptance.passes


def test_what_contexts_add_is_measured_for_every_kind_and_leaves_the_batch_as_it_was(monkeypatch):
    """A clock that counts the keys of active rows: a step of two rows takes twice what a key adds to one."""
    kv, draft_kv = (KvCache.allocate(model.kv_shape, 25, 4, torch.float32, DEVICE) for model in (TARGET, DRAFT))
    models = StepModels(ReferenceOps(DEVICE), TARGET, kv, (1, 2, 4), DRAFT, draft_kv)
    buffers = buffers_of(models, 3, 24, 4)
    state = buffers.state

    def clock(launches):
        keys = int((state.rows.committed_R * state.active_R).sum())
        for launch in launches:
            launch()
        return 1.0 + 0.001 * keys

    monkeypatch.setattr(prepared_steps, "seconds_of", clock)
    prepared = Prepared(models, buffers, 64)
    kind = StepKind(2, 3, 80)
    with torch.inference_mode():
        state.load(0, Loaded(5, 7, 3, 100, 0, 0.0), range(20))
        before = state.saved()
        prepared.step(kind)
        prepared._measure()  # on a GPU a part of warming up
        prepared.measure_contexts()
    assert all(torch.equal(a, b) for a, b in zip(state.saved(), before, strict=True))
    assert prepared.seconds(kind, 0) == pytest.approx(1.0)
    assert prepared.seconds(kind, 10) == pytest.approx(1.03)  # three places
    assert prepared.seconds(StepKind(1, 3, 80), 0) is None
