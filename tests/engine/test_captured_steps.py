"""Captured steps give the tokens, the statistics and the state that eager ones give."""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import FinishReason
from slipstream.errors import ConfigError, RankLostError, StepError
from slipstream.executors.cuda_graph.capture import key_bounds, row_buckets
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.cuda_graph.prompts import PADDED_SIZES
from slipstream.executors.runner import Runner
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import OPS, VOCAB, engine_of, follower_draft, run, tiny_draft, tiny_target

TARGET = tiny_target()
DRAFTS = {
    "none": None,
    "random": tiny_draft(TARGET),
    "follower": follower_draft(TARGET),
    "small vocabulary": tiny_draft(TARGET, seed=4, draft_vocab_size=17, feature_norm="per_layer"),
    "two layers": tiny_draft(TARGET, seed=7, num_layers=2, residual="normed", feedback="post_norm"),
}
DRAFTS["small vocabulary"].token_ids_V = DRAFTS["small vocabulary"].token_ids_V * 3 + 2
GREEDY = SamplingParams(max_tokens=20)
PROMPT = [7, 4, 9, 11] * 5

simple = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    stop_token_ids=st.sampled_from([(), (5, 11)]),
)
special = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7]),
    top_p=st.sampled_from([1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    min_tokens=st.sampled_from([0, 1]),
    logprobs=st.sampled_from([None, 2]),
)
prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
seed = st.integers(-(2**63), 2**63 - 1)
requests = st.lists(
    st.tuples(prompt, st.one_of(simple, simple, simple, special), seed, st.sampled_from([True, True, True, False])),
    min_size=1,
    max_size=6,
)


def captured(draft, length=3, **config) -> Engine:
    """Return an engine whose decoding runs as captured steps."""
    return engine_of(TARGET, DRAFTS[draft], TreeShape.chain(length), **{"cuda_graphs": "on", **config})


def drive(engine: Engine, work: list, order: random.Random) -> dict[int, list]:
    """Add requests at random moments and step until all have ended; return each one's emitted tokens."""
    waiting = list(enumerate(work))
    names: dict[int, int] = {}
    answers: dict[int, list] = {index: [] for index in range(len(work))}
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or order.random() < 0.15):
            index, (tokens, params, number, speculate) = waiting.pop(0)
            names[engine.add(tokens, params, number, speculate=speculate)] = index
        for emission in engine.step():
            answers[names[emission.request_id]] += [(t.token_id, t.draft_position) for t in emission.tokens]
        engine.check_invariants()
    assert engine.page_usage == 0
    return answers


