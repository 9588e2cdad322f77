"""Steps whose chains differ in length, or that drop drafts for a while, change the passes and not the text."""

import random

import pytest

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.kernels import select
from slipstream.speculation.lengths import Choice
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import DEVICE, follower_draft, stammering_target

TARGET = stammering_target(61)
OPS = select(DEVICE)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3] * 9, [11, 12], [20, 21, 22]]


def told(draft, seconds=None, monkeypatch=None, **config):
    """Return each request's tokens with log probabilities, and the engine; requests arrive one after another."""
    if seconds is not None:
        monkeypatch.setattr(Prepared, "seconds", lambda self, kind: seconds(kind))
    settings = EngineConfig(max_context=96, page_size=4, max_requests=4, num_pages=90, cuda_graphs="on", **config)
    engine = build_engine(TARGET, draft, TreeShape.chain(4), settings, OPS)
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
def test_any_lengths_in_any_order_give_the_text_of_plain_decoding(seed, monkeypatch):
    plain, _ = told(None)
    choose = random.Random(seed)
    adapted, engine = told(
        follower_draft(TARGET), lambda kind: choose.uniform(0.5, 1.5), monkeypatch, adaptive_depth=True
    )
    assert adapted == plain
    assert engine.stats.acceptance.acceptance_length > 1.0


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
