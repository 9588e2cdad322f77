"""A prompt's own log probabilities are the target's, however the prompt is cut into chunks."""

import pytest

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.kernels import select
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import DEVICE, engine_of, follower_draft, tiny_target

PROMPT = [7, 3, 19, 3, 44, 60, 0, 12, 12, 31, 5, 9, 40, 2]
PARAMS = SamplingParams(max_tokens=6, prompt_logprobs=2)


def scores(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> list:
    engine.add(prompt, params, seed=5)
    found = []
    while engine.has_work:
        found += [emission.prompt_logprobs for emission in engine.step()]
        engine.check_invariants()
    assert all(later is None for later in found[1:])
    return list(found[0])


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 64])
def test_chunks_of_a_prompt_score_like_the_logits_of_its_tokens_one_by_one(max_batch_tokens):
    target = tiny_target()
    found = scores(engine_of(target, max_batch_tokens=max_batch_tokens), PROMPT)
    assert found[0] is None
    for index in range(1, len(PROMPT)):
        params = SamplingParams(max_tokens=1, logprobs=20)
        engine = engine_of(target)
        engine.add(PROMPT[:index], params, seed=0)
        (emission,) = engine.step() or engine.step()  # an executor that runs ahead gives it with the second
        top = dict(emission.tokens[0].logprob.top)
        assert [token for token, _ in found[index].top] == list(top)[:2]
        assert [value for _, value in found[index].top] == pytest.approx(list(top.values())[:2], abs=1e-4)
        assert found[index].token_id == PROMPT[index]
        if PROMPT[index] in top:
            assert found[index].logprob == pytest.approx(top[PROMPT[index]], abs=1e-4)
        place = list(top).index(PROMPT[index]) + 1 if PROMPT[index] in top else len(top) + 1
        assert found[index].rank == place if place <= len(top) else found[index].rank >= place


def test_a_cached_prefix_is_not_taken_up_by_a_request_that_scores_its_prompt():
    target = tiny_target()
    engine = engine_of(target, follower_draft(target))
    first = scores(engine, PROMPT)
    again = scores(engine, PROMPT)
    assert [s.token_id for s in first[1:]] == [s.token_id for s in again[1:]] == PROMPT[1:]
    assert engine.stats.cached_tokens == 0


def test_a_preempted_request_scores_its_prompt_once():
    target = tiny_target()
    engine = engine_of(target, max_context=32, num_pages=9, max_batch_tokens=4, prefix_cache=False)
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=16, prompt_logprobs=0), seed) for seed in range(3)]
    found = {}
    while engine.has_work:
        for emission in engine.step():
            if emission.prompt_logprobs is not None:
                assert emission.request_id not in found
                found[emission.request_id] = [None if s is None else s.token_id for s in emission.prompt_logprobs]
        engine.check_invariants()
    assert engine.stats.preemptions > 0
    assert found == {key: [None, *PROMPT[1:]] for key in ids}


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert scores(engine_of(tiny_target()), [7]) == [None]


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_a_prompts_tokens_have_the_log_probabilities_they_have_in_an_answer(cuda_graphs):
    """Every second token is as likely as the one before: among equals the lower id comes first, in both."""
    target, ops = tiny_target(), select(DEVICE)
    head_VD = target.lm_head.weight
    head_VD[1::2] = head_VD[: len(head_VD) - 1 : 2]
    config = EngineConfig(max_context=128, page_size=4, max_requests=4, cuda_graphs=cuda_graphs, prefix_cache=False)

    def engine() -> Engine:
        return build_engine(target, None, TreeShape(), config, ops)

    answering = engine()
    answering.add(PROMPT, SamplingParams(max_tokens=20, logprobs=5), seed=0)
    answer = []
    while answering.has_work:
        answer += [token.logprob for emission in answering.step() for token in emission.tokens]
    params = SamplingParams(max_tokens=1, prompt_logprobs=5)
    found = scores(engine(), PROMPT + [said.token_id for said in answer], params)[len(PROMPT) :]
    within = 0 if ops.row_invariant else 1e-4
    for scored, said in zip(found, answer, strict=True):
        assert scored.token_id == said.token_id
        assert scored.logprob == pytest.approx(said.logprob, abs=within)
        assert [token for token, _ in scored.top] == [token for token, _ in said.top]
        assert [value for _, value in scored.top] == pytest.approx([value for _, value in said.top], abs=within)
        assert list(scored.top) == sorted(scored.top, key=lambda pair: (-pair[1], pair[0]))
        assert scored.rank == 1
