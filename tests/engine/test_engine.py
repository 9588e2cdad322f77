"""What the engine promises beside the tokens: stops, logprobs, statistics, aborts, failures, refusals."""

import logging

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.output import StopMatcher
from slipstream.engine.request import FinishReason
from slipstream.errors import ConfigError, RequestError, StepError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, run, tiny_draft, tiny_target

TARGET = tiny_target()
GREEDY = SamplingParams(max_tokens=20)


class Letters:
    """A tokenizer of one letter a token."""

    def push(self, ids):
        return "".join(chr(65 + token) for token in ids)

    def finish(self):
        return ""


def finish(engine):
    emissions = []
    while engine.has_work:
        emissions += engine.step()
        engine.check_invariants()
    return emissions


def test_an_answer_ends_at_a_stop_token_even_inside_an_accepted_path():
    (plain,) = run(engine_of(TARGET), [[1, 2, 3]], [GREEDY], [0])
    end = plain[7]
    engine = engine_of(TARGET, follower_draft(TARGET), TreeShape(depth=5, width=2))
    engine.add([1, 2, 3], GREEDY, 0, end_tokens=[end])
    emissions = finish(engine)
    tokens = [token.token_id for emission in emissions for token in emission.tokens]
    assert tokens == plain[: plain.index(end) + 1]
    assert emissions[-1].finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on():
    (plain,) = run(engine_of(TARGET), [[1, 2, 3]], [GREEDY], [0])
    engine = engine_of(TARGET)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), 0, end_tokens=[plain[3]])
    emissions = finish(engine)
    assert sum(len(emission.tokens) for emission in emissions) == 20
    assert emissions[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_stop_string_across_tokens_ends_the_text_before_it(draft):
    (plain,) = run(engine_of(TARGET), [[1, 2, 3]], [GREEDY], [0])
    text = Letters().push(plain)
    stop = text[5:8]
    engine = engine_of(TARGET, draft)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, stop=(stop, "never")), 0, detokenizer=Letters())
    emissions = finish(engine)
    assert "".join(emission.text for emission in emissions) == text[: text.index(stop)]
    assert emissions[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("draft", [None, "follower"])
@pytest.mark.parametrize("place", [2, 8, 14])
def test_a_stop_string_ends_an_answer_only_past_its_least_length(draft, place):
    (plain,) = run(engine_of(TARGET), [[1, 2, 3]], [GREEDY], [0])
    text = Letters().push(plain)
    stop = text[place : place + 4]
    end = text.find(stop, 10 + 1 - len(stop))  # where the first one begins that is whole only then
    engine = engine_of(TARGET, follower_draft(TARGET) if draft else None, TreeShape(depth=3, width=2))
    params = SamplingParams(max_tokens=20, min_tokens=10, stop=(stop,))
    engine.add([1, 2, 3], params, 0, detokenizer=Letters())
    emissions = finish(engine)
    assert "".join(emission.text for emission in emissions) == (text if end < 0 else text[:end])
    assert emissions[-1].finish_reason is (FinishReason.LENGTH if end < 0 else FinishReason.STOP)


def test_a_stop_string_that_was_whole_too_early_does_not_count_later():
    matcher = StopMatcher(["ab", "abcd"])
    assert matcher.feed("1ab", may_stop=False) == "1"
    assert matcher.feed("c") == ""
    assert matcher.feed("e") == "abce"
    assert not matcher.stopped


def test_text_held_back_for_a_stop_string_comes_out_at_the_end():
    matcher = StopMatcher(["abcd", "xy"])
    assert matcher.feed("1ab") == "1"
    assert matcher.feed("c") == ""
    assert matcher.feed("e") == "abce"
    assert matcher.feed("x") == ""
    assert matcher.finish() == "x"


@pytest.mark.parametrize("draft", [None, "follower"])
def test_logprobs_are_the_targets_own_and_do_not_depend_on_the_draft(draft):
    params = SamplingParams(max_tokens=12, logprobs=3, temperature=0.7)
    engine = engine_of(TARGET, follower_draft(TARGET) if draft else None, TreeShape(depth=3, width=2))
    engine.add([1, 2, 3], params, 5)
    tokens = [token for emission in finish(engine) for token in emission.tokens]
    reference = engine_of(TARGET)
    reference.add([1, 2, 3], params, 5)
    expected = [token for emission in finish(reference) for token in emission.tokens]
    for got, want in zip(tokens, expected, strict=True):
        assert got.token_id == want.token_id == got.logprob.token_id
        assert got.logprob.logprob == pytest.approx(want.logprob.logprob, abs=1e-4)
        assert [t for t, _ in got.logprob.top] == [t for t, _ in want.logprob.top]
        assert got.logprob.top[0][1] >= got.logprob.logprob


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_a_step_without_work_does_nothing(cuda_graphs):
    engine = engine_of(TARGET, cuda_graphs=cuda_graphs)
    assert engine.step() == []
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=9), 0)
    engine.step()
    engine.step()
    engine.abort(request)
    assert engine.step() == []
    assert not engine.has_work
    engine.check_invariants()


