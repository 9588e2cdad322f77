"""Steps that draft different shapes, or nothing for a while, change the passes and not the text."""

import random

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.request import FinishReason
from slipstream.executors.cuda_graph import prepared as prepared_steps
from slipstream.executors.cuda_graph.passes import CatchUp
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.state import MOST_LATE, Loaded, StepModels
from slipstream.executors.cuda_graph.step import Step, StepKind
from slipstream.kernels import select
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from step_parts import buffers_of, run_step
from tiny import DEVICE, follower_draft, run, stammering_target

TARGET = stammering_target(61)
DRAFT = follower_draft(TARGET)
OPS = select(DEVICE)
GREEDY = SamplingParams(max_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3] * 9, [11, 12], [20, 21, 22]]


def told(draft, seconds=None, monkeypatch=None, shape=None, max_tokens=24, **config):
    """Return each request's tokens with log probabilities, and the engine; requests arrive one after another."""
    if seconds is not None:
        monkeypatch.setattr(Prepared, "seconds", lambda self, kind, num_keys: seconds(kind))
    settings = {"max_context": 128, "page_size": 4, "max_requests": 4, "num_pages": 160, **config}
    engine = build_engine(TARGET, draft, shape, EngineConfig(cuda_graphs="on", **settings), OPS)
    said, waiting, steps = {}, list(enumerate(PROMPTS)), 0
    while engine.has_work or waiting:
        if waiting and steps % 5 == 0:
            number, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.7 * (number % 2), logprobs=0)
            said[engine.add(prompt, params, number, speculate=number != 4)] = []
        for emission in engine.step():
            assert emission.error is None
            said[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
        engine.check_invariants()
        steps += 1
    return list(said.values()), engine


@pytest.mark.parametrize("seed", range(3))
def test_any_choices_in_any_order_give_the_text_of_plain_decoding(seed, monkeypatch):
    plain, _ = told(None, max_tokens=60)
    choose, asked = random.Random(seed), set()

    def taken(kind):
        asked.add(kind.num_drafted)
        return choose.uniform(0.5, 1.5)

    adapted, engine = told(follower_draft(TARGET), taken, monkeypatch, max_tokens=60)
    assert adapted == plain
    assert engine.stats.acceptance.acceptance_length > 1.0
    assert asked == {0, 3, 7, 15}


def test_a_draft_that_rested_through_many_steps_goes_on_where_it_would_have_been(monkeypatch):
    """Drafts cost nothing, then too much for 40 steps, then nothing again: the draft follows what it has missed."""
    plain, _ = told(None, max_tokens=90)
    clock = iter(range(1_000_000))

    def taken(kind):
        dear = 100 < next(clock) < 350  # each choice is asked for once a step
        return 1.0 + kind.num_drafted * (5.0 if dear else 0.001)

    caught_up = []
    run = CatchUp.run
    monkeypatch.setattr(CatchUp, "run", lambda self: (caught_up.append(int(self._state.late_R.max())), run(self))[1])
    rested, engine = told(follower_draft(TARGET), taken, monkeypatch, max_tokens=90)
    assert rested == plain
    assert max(caught_up) > 4
    assert engine.stats.acceptance.acceptance_length > 1.1


def test_cheap_nodes_are_drafted_and_dear_ones_are_not(monkeypatch):
    _, cheap = told(follower_draft(TARGET), lambda kind: 1 + 0.01 * kind.num_drafted, monkeypatch)
    _, dear = told(follower_draft(TARGET), lambda kind: 1.0 + 2.0 * (kind.num_drafted > 0), monkeypatch)
    _, fixed = told(follower_draft(TARGET), shape=TreeShape.chain(3))
    assert cheap.stats.acceptance.acceptance_length > 1.2
    assert dear.stats.acceptance.offered[0] < 0.3 * fixed.stats.acceptance.offered[0]
    assert dear.explain_drafting()["chosen"] == "no drafts"
    assert "chain of 3" in cheap.explain_drafting()["tokens_a_second"]
    assert fixed.explain_drafting() == {}


def late_engine(monkeypatch):
    """Return an engine whose draft has some steps to follow, and where no row has a place."""
    monkeypatch.setattr(Prepared, "seconds", lambda self, kind, num_keys: 1.0 + 9.0 * (kind.num_drafted > 0))
    config = EngineConfig(cuda_graphs="on", max_context=128, page_size=16, max_requests=4, max_batch_tokens=16)
    engine = build_engine(TARGET, follower_draft(TARGET), None, config, OPS)
    emissions = answered(engine, [1, 2], SamplingParams(max_tokens=10))  # no full page: nothing to follow for others
    assert [emission.finish_reason for emission in emissions][-1] is FinishReason.LENGTH
    return engine


def answered(engine, prompt, params):
    """Answer one prompt; return what steps gave for it."""
    request, emissions = engine.add(prompt, params, 0), []
    while engine.has_work:
        emissions += engine.step()
        engine.check_invariants()
    return [emission for emission in emissions if emission.request_id == request]


def test_a_prompt_that_is_given_up_before_its_end_hurts_nobody_while_the_draft_is_late(monkeypatch):
    (expected,) = run(build_engine(TARGET, None, None, EngineConfig(max_context=128), OPS), [[5, 6, 7]], [GREEDY], [0])
    engine = late_engine(monkeypatch)
    doomed = engine.add([*range(61), *range(40)], GREEDY, 0)
    for _ in range(3):
        engine.step()
    assert engine.abort(doomed)
    emissions = answered(engine, [5, 6, 7], GREEDY)
    assert [token.token_id for emission in emissions for token in emission.tokens] == expected


def test_the_last_answer_is_handed_out_if_it_never_had_a_place_and_the_draft_is_late(monkeypatch):
    emissions = answered(late_engine(monkeypatch), list(range(20)), SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert emissions[-1].finish_reason is FinishReason.LENGTH


def test_where_nothing_was_measured_chains_have_their_usual_length():
    adapted, engine = told(follower_draft(TARGET))
    plain, fixed = told(follower_draft(TARGET), shape=TreeShape.chain(3))
    assert adapted == plain
    assert engine.stats.acceptance.passes == fixed.stats.acceptance.passes


def parts(num_rows=3, num_columns=24):
    """Return a target and its draft with caches of their own, and the buffers of steps over them."""
    kv, draft_kv = (KvCache.allocate(model.kv_shape, 90, 4, torch.float32, DEVICE) for model in (TARGET, DRAFT))
    models = StepModels(ReferenceOps(DEVICE), TARGET, kv, (1, 2, 4), DRAFT, draft_kv)
    return models, buffers_of(models, num_rows, num_columns, 4)


@pytest.mark.parametrize("rests", [1, 7, MOST_LATE])
def test_a_draft_that_catches_up_has_the_keys_and_the_state_of_one_that_never_rested(rests):
    found = []
    for drafts in (True, False):
        models, buffers = parts()
        state = buffers.state
        with torch.inference_mode():
            state.load(0, Loaded(0, 7, 3, 0, 0, 0.0), range(20))  # nothing drafted is kept of it
            state.load(1, Loaded(0, 9, 4, 0, 0, 0.7), range(20, 40))
            for number in range(rests):
                if number == rests // 2:  # a row that begins later is less late
                    state.load(2, Loaded(0, 11, 5, 0, 0, 0.0), range(40, 60))
                run_step(Step(models, buffers, StepKind(3, int(drafts), 80, notes=not drafts)))
            if not drafts:
                assert state.late_R.tolist() == [rests, rests, rests - rests // 2]
                CatchUp(models, state, 3, 20).run()
                assert not state.late_R.any()
        committed = state.rows.committed_R.tolist()
        keys = [layer.keys_SGd for layer in models.draft_kv.layers]
        own = [
            k.view(90, 4, *k.shape[1:])[20 * r : 20 * r + 20].flatten(0, 1)[:n]
            for k in keys
            for r, n in enumerate(committed)
        ]
        found.append((committed, state.rows.root_R.clone(), state.feedback_RD, state.logits_RV, *own))
    (committed, *followed), (same, *caught_up) = found
    assert committed == same == [rests, rests, rests - rests // 2]
    for one, other in zip(followed, caught_up, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_what_contexts_add_is_measured_for_every_kind_and_leaves_the_batch_as_it_was(monkeypatch):
    """A clock that counts the keys of active rows: a step of three places takes three times what a key adds to one."""
    models, buffers = parts()
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
        prepared.measure()  # on a GPU a part of warming up
    assert all(torch.equal(a, b) for a, b in zip(state.saved(), before, strict=True))
    assert prepared.seconds(kind, 40) == pytest.approx(1.0 + 0.003 * 40)
    assert prepared.seconds(StepKind(1, 3, 80), 0) is None
