"""Whether an earlier answer is still cached shows in nothing but the time, down to the last log probability."""

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import select
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny_moe import deepseek, minimax, save

CPU = torch.device("cpu")
OPS = select(CPU)
PAGE = 4
PROMPTS = [[5 + seed, 17, 40, 3, 9, 22, 8 + seed, 31, 2] for seed in range(2)]


@pytest.fixture(scope="module", params=["DeepSeek-V3 in float32", "DeepSeek-V3 in bfloat16", "MiniMax-M2 in bfloat16"])
def target(request, tmp_path_factory):
    model = deepseek if request.param.startswith("DeepSeek") else minimax
    folder = save(model(num_hidden_layers=2).to(torch.bfloat16), tmp_path_factory.mktemp("target"))
    dtype = torch.float32 if request.param.endswith("float32") else torch.bfloat16
    return load_target(open_checkpoint(folder), dtype, CPU, ops=OPS)


def engine_of(target, **settings):
    config = EngineConfig(max_context=96, page_size=PAGE, max_requests=4, **settings)
    return build_engine(target, None, TreeShape.chain(1), config, OPS)


def answer(engine, prompt, seed, max_tokens=10):
    """Return tokens with their log probabilities."""
    engine.add(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8 * (seed % 2), logprobs=2), seed)
    found = []
    while engine.has_work:
        found += [(token.token_id, token.logprob) for emission in engine.step() for token in emission.tokens]
    engine.check_invariants()
    return found


def test_a_second_turn_says_the_same_whether_the_first_answer_is_cached_or_not(target):
    for seed, prompt in enumerate(PROMPTS):
        engine = engine_of(target)
        first = [token for token, _ in answer(engine, prompt, seed)]
        turn = [*prompt, *first, 50, 51, 52]
        cached_before = engine.stats.cached_tokens
        expected = answer(engine_of(target), turn, seed)
        assert answer(engine, turn, seed) == expected
        num_cached = engine.stats.cached_tokens - cached_before
        prompt_pages = len(prompt) // PAGE * PAGE
        if target.spec.mla is None:
            assert num_cached > prompt_pages, "an answer is taken up again where that changes no bit"
        else:
            assert num_cached == prompt_pages, "a prompt is taken up again"
        assert answer(engine, turn, seed) == expected, "and once more, from pages of either kind"


def test_a_preempted_answer_goes_on_from_its_own_pages_or_without_them_as_if_nothing_had_happened(target):
    alone = [answer(engine_of(target), prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    for prefix_cache in (True, False):
        engine = engine_of(target, num_pages=24, prefix_cache=prefix_cache)
        found = {}
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=44, temperature=0.8 * (seed % 2), logprobs=2)
            found[engine.add(prompt, params, seed)] = []
        while engine.has_work:
            for emission in engine.step():
                found[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
        assert engine.stats.preemptions > 0
        assert [tokens[:10] for tokens in found.values()] == alone