def test_statistics_add_up():
    engine = engine_of(TARGET, follower_draft(TARGET), TreeShape(depth=3, width=3, budget=9))
    params = SamplingParams(max_tokens=30, temperature=0.8)
    ids = [engine.add([i, 2, 3], params, i) for i in range(3)]
    last = {emission.request_id: emission for emission in finish(engine)}
    stats = engine.stats.acceptance
    assert stats.emitted == 90 == sum(last[i].stats.emitted for i in ids)
    assert stats.passes == sum(last[i].stats.passes for i in ids)
    assert stats.prompt_passes == 3
    assert stats.acceptance_length == (stats.emitted - 3) / (stats.passes - 3) > 1.1
    assert sum(stats.accepted) <= stats.emitted - stats.passes + 3
    assert all(kept <= tried for kept, tried in zip(stats.accepted, stats.offered, strict=True))
    assert stats.accepted == sorted(stats.accepted, reverse=True)


def test_drafted_tokens_are_marked():
    engine = engine_of(TARGET, follower_draft(TARGET), TreeShape(depth=3, width=3))
    engine.add([1, 2, 3], SamplingParams(max_tokens=40, temperature=0.8), 0)
    emissions = finish(engine)
    marked = sum(token.draft_position > 0 for emission in emissions for token in emission.tokens)
    assert marked == sum(engine.stats.acceptance.accepted) > 0
    for emission in emissions:
        positions = [token.draft_position for token in emission.tokens]
        assert positions[:-1] == list(range(1, len(positions)))


def test_a_preempted_request_does_not_count_its_own_pages_as_cached():
    engine = engine_of(TARGET, max_context=40, num_pages=14)
    prompts = [[seed, 2, 3, 4, 5, 6, 7, 8, 9] for seed in range(2)]
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=30), seed)
    emissions = finish(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens == 0
    assert {emission.num_cached for emission in emissions} == {0}
    engine.add(prompts[0], GREEDY, 0)
    assert {emission.num_cached for emission in finish(engine)} == {8}, "pages of an earlier request count"


def test_abort_gives_pages_back_at_once_and_leaves_the_others_alone():
    (expected,) = run(engine_of(TARGET), [[4, 5, 6]], [GREEDY], [0])
    engine = engine_of(TARGET, "ngram")
    doomed = engine.add([1, 2, 3], GREEDY, 0)
    kept = engine.add([4, 5, 6], GREEDY, 0)
    waiting = engine.add([7, 8, 9], GREEDY, 0)
    assert engine.abort(waiting)
    tokens = [t.token_id for e in engine.step() if e.request_id == kept for t in e.tokens]
    assert engine.abort(doomed)
    assert not engine.abort(doomed)
    engine.check_invariants()
    while engine.has_work:
        tokens += [t.token_id for e in engine.step() if e.request_id == kept for t in e.tokens]
    assert tokens == expected
    assert engine.page_usage == 0


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on(monkeypatch):
    engine = engine_of(TARGET, "ngram")
    doomed = engine.add([1, 2, 3], GREEDY, 0)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(TARGET.lm_head, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        with pytest.raises(StepError, match="boom") as error:
            engine.step()
    assert error.value.request_ids == (doomed,)
    engine.check_invariants()
    assert not engine.has_work
    assert engine.page_usage == 0
    (expected,) = run(engine_of(TARGET), [[4, 5, 6]], [GREEDY], [0])
    assert run(engine, [[4, 5, 6]], [GREEDY], [0]) == [expected]


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n"])
def test_counts_are_whole_numbers(field):
    for wrong in (1.5, True, False, "2"):
        with pytest.raises(RequestError, match=f"^{field} is {wrong!r}; it must"):
            SamplingParams(**{field: wrong})


@pytest.mark.parametrize("wrong", [5, None, b"salt"])
def test_a_salt_is_text(wrong):
    with pytest.raises(RequestError, match=r"cache_salt is .*; it must be text"):
        SamplingParams(cache_salt=wrong)


def test_a_measured_request_that_cannot_start_leaves_nothing_behind():
    engine = engine_of(TARGET, max_requests=1, num_pages=100)
    engine.add_computed([1] * 20, GREEDY, 0)
    usage = engine.page_usage
    with pytest.raises(RequestError, match="no room"):
        engine.add_computed([2] * 20, GREEDY, 0)
    assert (engine.num_waiting, engine.page_usage) == (0, usage)
    engine.check_invariants()
    finish(engine)
    assert engine.page_usage == 0


def test_what_lies_in_the_pages_of_a_measured_request_is_nobodys_text():
    prompt = [3] * 21
    (expected,) = run(engine_of(TARGET), [prompt], [GREEDY], [0])
    engine = engine_of(TARGET)
    engine.add_computed(prompt, GREEDY, 0)
    finish(engine)
    assert run(engine, [prompt], [GREEDY], [0]) == [expected]
    assert engine.stats.cached_tokens == 0


def test_forgetting_prompts_again_and_again_while_idle_costs_nothing_more(monkeypatch):
    engine = engine_of(TARGET, num_pages=50)
    run(engine, [[3] * 21], [GREEDY], [0])
    for _ in range(20):
        assert engine.forget_prompts()
    steps, submit = [], engine.executor.submit
    monkeypatch.setattr(engine.executor, "submit", lambda step: (steps.append(step), submit(step)))
    run(engine, [[4, 5, 6]], [GREEDY], [0])
    assert sorted(steps[0].lost_pages) == list(range(50))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), (list(range(60)) * 3, "context holds 128"), ([1, VOCAB], f"token id {VOCAB}"), ([-1], "-1")],
)
def test_prompts_that_can_never_run_are_refused(prompt, words):
    with pytest.raises(RequestError, match=words):
        engine_of(TARGET).add(prompt, GREEDY, 0)


