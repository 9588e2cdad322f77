"""Copied tokens in a draft's tree change nothing but the number of passes, part by part and in rounds of one call."""

import pytest
import torch

from slipstream.engine.build import build_engine, copied_nodes
from slipstream.engine.config import EngineConfig
from slipstream.kernels import Cut
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.reference.text import Text
from slipstream.kernels.texts import MATCH_LENGTHS
from slipstream.speculation.controller import Reach
from slipstream.speculation.copying import Copier
from slipstream.speculation.merge import CopyLimits, Drafted, grow
from slipstream.speculation.pace import Pace
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, follower_draft, tiny_draft, tiny_target

TARGET = tiny_target()
CHAIN = TreeShape.chain(3)
TREE = TreeShape(depth=3, width=3, budget=6)
PROMPTS = ([5, 6, 7, 8] * 6, [9, 1, 30, 12, 9, 1, 30, 12, 9, 1], [2] * 9, [11, 12, 13])
SETTINGS = (
    {},
    {"temperature": 0.8, "logprobs": 2},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.6, "logprobs": 0},
    {"temperature": 0.3, "top_k": 4, "presence_penalty": -1.5},
)


class PartByPart(CpuOps):
    """The same kernels, but no round in one call."""

    def run_rounds(self, models, start, depth, cut):
        return None


