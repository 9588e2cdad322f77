"""The tree's shape and simulated acceptance can change between steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError, RequestError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.simulate import simulated_counts
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, run, tiny_target

SHAPES = [TreeShape.chain(1), TreeShape.chain(5), TreeShape(depth=3, width=3, budget=11), TreeShape(depth=2, width=2)]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1.5), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8))
def test_changing_the_tree_between_steps_never_changes_an_answer(seed, temperature, shapes):
    target = tiny_target()
    params = SamplingParams(max_tokens=30, temperature=temperature)
    prompts = [[seed % VOCAB, 4, 9], [11, seed % 7]]
    plain = run(engine_of(target), prompts, [params] * 2, [seed, seed + 1])
    engine = engine_of(target, follower_draft(target), num_pages=100)
    ids = [engine.add(prompt, params, seed + i) for i, prompt in enumerate(prompts)]
    answers = {i: [] for i in ids}
    while engine.has_work:
        if shapes:
            engine.set_tree(shapes.pop())
        for emission in engine.step():
            answers[emission.request_id] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    assert [answers[i] for i in ids] == plain


def test_a_tree_the_cache_has_no_room_for_is_refused_and_the_old_one_stays():
    target = tiny_target()
    engine = engine_of(target, follower_draft(target), TreeShape.chain(2), num_pages=33)
    with pytest.raises(ConfigError, match="pages"):
        engine.set_tree(TreeShape(depth=3, width=3, budget=20))
    assert engine.drafter.max_nodes == 3


def test_no_draft_and_ngram_lookup_refuse_shapes_they_cannot_grow():
    with pytest.raises(ConfigError, match="no draft"):
        engine_of(tiny_target(), num_pages=100).set_tree(TreeShape.chain(2))
    engine = engine_of(tiny_target(), "ngram", num_pages=100)
    with pytest.raises(ConfigError, match="width 1"):
        engine.set_tree(TreeShape(depth=2, width=2))
    engine.set_tree(TreeShape.chain(7))
    assert engine.drafter.max_nodes == 8


@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.1), (1.0, 1.0, 1.0), (0.0,)])
def test_simulated_acceptance_keeps_each_position_at_its_rate(rates):
    target = tiny_target()
    engine = engine_of(target, follower_draft(target), TreeShape(depth=3, width=2, budget=6))
    engine.simulate_acceptance(rates)
    params = [SamplingParams(max_tokens=100, ignore_eos=True)] * 8
    answers = run(engine, [[i, 1, 2] for i in range(8)], params, list(range(8)))
    assert {len(answer) for answer in answers} == {100}
    stats = engine.stats.acceptance
    for position, rate in enumerate(rates):
        assert stats.rates[position] == pytest.approx(rate, abs=0.12)
    # max_tokens cuts the last pass of an answer short, so only whole passes can be held to the rate exactly.
    seeds = torch.arange(4000)
    counts = simulated_counts(rates, seeds, torch.full_like(seeds, 7))
    for position, rate in enumerate(rates):
        assert (counts > position).float().mean() == pytest.approx(rate, abs=0.03)


def test_rates_that_no_draft_can_have_are_refused():
    engine = engine_of(tiny_target(), "ngram")
    with pytest.raises(ConfigError, match="above the one before"):
        engine.simulate_acceptance((0.2, 0.5))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        engine.simulate_acceptance((1.5,))
    engine.simulate_acceptance((0.5,))
    with pytest.raises(RequestError, match="simulates"):
        engine.add([1, 2], SamplingParams(grammar=object()), seed=0)
    engine.simulate_acceptance(())
    assert engine.simulated_acceptance == ()
