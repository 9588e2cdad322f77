"""What the time of a step goes to: measured part by part, told once, and as long as the step."""

import time

import pytest

from slipstream.engine.stats import counted_context
from slipstream.executors.stopwatch import Lap
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, stammering_target

TARGET = stammering_target(VOCAB)
FOLLOWER = follower_draft(TARGET)
DRAFTS = {
    "none": (None, None),
    "chain": (FOLLOWER, TreeShape.chain(3)),
    "tree": (FOLLOWER, TreeShape(3, 2, 6)),
    "n-gram": ("ngram", TreeShape.chain(3)),
}


def answered(engine, prompts, max_tokens):
    """Answer prompts; return the seconds it took."""
    started = time.perf_counter()
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed)
    while engine.has_work:
        engine.step()
    engine.rest()
    return time.perf_counter() - started


def prompt_of(length, first=1):
    return [(first + 7 * index) % VOCAB for index in range(length)]


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_parts_add_up_to_the_time_steps_took(draft, cuda_graphs):
    engine = engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs)
    wall_s = answered(engine, [prompt_of(20), prompt_of(90, 2), prompt_of(5, 3)], 24)
    spent = engine.stats.phase_seconds
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.03)
    assert spent["prefill"] > 0
    assert spent["verify"] > 0
    assert (spent["draft"] > 0) == (draft != "none")
    assert spent["host"] < 0.6 * wall_s  # a tiny model's steps are little else; a part left out would be more


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", ["none", "chain", "tree"])
def test_a_prompt_and_its_first_token_are_no_verification(draft, cuda_graphs):
    engine = engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs)
    for length in (8, 100):  # in one part, and in two
        before = dict(engine.stats.phase_seconds)
        answered(engine, [prompt_of(length)], 1)
        spent = {phase: seconds - before[phase] for phase, seconds in engine.stats.phase_seconds.items()}
        assert spent["verify"] == spent["mixed"] == 0
        assert spent["prefill"] > 0
    assert not engine.stats.by_context


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", ["none", "chain"])
def test_a_device_that_is_behind_has_its_times_told_before_the_engine_rests(draft, cuda_graphs, monkeypatch):
    begun, waited, mark = [], [], Lap.mark

    def marked(lap, phase):
        mark(lap, phase)
        if phase is not None:
            begun.append(lap)

    def wait(lap):
        waited.append(lap)

    monkeypatch.setattr(Lap, "mark", marked)
    monkeypatch.setattr(Lap, "over", property(lambda lap: lap in waited or lap is not begun[-1]))
    monkeypatch.setattr(Lap, "wait", wait)
    engine = engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs)
    for length, max_tokens in ((90, 24), (8, 1), (100, 1), (8, 12)):
        before, busy_s = dict(engine.stats.phase_seconds), engine.stats.busy_s
        answered(engine, [prompt_of(length)], max_tokens)
        spent = {phase: seconds - before[phase] for phase, seconds in engine.stats.phase_seconds.items()}
        assert spent["prefill"] > 0
        assert (spent["verify"] > 0) == (max_tokens > 1)
        assert sum(spent.values()) == pytest.approx(engine.stats.busy_s - busy_s)


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("rests", [False, True])
def test_time_without_a_request_is_nobodys(rests, cuda_graphs, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    engine = engine_of(TARGET, *DRAFTS["chain"], cuda_graphs=cuda_graphs)
    given_up = engine.add(prompt_of(20), SamplingParams(max_tokens=30, ignore_eos=True), 0)
    for _ in range(3):
        engine.step()
    engine.abort(given_up)
    if rests:
        engine.rest()
        assert not engine.executor.in_flight
    now_s[0] = 3600.0
    answered(engine, [prompt_of(20, 2)], 8)
    assert engine.stats.busy_s == sum(engine.stats.phase_seconds.values()) == 0


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_passes_are_counted_at_the_context_they_had(draft, cuda_graphs):
    engine = engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs)
    answered(engine, [prompt_of(40)], 80)
    costs = engine.stats.by_context
    assert set(costs) == {64, 96, 128}
    assert sum(cost.passes for cost in costs.values()) == engine.stats.acceptance.decoding_passes
    assert sum(cost.emitted for cost in costs.values()) == 79  # the first came of the prompt
    assert sum(cost.verify_s for cost in costs.values()) == pytest.approx(engine.stats.phase_seconds["verify"])


def test_a_pass_that_a_prompt_shares_is_counted_apart():
    engine = engine_of(TARGET, *DRAFTS["tree"], cuda_graphs="off")
    engine.add(prompt_of(20), SamplingParams(max_tokens=30, ignore_eos=True), 0)
    engine.step()
    assert engine.stats.phase_seconds["mixed"] == 0
    engine.add(prompt_of(50, 2), SamplingParams(max_tokens=4, ignore_eos=True), 1)
    engine.step()
    assert engine.stats.phase_seconds["mixed"] > 0
    assert not engine.stats.by_context


def test_contexts_are_counted_in_two_steps_for_each_doubling():
    assert [counted_context(value) for value in (1, 64, 65, 97, 129, 1000, 1024.5, 1537)] == [
        64, 64, 96, 128, 192, 1024, 1536, 2048,
    ]  # fmt: skip