@settings(max_examples=22, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=requests,
    draft=st.sampled_from(sorted(DRAFTS)),
    length=st.integers(1, 6),
    page_size=st.sampled_from([1, 4, 16]),
    pages=st.sampled_from([None, 66]),
    max_requests=st.sampled_from([2, 5, 8]),
    prefix_cache=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_captured_steps_give_the_tokens_of_eager_ones(
    work, draft, length, page_size, pages, max_requests, prefix_cache, order
):
    config = {
        "max_context": 64,
        "page_size": page_size,
        "num_pages": None if pages is None else -(-(64 + length) // page_size) + 3,
        "max_requests": max_requests,
        "prefix_cache": prefix_cache,
    }
    eager = drive(captured(draft, length, cuda_graphs="off", **config), work, random.Random(0))
    ahead = drive(captured(draft, length, **config), work, order)
    tokens = [[[token for token, _ in answer] for answer in run.values()] for run in (eager, ahead)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("simulated", [(), (0.8, 0.5, 0.3)])
@pytest.mark.parametrize("draft", sorted(DRAFTS))
def test_even_the_statistics_are_those_of_eager_steps(draft, simulated):
    work = [([i, 2, 3], SamplingParams(max_tokens=20 + 3 * i, temperature=0.5 * (i % 2)), i, i != 3) for i in range(5)]
    engines = [captured(draft, cuda_graphs="off"), captured(draft)]
    for engine in engines:
        engine.simulate_acceptance(simulated)
    answers = [drive(engine, work, random.Random(0)) for engine in engines]
    assert answers[0] == answers[1]
    assert engines[0].stats.acceptance == engines[1].stats.acceptance


def test_a_draft_sees_the_first_token_after_a_prompt_that_fills_its_padded_batch():
    text = [7 * i % VOCAB for i in range(PADDED_SIZES[0])]
    work = [([i, *text[1:]], SamplingParams(max_tokens=9, temperature=1.0), i, True) for i in range(8)]
    engines = [captured("random", cuda_graphs=mode, max_context=80, max_requests=1) for mode in ("off", "on")]
    answers = [drive(engine, work, random.Random(0)) for engine in engines]
    assert answers[0] == answers[1]


def test_decoding_really_runs_as_captured_steps(monkeypatch):
    engine = captured("follower")
    engine.add([1, 2, 3], SamplingParams(max_tokens=40), 0)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "forward", lambda *_: pytest.fail("an eager step ran"))
        while engine.has_work:
            engine.step()
            engine.check_invariants()
    assert engine.stats.acceptance.emitted == 40
    assert sum(engine.stats.acceptance.accepted) > 0


def test_a_request_aborted_in_flight_frees_its_pages_and_leaves_the_others_alone():
    prompts = [[4, 5, 6], [7, 8, 9], [10, 11, 12]]
    params = SamplingParams(max_tokens=40)
    expected = run(engine_of(TARGET), prompts, [params] * 3, [0, 1, 2])
    engine = captured("follower", num_pages=60)
    ids = [engine.add(p, params, i) for i, p in enumerate(prompts)]
    answers = {i: [] for i in ids}

    def steps(most):
        while engine.has_work and (most := most - 1) >= 0:
            for emission in engine.step():
                answers[emission.request_id] += [token.token_id for token in emission.tokens]
            engine.check_invariants()

    steps(4)
    assert engine.abort(ids[1])
    engine.check_invariants()
    late = engine.add([20, 21, 22], params, 3)  # takes the pages the aborted request's last step still writes behind
    answers[late] = []
    steps(60)
    assert not engine.has_work
    assert [answers[ids[0]], answers[ids[2]]] == [expected[0], expected[2]]
    assert answers[ids[1]] == expected[1][: len(answers[ids[1]])] != expected[1]
    assert answers[late] == run(engine_of(TARGET), [[20, 21, 22]], [params], [3])[0]


@pytest.mark.parametrize("draft", ["none", "follower"])
def test_requests_survive_preemption_while_captured_steps_run(draft):
    work = [([i, i + 1, i + 2], SamplingParams(max_tokens=30, temperature=0.7), i, True) for i in range(4)]
    engine = build_engine(
        TARGET,
        DRAFTS[draft],
        TreeShape.chain(3),
        EngineConfig(max_context=40, page_size=4, num_pages=14, max_batch_tokens=32, cuda_graphs="on"),
        OPS,
    )
    expected = drive(engine_of(TARGET), work, random.Random(0))
    answers = drive(engine, work, random.Random(1))
    assert {i: [t for t, _ in a] for i, a in answers.items()} == {i: [t for t, _ in a] for i, a in expected.items()}
    assert engine.stats.preemptions > 0


def test_a_prefix_written_by_captured_steps_serves_later_requests_and_their_draft():
    lengths = []
    for mode in ("off", "on"):
        engine = captured("follower", cuda_graphs=mode)
        (first,) = run(engine, [[1, 2, 3]], [SamplingParams(max_tokens=40)], [0])
        (again,) = run(engine, [[1, 2, 3, *first[:30]]], [SamplingParams(max_tokens=10)], [0])
        assert again == first[30:]
        assert engine.stats.cached_tokens >= 28
        lengths.append(engine.stats.acceptance.acceptance_length)
    assert lengths[0] == lengths[1]


def test_the_tree_may_change_while_a_step_is_in_flight():
    params = SamplingParams(max_tokens=60, temperature=0.8)
    (expected,) = run(engine_of(TARGET), [[1, 2, 3]], [params], [5])
    engine = captured("follower", num_pages=100)
    engine.add([1, 2, 3], params, 5)
    tokens = []
    shapes = [TreeShape.chain(5), TreeShape(depth=2, width=2), TreeShape.chain(1), TreeShape.chain(4)]
    for step in itertools.takewhile(lambda _: engine.has_work, itertools.count()):
        if step % 4 == 3 and shapes:
            engine.set_tree(shapes.pop())
        tokens += [token.token_id for emission in engine.step() for token in emission.tokens]
        engine.check_invariants()
    assert tokens == expected


def scored(engine: Engine, change: int) -> list:
    """Return tokens with log probabilities where every guess is right; the tree shrinks before one of the steps."""
    engine.add(PROMPT, SamplingParams(max_tokens=60, logprobs=0, logit_bias={0: 100.0}), 1)
    found = []
    for step in itertools.takewhile(lambda _: engine.has_work, itertools.count()):
        if step == change:
            engine.set_tree(TreeShape.chain(1))
        found += [(token.token_id, token.logprob) for emission in engine.step() for token in emission.tokens]
        engine.check_invariants()
    return found


@pytest.mark.parametrize(("length", "page_size"), [(7, 1), (7, 4), (50, 4)])
def test_what_a_step_in_flight_gives_has_room_and_is_seen_after_a_change_to_a_smaller_tree(
    length, page_size, monkeypatch
):
    """Keys without pages, or past the bound of the step, would be missing: log probabilities would tell."""
    monkeypatch.setattr("slipstream.executors.cuda_graph.capture._FEW_KEYS", 8)
    draft = follower_draft(TARGET)
    draft.token_ids_V = torch.zeros_like(draft.token_ids_V)  # it always guesses 0, and the bias has 0 always come

    def engine() -> Engine:
        config = {"cuda_graphs": "on", "page_size": page_size, "num_pages": 600 // page_size, "max_requests": 2}
        return engine_of(TARGET, draft, TreeShape.chain(length), **config)

    plain = engine()
    expected = scored(plain, -1)
    assert plain.stats.acceptance.acceptance_length > 6
    for change in (2, 3, 4) if length == 7 else (2,):
        found = scored(engine(), change)
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [one.logprob for _, one in found] == pytest.approx([one.logprob for _, one in expected], abs=1e-4)


def test_a_stop_token_inside_an_accepted_chain_ends_the_answer_there():
    (plain,) = run(engine_of(TARGET), [[1, 2, 3]], [GREEDY], [0])
    engine = captured("follower", 5)
    engine.add([1, 2, 3], GREEDY, 0, end_tokens=[plain[7]])
    emissions = []
    while engine.has_work:
        emissions += engine.step()
    assert [t.token_id for e in emissions for t in e.tokens] == plain[: plain.index(plain[7]) + 1]
    assert emissions[-1].finish_reason is FinishReason.STOP


def test_a_failing_captured_step_ends_its_requests_and_the_engine_lives_on(monkeypatch):
    engine = captured("follower")
    doomed = engine.add([1, 2, 3], GREEDY, 0)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(GraphExecutor, "_launch", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        with pytest.raises(StepError, match="boom") as error:
            engine.step()
    assert error.value.request_ids == (doomed,)
    engine.check_invariants()
    assert not engine.has_work
    assert engine.page_usage == 0
    (expected,) = run(engine_of(TARGET), [[4, 5, 6]], [GREEDY], [0])
    assert run(engine, [[4, 5, 6]], [GREEDY], [0]) == [expected]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_rows_that_cannot_be_taken_back_lose_no_token_and_end_no_engine(mode, monkeypatch):
    engine = captured("follower", cuda_graphs=mode)
    (expected,) = run(engine_of(TARGET), [[4, 5, 6]], [GREEDY], [0])
    with monkeypatch.context() as patch:
        submit = engine.executor.submit
        patch.setattr(engine.executor, "submit", lambda step: submit(step) if step.work else 1 // 0)
        assert run(engine, [[4, 5, 6]], [GREEDY], [0]) == [expected]
    assert run(engine, [[4, 5, 6]], [GREEDY], [0]) == [expected]


def test_a_rank_that_is_lost_while_rows_are_taken_back_is_told(monkeypatch):
    def lost(step):
        raise RankLostError("gone")

    engine = captured("none")
    engine.add([4, 5, 6], GREEDY, 0)
    for _ in range(5):
        engine.step()
    monkeypatch.setattr(engine.executor, "submit", lost)
    assert engine.abort(0)
    with pytest.raises(RankLostError):
        engine.rest()


def test_a_chain_over_a_sliding_window_is_exact():
    windowed = tiny_target(sliding_window=9)
    prompts, params = [list(range(20)), [3, 4, 5]], [SamplingParams(max_tokens=20)] * 2
    expected = run(engine_of(windowed), prompts, params, [0, 0])
    engine = engine_of(windowed, follower_draft(windowed), cuda_graphs="on")
    assert run(engine, prompts, params, [0, 0]) == expected


def test_batches_are_made_in_few_sizes_up_to_the_largest():
    assert row_buckets(1) == (1,)
    assert row_buckets(40) == (1, 2, 4, 8, 16, 32, 40)
    assert row_buckets(300)[-1] == 300


def test_bounds_on_keys_end_at_the_context():
    assert key_bounds(1000) == (1000,)
    assert key_bounds(4096) == (4096,)
    assert key_bounds(50000) == (4096, 32768, 50000)


def test_a_context_that_outgrows_its_step_goes_on_in_a_larger_one(monkeypatch):
    monkeypatch.setattr("slipstream.executors.cuda_graph.capture._FEW_KEYS", 8)
    work = [([i, 2, 3], SamplingParams(max_tokens=60, temperature=0.7), i, True) for i in range(3)]
    answers = [drive(captured("follower", cuda_graphs=mode), work, random.Random(0)) for mode in ("off", "on")]
    assert answers[0] == answers[1]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="auto, on, off"):
        EngineConfig(cuda_graphs="sometimes")
