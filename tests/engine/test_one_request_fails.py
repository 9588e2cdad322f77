"""What a request brings with it may fail that request; its neighbours' tokens and pages never notice."""

import pytest
import torch

from answers import assert_same_answers
from slipstream.engine.request import FinishReason
from slipstream.errors import RequestError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, tiny_target

TARGET = tiny_target()
NEIGHBOURS = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=0.9, top_p=0.9, frequency_penalty=0.5, logprobs=2),
]
DRAFTS = {
    "none": (None, None),
    "n-gram": ("ngram", None),
    "chain": (follower_draft(TARGET), TreeShape.chain(3)),
    "tree": (follower_draft(TARGET), TreeShape(depth=3, width=2, budget=6)),
}


class BrokenError(Exception):
    """What the tests inject."""


class Letters:
    """A tokenizer of one letter a token that breaks at its n-th token."""

    def __init__(self, breaks_at=10**9):
        self.left = breaks_at

    def push(self, ids):
        self.left -= 1
        if self.left < 0:
            raise BrokenError("detokenizer")
        return "".join(chr(65 + token) for token in ids)

    def finish(self):
        return ""


class Grammar:
    """A grammar that allows everything for a while, then breaks; or then allows only `only`."""

    def __init__(self, good_for, breaks="allowed", only=None):
        self.good_for, self.breaks, self.only, self.taken, self.finished = good_for, breaks, only, 0, False

    def start(self):
        return Grammar(self.good_for, self.breaks, self.only)

    def allowed(self, path):
        allowed = torch.ones(VOCAB, dtype=torch.bool)
        if self.taken + len(path) >= self.good_for and self.breaks == "allowed":
            if self.only is None:
                raise BrokenError("grammar")
            allowed[:] = False
            allowed[list(self.only)] = True
        return allowed

    def advance(self, tokens):
        self.taken += len(tokens)
        if self.breaks == "advance" and self.taken > self.good_for:
            raise BrokenError("grammar")


class PoisonedText(str):
    """A stop string that cannot be looked for."""

    def __getitem__(self, index):
        raise BrokenError("stop")


class PoisonedBias(dict):
    """A bias whose values are gone by the time they are needed."""

    def values(self):
        raise BrokenError("bias")


class PoisonedCount(int):
    """A number of alternatives that breaks once the settings that hold it were checked."""

    armed = False

    def __lt__(self, other):
        if self.armed:
            raise BrokenError("logprobs")
        return int(self) < other


def counting(field):
    """Return settings whose number of alternatives breaks in the step."""
    count = PoisonedCount(3)
    params = SamplingParams(max_tokens=14, **{field: count})
    count.armed = True
    return params


def poisoned():
    """Return requests whose own data break at different points of a step, with the detokenizer each brings."""
    return {
        "grammar's mask": (SamplingParams(max_tokens=14, grammar=Grammar(4)), None),
        "grammar's advance": (SamplingParams(max_tokens=14, grammar=Grammar(4, "advance")), None),
        "grammar without a way out": (SamplingParams(max_tokens=14, grammar=Grammar(4, only=())), None),
        "bias": (SamplingParams(max_tokens=14, logit_bias=PoisonedBias({3: 1.0})), None),
        "stop string": (SamplingParams(max_tokens=14, stop=(PoisonedText("zz"),)), Letters()),
        "detokenizer": (SamplingParams(max_tokens=14), Letters(5)),
        "prompt's log probabilities": (counting("prompt_logprobs"), None),
    }


def answers(engine, extra=None):
    """Run the neighbours, with another request between them; return their tokens and the other's emissions."""
    first = engine.add([1, 2, 3], NEIGHBOURS[0], 5, detokenizer=Letters())
    other = None if extra is None else engine.add([4, 5, 6, 7], extra[0], 6, end_tokens=[2], detokenizer=extra[1])
    second = engine.add([7, 8], NEIGHBOURS[1], 7)
    tokens, emissions = {first: [], second: []}, []
    while engine.has_work:
        for emission in engine.step():
            if emission.request_id == other:
                emissions.append(emission)
            else:
                tokens[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
        engine.check_invariants()
    assert engine.page_usage == 0
    return list(tokens.values()), emissions


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("point", poisoned())
def test_a_failure_of_one_requests_own_data_ends_that_request_only(point, draft, cuda_graphs):
    expected, _ = answers(engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs))
    engine = engine_of(TARGET, *DRAFTS[draft], cuda_graphs=cuda_graphs)
    tokens, emissions = answers(engine, poisoned()[point])
    assert_same_answers(tokens, expected)
    assert emissions[-1].finish_reason is FinishReason.ERROR
    assert isinstance(emissions[-1].error, BrokenError | RequestError)
    again, _ = answers(engine)
    assert_same_answers(again, expected)  # the engine lives on


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grammar_fails_after_the_same_tokens_with_any_draft(draft):
    def emitted(name):
        _, emissions = answers(engine_of(TARGET, *DRAFTS[name]), poisoned()["grammar's mask"])
        return [token.token_id for emission in emissions for token in emission.tokens]

    assert emitted(draft) == emitted("none") != []


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grammar_that_allows_only_the_end_wins_over_min_tokens(draft):
    params = SamplingParams(max_tokens=14, min_tokens=10, grammar=Grammar(4, only=(2,)))
    _, emissions = answers(engine_of(TARGET, *DRAFTS[draft]), (params, None))
    assert emissions[-1].finish_reason is FinishReason.STOP
    assert sum(len(emission.tokens) for emission in emissions) == 5


def test_min_tokens_still_forbids_the_end_where_a_grammar_allows_more():
    params = SamplingParams(max_tokens=14, min_tokens=10, grammar=Grammar(4, only=(2, 9)))
    _, emissions = answers(engine_of(TARGET), (params, None))
    tokens = [token.token_id for emission in emissions for token in emission.tokens]
    assert len(tokens) >= 10 and tokens[4:10] == [9] * 6