def test_an_answer_ends_where_the_context_does():
    engine = engine_of(TARGET, "ngram", max_context=16)
    engine.add([1, 2, 3], SamplingParams(max_tokens=100), 0)
    emissions = finish(engine)
    assert sum(len(emission.tokens) for emission in emissions) == 13
    assert emissions[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("settings", [{"page_size": 0}, {"num_pages": 3}, {"max_requests": 0}, {"max_context": 10**6}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        engine_of(TARGET, **settings)


def test_a_draft_that_accepts_nothing_is_reported_once(caplog):
    engine = engine_of(TARGET, tiny_draft(TARGET, seed=3), TreeShape.chain(1), max_context=256)
    with caplog.at_level(logging.WARNING):
        run(engine, [[i, i + 1] for i in range(8)], [SamplingParams(max_tokens=60)] * 8, [0] * 8)
    assert engine.stats.acceptance.rates[0] < 0.03
    assert sum("does not fit" in record.message for record in caplog.records) == 1


def test_default_pages_hold_one_whole_context():
    config = EngineConfig(max_context=1000, page_size=16, max_requests=1)
    assert config.resolve_num_pages(63) * 16 >= 1063
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_chains_and_trees_over_a_sliding_window_give_the_tokens_of_plain_decoding(page_size):
    target = tiny_target(sliding_window=6)
    params = [SamplingParams(max_tokens=20, temperature=0.0), SamplingParams(max_tokens=20, top_p=0.9)]
    prompts = [list(range(1, 12)), [5, 9, 2]]
    expected = run(engine_of(target, page_size=page_size), prompts, params, [0, 1])
    bounded = follower_draft(target)
    bounded.see_last(4)
    assert bounded.spec == follower_draft(target, sliding_window=4).spec
    lifted = follower_draft(target, sliding_window=4)
    lifted.see_last(lifted.spec.max_position)
    assert lifted.spec == follower_draft(target).spec
    for shape in (TreeShape.chain(3), TreeShape(depth=4, width=3, budget=12)):
        for draft in (tiny_draft(target), follower_draft(target), bounded):
            engine = engine_of(target, draft, shape, page_size=page_size)
            assert run(engine, prompts, params, [0, 1]) == expected


def test_pages_behind_every_window_are_given_back_and_tokens_stay_the_same(monkeypatch):
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    prompt, target = [3, 1, 4, 1, 5, 9, 2, 6], tiny_target(sliding_window=8)

    def decoded(draft):
        """Return the answer, how many tokens a pass gave, and the most pages it held from its middle on, as a share."""
        engine, answer, held = engine_of(target, draft, max_context=112), [], []
        engine.add(prompt, params, 0)
        while engine.has_work:
            answer += [token.token_id for emission in engine.step() for token in emission.tokens]
            engine.check_invariants()
            held += [engine.page_usage] if len(answer) > 50 else []
        return answer, engine.stats.acceptance.acceptance_length, max(held)

    bounded = tiny_draft(target, sliding_window=6)
    expected, _, whole = decoded(None)
    _, accepted, _ = decoded(bounded)
    monkeypatch.setattr("slipstream.engine.engine._READ_BEFORE", 16)  # as the CPU's kernels read
    for draft in (None, "ngram", bounded):
        answer, length, share = decoded(draft)
        assert answer == expected
        assert share < whole / 2
    assert length == accepted, "the draft read what it had given back"
    assert decoded(follower_draft(target))[2] > 0.8 * whole, "a draft that sees all keeps all"


@pytest.mark.parametrize("shape", [TreeShape.chain(6), TreeShape(depth=3, width=3)])
def test_no_draft_reaches_past_the_last_position_the_model_has(shape):
    short = tiny_target(max_position=40)
    params = [SamplingParams(max_tokens=100, temperature=0.8)] * 2
    prompts = [[1, 2, 3], list(range(30))]
    expected = run(engine_of(short, max_context=40), prompts, params, [0, 1])
    assert [len(answer) for answer in expected] == [37, 10]
    draft = follower_draft(short)
    assert run(engine_of(short, draft, shape, max_context=40), prompts, params, [0, 1]) == expected
