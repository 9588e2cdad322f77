"""Whatever is drafted, however requests arrive and pages run out, the tokens are those of plain decoding."""

import random

import pytest
from arrivals import drive
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle import OracleDrafter
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.runner import Runner
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import DEVICE, OPS, VOCAB, block_draft, engine_of, follower_draft, tiny_draft, tiny_target

TARGET = tiny_target()
DRAFTS = {
    "ngram": "ngram",
    "random": tiny_draft(TARGET),
    "nonsense": tiny_draft(TARGET, seed=9, residual="normed", feedback="post_norm", feature_norm="concat"),
    "follower": follower_draft(TARGET),
    "blocks": block_draft(TARGET),
    "blocks with a window": block_draft(TARGET, windows=(None, 6), causal=(False, True)),
    "small vocabulary": tiny_draft(TARGET, seed=4, draft_vocab_size=17, feature_norm="per_layer"),
}
DRAFTS["small vocabulary"].token_ids_V = DRAFTS["small vocabulary"].token_ids_V * 3 + 2
SHAPES = [
    TreeShape.chain(1),
    TreeShape.chain(5),
    TreeShape(depth=3, width=3, budget=8),
    TreeShape(depth=4, width=2),
    TreeShape(depth=6, width=4, budget=20),
    TreeShape(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
]

sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 2.5, 7: -4.0}]),
    min_tokens=st.sampled_from([0, 1]),
    stop_token_ids=st.sampled_from([(), (5, 11)]),
)
requests = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), sampling, st.integers(-(2**63), 2**63 - 1)),
    min_size=1,
    max_size=5,
)


def plain_answer(prompt: list[int], params: SamplingParams, seed: int, keys: str = "auto") -> list[int]:
    """Decode alone, without a draft, one token a pass, with keys and values of some type."""
    engine = engine_of(TARGET, prefix_cache=False, page_size=16, kv_cache_dtype=keys)
    return drive(engine, [(prompt, params, seed)], random.Random(0))[0]


@settings(max_examples=48, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=requests,
    draft=st.sampled_from(sorted(DRAFTS)),
    shape=st.sampled_from(SHAPES),
    page_size=st.sampled_from([1, 16, 64]),
    max_batch_tokens=st.sampled_from([7, 64]),
    prefix_cache=st.booleans(),
    keys=st.sampled_from(["auto", "fp8"]),
    order=st.randoms(use_true_random=False),
)
def test_any_draft_gives_the_tokens_of_plain_decoding(
    work, draft, shape, page_size, max_batch_tokens, prefix_cache, keys, order
):
    engine = engine_of(
        TARGET,
        DRAFTS[draft],
        shape,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
        kv_cache_dtype=keys,
    )
    assert drive(engine, work, order) == [plain_answer(*item, keys) for item in work]


@settings(max_examples=48, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    work=requests,
    page_size=st.sampled_from([1, 4, 16]),
    num_nodes=st.integers(2, 30),
    hit_rate=st.sampled_from([0.3, 0.8, 1.0]),
    order=st.randoms(use_true_random=False),
)
def test_trees_that_are_mostly_right_change_nothing_even_when_pages_run_out(
    work, page_size, num_nodes, hit_rate, order
):
    expected = [plain_answer(*item) for item in work]
    known = {
        tuple(prompt): tuple(prompt) + tuple(answer) for (prompt, _, _), answer in zip(work, expected, strict=True)
    }
    oracle = OracleDrafter(list(known.values()), num_nodes, hit_rate, order.randint(0, 10**6))
    config = EngineConfig(
        max_context=64 + num_nodes,
        page_size=page_size,
        num_pages=-(-(64 + 2 * num_nodes) // page_size) + 2,
        max_requests=4,
        max_batch_tokens=48,
    )
    num_pages = config.resolve_num_pages(num_nodes - 1)
    kv = KvCache.allocate(TARGET.kv_shape, num_pages, page_size, TARGET.embed_tokens.weight.dtype, oracle.device)
    engine = Engine(EagerExecutor(Runner(TARGET, kv, OPS, ()), oracle, config.max_requests), config, TARGET.spec)
    assert drive(engine, work, order) == expected


def test_the_oracle_really_gets_trees_accepted():
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=40)
    expected = plain_answer(prompt, params, 0)
    oracle = OracleDrafter([(*prompt, *expected)], 6, 1.0, 0)
    config = EngineConfig(max_context=128, page_size=4)
    kv = KvCache.allocate(
        TARGET.kv_shape, config.resolve_num_pages(5), 4, TARGET.embed_tokens.weight.dtype, oracle.device
    )
    engine = Engine(EagerExecutor(Runner(TARGET, kv, OPS, ()), oracle, config.max_requests), config, TARGET.spec)
    assert drive(engine, [(prompt, params, 0)], random.Random(0)) == [expected]
    assert engine.stats.acceptance.acceptance_length > 1.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_requests", [1, 2])