def told(ops, draft, shape=None, patience_s=0.0, grammar=None, **config):
    """Return each request's tokens with log probabilities, and how many passes and tokens there were."""
    settings = EngineConfig(max_context=192, page_size=4, max_requests=4, **config)
    engine = build_engine(TARGET, draft, shape, settings, ops)
    for index, (prompt, given) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        engine.add(prompt, SamplingParams(max_tokens=40, grammar=grammar, **given), index)
    said = [[] for _ in PROMPTS]
    while engine.has_work:
        for emission in engine.step(patience_s):
            assert emission.error is None
            said[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
        engine.check_invariants()
    return said, engine.stats.acceptance


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_copied_tokens_change_the_passes_and_not_the_text(cpu_ops, shape):
    draft = follower_draft(TARGET)
    plain, _ = told(cpu_ops, None)
    alone, before = told(cpu_ops, draft, shape)
    merged, after = told(cpu_ops, draft, shape, copied_tokens=12)
    patient, same = told(cpu_ops, draft, shape, 60.0, copied_tokens=12)
    assert merged == patient == alone == plain
    assert after.passes < before.passes
    assert abs(same.passes - after.passes) <= 4


def test_rounds_copy_what_their_parts_copy(cpu_ops):
    draft = follower_draft(TARGET)
    for asked, config in ((draft, {"copied_tokens": 12}), ("ngram", {})):
        said, counted = told(CpuOps(2, cpu_ops.isa), asked, CHAIN, **config)
        parts, expected = told(PartByPart(1, cpu_ops.isa), asked, CHAIN, **config)
        assert said == parts
        assert counted.passes == expected.passes
        assert counted.offered[3:] == expected.offered[3:]  # rounds cut the draft's own chains where an answer ends


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_by_default_nodes_of_either_source_are_chosen_by_what_they_cost_and_the_text_stays(cpu_ops, patience_s):
    plain, _ = told(cpu_ops, None)
    for draft in (follower_draft(TARGET), tiny_draft(TARGET, seed=5)):  # one is right often, one is not
        alone, _ = told(cpu_ops, draft, None, patience_s, copied_tokens=0)
        merged, _ = told(cpu_ops, draft, None, patience_s)
        parts, _ = told(PartByPart(2, cpu_ops.isa), draft, None, patience_s)
        assert merged == parts == alone == plain


class Priced(Pace):
    """Drafts whole chains where rows cost the same whatever was measured."""

    row = 0.0

    def start(self, num_requests, depth):
        super().start(num_requests, depth)
        return Reach(depth, Cut(row=Priced.row, trust=0.6))


def test_rounds_choose_the_nodes_their_parts_choose_and_the_fewer_the_dearer_rows_are(cpu_ops, monkeypatch):
    monkeypatch.setattr("slipstream.engine.build.Pace", Priced)
    draft, drafted = follower_draft(TARGET), []
    for row in (0.0, 0.4, 1.5):
        Priced.row = row
        said, counted = told(cpu_ops, draft)
        parts, expected = told(PartByPart(1, cpu_ops.isa), draft)
        assert said == parts
        assert counted.passes == expected.passes
        drafted.append(counted.drafted / counted.decoding_passes)
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 2 * drafted[2]


def test_copying_is_on_by_default_only_where_lengths_follow_the_cost(cpu_ops):
    def most_copied(shape, **config):
        return copied_nodes(TARGET, follower_draft(TARGET), shape, EngineConfig(**config), cpu_ops)

    assert most_copied(None) > 0
    assert most_copied(None, copied_tokens=0) == most_copied(CHAIN) == 0
    assert most_copied(CHAIN, copied_tokens=7) == 7


def test_copying_alone_is_n_gram_lookup_and_saves_passes(fast_ops):
    plain, before = told(fast_ops, None)
    copied, after = told(fast_ops, "ngram", TreeShape.chain(6), 60.0)
    assert copied == plain
    assert after.passes < before.passes
    assert told(ReferenceOps(torch.device("cpu")), "ngram", TreeShape.chain(6))[1].passes < before.passes


class Thirds:
    """Token i of the answer must be i modulo 3."""

    finished = False

    def __init__(self):
        self._taken = []

    def start(self):
        return Thirds()

    def allowed(self, path):
        text = [*self._taken, *path]
        if any(token % 3 != index % 3 for index, token in enumerate(text)):
            return None
        return torch.arange(VOCAB) % 3 == len(text) % 3

    def advance(self, tokens):
        self._taken += tokens


def test_grammars_mask_copied_nodes_along_their_own_paths(cpu_ops):
    plain, _ = told(cpu_ops, None, grammar=Thirds())
    merged, _ = told(cpu_ops, follower_draft(TARGET), CHAIN, 60.0, grammar=Thirds(), copied_tokens=12)
    assert merged == plain


def test_a_later_request_may_copy_an_earlier_answer(fast_ops):
    def passes(num_earlier):
        engine = build_engine(
            TARGET, "ngram", TreeShape.chain(8), EngineConfig(max_context=96, earlier_tokens=num_earlier), fast_ops
        )
        texts, counts = [], []
        for _ in range(2):
            before = engine.stats.acceptance.passes
            engine.add([9, 1, 30, 12], SamplingParams(max_tokens=40, temperature=0.9), 5)
            texts.append(
                [t.token_id for _ in iter(lambda: engine.has_work, False) for e in engine.step() for t in e.tokens]
            )
            counts.append(engine.stats.acceptance.passes - before)
        assert texts[0] == texts[1]
        return counts

    first, again = passes(200)
    assert again < first / 2
    assert passes(0)[1] > again


def text_of(tokens, chance=0.9):
    text = Text([chance] * len(MATCH_LENGTHS))
    text.extend(tokens, learns=False)
    return text


def grown(drafted, text, nodes=60, depth=60, **cut):
    (tree,) = grow([drafted], [text], [CopyLimits(nodes, depth)], Cut(**cut))
    return tree


def test_what_the_draft_names_too_is_shared_and_the_likeliest_comes_first():
    text = text_of([1, 2, 3, 4, 5, 9, 1, 2])
    tree = grown(Drafted([2, 3, 7], [-1, 0, 0], [0.0, -0.1, -3.0]), text, nodes=3)
    assert tree.tokens == [2, 3, 7, 4, 5, 9]
    assert tree.parents == [-1, 0, 0, 1, 3, 4]
    assert tree.guessed == 2
    assert grown(Drafted([2], [-1], [0.0]), text, depth=2).tokens == [2, 3, 4]


def test_a_text_that_the_draft_contradicts_is_believed_less():
    text, sure, unsure = text_of([1, 2, 3, 4, 1, 2], 0.5), -0.05, -2.5
    copied = [grown(Drafted([2, 8], [-1, 0], [0.0, score]), text, least=0.2).tokens for score in (sure, unsure)]
    assert copied == [[2, 8], [2, 8, 3]]
    assert grown(Drafted([2], [-1], [0.0]), text, least=0.2).tokens == [2, 3, 4]


def test_nodes_come_while_they_are_worth_their_rows_whoever_proposed_them():
    drafted, text = Drafted([2, 8, 6], [-1, 0, 1], [0.0, -0.5, -2.0]), text_of([1, 2, 3, 4, 5, 1, 2])
    sizes = [len(grown(drafted, text, row=row).tokens) for row in (0.0, 0.3, 1.0, 4.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > sizes[3] == 1
    assert grown(drafted, text, row=0.9).guessed < 2  # a chain ends where copies are likelier


def test_the_likeliest_node_of_any_request_comes_next():
    sure, unsure = (
        Drafted([2, 8, 6], [-1, 0, 1], [0.0, -0.01, -0.02]),
        Drafted([2, 8, 6], [-1, 0, 1], [0.0, -1.0, -2.0]),
    )
    trees = grow([unsure, sure], [None, None], [CopyLimits(0, 9)] * 2, Cut(row=1.0))
    assert [tree.guessed for tree in trees] == [0, 2]


def test_what_answers_said_of_guesses_is_where_the_next_begins():
    copier = Copier(Text, 8)
    text = copier.see(0, [1, 2, 3, 4, 1, 2])
    hoped = text.copy((), 1, 0.0).chances[0]
    copier.see(0, [1, 2, 3, 4, 1, 2, *[3, 4, 1, 2] * 20])
    copier.forget(0)
    assert copier.see(1, [1, 2, 3, 4, 1, 2]).copy((), 1, 0.0).chances[0] >= hoped
    assert copier.see(2, [7, *[3, 4, 1, 2] * 5]).copy((), 1, 0.0).chances[0] > hoped