def test_kernels_are_told_of_every_token_by_numbers_side_by_side(shape, num_requests):
    """A kernel on a GPU is given an address and counts on from it, whatever strides a tensor has."""

    class Watching(ReferenceOps):
        def run_layers(self, layers, hidden_TD, ctx, captured_layers, embedding_TD=None):
            for values_T in (ctx.positions_T, ctx.slots_T, ctx.batch.kv_index_T, ctx.batch.ancestors_T):
                assert values_T.is_contiguous()
            return super().run_layers(layers, hidden_TD, ctx, captured_layers, embedding_TD)

    config = EngineConfig(max_context=64, page_size=4)
    engine = build_engine(TARGET, DRAFTS["follower"], shape, config, Watching(DEVICE))
    work = [([1, 2, 3], SamplingParams(max_tokens=6), 0)] * num_requests
    assert [len(answer) for answer in drive(engine, work, random.Random(0))] == [6] * num_requests


@pytest.mark.parametrize("draft", [None, "ngram", "follower", "blocks"])
def test_requests_survive_preemption(draft):
    work = [([i, i + 1, i + 2], SamplingParams(max_tokens=30, temperature=0.7), i) for i in range(4)]
    engine = build_engine(
        TARGET,
        DRAFTS.get(draft, draft),
        TreeShape.chain(3),
        EngineConfig(max_context=40, page_size=4, num_pages=14, max_batch_tokens=32),
        OPS,
    )
    assert drive(engine, work, random.Random(1)) == [plain_answer(*item) for item in work]
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("draft", [None, "ngram", "follower", "blocks"])
def test_a_cached_prefix_is_reused_and_changes_nothing(draft):
    engine = engine_of(TARGET, DRAFTS.get(draft, draft))
    prompt = list(range(30))
    work = [([*prompt, tail], SamplingParams(max_tokens=12), tail) for tail in (31, 32, 33)]
    for item in work:
        assert drive(engine, [item], random.Random(0)) == [plain_answer(*item)]
    assert engine.stats.cached_tokens >= 2 * 24


def test_a_cached_prefix_serves_the_draft_as_well_as_a_computed_one():
    """The draft's key of a page's last slot depends on the token after the page; reuse must not get that wrong."""
    lengths = []
    for cached in (False, True):
        engine = engine_of(TARGET, DRAFTS["follower"], TreeShape(depth=3, width=3), prefix_cache=cached)
        for tail in (31, 32, 33, 34):
            drive(engine, [([*range(28), tail], SamplingParams(max_tokens=20), 0)], random.Random(0))
        lengths.append(engine.stats.acceptance.emitted / engine.stats.acceptance.passes)
    assert lengths[0] == lengths[1]


def test_a_request_may_opt_out_of_speculation():
    engine = engine_of(TARGET, DRAFTS["follower"])
    prompt, params = list(range(20)), SamplingParams(max_tokens=10)
    engine.add(prompt, params, 0, speculate=False)
    tokens = []
    while engine.has_work:
        tokens += [token.token_id for emission in engine.step() for token in emission.tokens]
    assert tokens == plain_answer(prompt, params, 0)
    assert engine.stats.acceptance.drafted == 0
