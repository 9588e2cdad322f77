"""A request may be drafted tokens of its own text that the draft does not know; its answer stays the same."""

import logging
import random

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels import select
from slipstream.models.packing import quantize_linears
from slipstream.speculation.borrowed import Borrowers, Lender
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import DEVICE, OPS, follower_draft, knowing_half, run, stammering_target, tiny_draft

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="requests borrow on a CPU only")

VOCAB = 220
TARGET = stammering_target(VOCAB)
WHOLE = follower_draft(TARGET)
HALF = knowing_half(WHOLE)
SHAPES = [
    TreeShape.chain(4),
    TreeShape(depth=3, width=3, budget=8),
    TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0))),
]
ODD_PROMPT = random.Random(5).sample(range(1, VOCAB, 2), VOCAB // 2)


def affine_draft():
    """A draft whose head is an affine image of the target's head."""
    draft = tiny_draft(TARGET, seed=8, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(2)
    matrix, offset = torch.randn(32, 32, generator=generator) / 6, torch.randn(32, generator=generator) / 3
    draft.lm_head.weight.copy_(TARGET.lm_head.weight @ matrix + offset)
    return draft


def engine(draft, shape=SHAPES[0], ops=OPS, **config):
    defaults = {"max_context": 200, "page_size": 4, "max_requests": 8, "max_batch_tokens": 64}
    return build_engine(TARGET, draft, shape, EngineConfig(**{**defaults, **config}), ops)


def drafted(engine, prompts, **params):
    """Return, step by step, each request's tokens and which of them were drafted."""
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=24, **params), seed)
    steps = []
    while engine.has_work:
        step = engine.step()
        engine.check_invariants()
        steps.append([(e.request_id, [(t.token_id, t.draft_position) for t in e.tokens]) for e in step])
    return steps


def accepted_unknown(steps):
    """Count drafted tokens of the answers that the half draft does not know."""
    return sum(token % 2 == 1 and position > 0 for step in steps for _, tokens in step for token, position in tokens)


@pytest.mark.parametrize("whole", [WHOLE, affine_draft()], ids=["follower", "affine"])
def test_a_borrowed_row_is_the_row_the_draft_would_have_had(whole):
    lender = Lender.fit(knowing_half(whole), TARGET, OPS)
    odd = list(range(1, VOCAB, 2))
    torch.testing.assert_close(lender.rows(odd), whole.lm_head.weight[odd], rtol=1e-3, atol=1e-4)
    assert [token for token in range(VOCAB) if lender.unknown[token]] == odd


def test_a_draft_trained_on_keeps_the_map_and_a_draft_unlike_it_gets_its_own():
    first = Lender.fit(HALF, TARGET, OPS)
    trained_on, odd = knowing_half(WHOLE), list(range(1, VOCAB, 2))
    trained_on.lm_head.weight.add_(0.001 * torch.randn(trained_on.lm_head.weight.shape))
    trained_on.token_ids_V = HALF.token_ids_V.clone()
    assert torch.equal(Lender.fit(trained_on, TARGET, OPS, first).rows(odd), first.rows(odd))
    other = affine_draft()
    lender = Lender.fit(knowing_half(other), TARGET, OPS, first)
    torch.testing.assert_close(lender.rows(odd), other.lm_head.weight[odd], rtol=1e-3, atol=1e-4)


def test_what_a_draft_had_lent_is_forgotten_when_another_takes_over():
    built = engine(HALF)
    drafter, first = built.drafter, built.drafter.borrowers
    assert drafter.borrowed(0, [2, 1, 3]).count == 2
    drafter.exchange(HALF, Borrowers(first.lender, 8))
    drafter.exchange(HALF, first)
    assert drafter.borrowed(0, [2, 4, 6]) is None  # row 0 has another request's text since


def test_rows_are_made_of_a_quantized_head_too():
    ops = select(torch.device("cpu"), "auto")
    if ops.name != "cpu":
        pytest.skip("CPU kernels not built")
    half = knowing_half(WHOLE)
    quantize_linears(half, ops)
    lender = Lender.fit(half, TARGET, ops)
    odd = list(range(1, VOCAB, 2))
    torch.testing.assert_close(lender.rows(odd), WHOLE.lm_head.weight[odd], rtol=0, atol=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("whole", [WHOLE, affine_draft()], ids=["follower", "affine"])
def test_with_all_unknown_tokens_borrowed_the_half_draft_drafts_as_the_whole_one(
    whole, kernels, shape, temperature, monkeypatch
):
    monkeypatch.setattr("slipstream.speculation.borrowed._COMES_AGAIN", 0.0)
    ops = select(torch.device("cpu"), kernels)
    prompts = [ODD_PROMPT, [*ODD_PROMPT[::-1], 4, 8]]
    steps = drafted(engine(knowing_half(whole), shape, ops, borrowed_tokens=VOCAB), prompts, temperature=temperature)
    assert steps == drafted(engine(whole, shape, ops), prompts, temperature=temperature)
    if whole is WHOLE:
        assert accepted_unknown(steps) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [*SHAPES, None], ids=str)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("logprobs", [None, 1], ids=["rounds", "ordinary steps"])
def test_borrowing_changes_no_answer(kernels, shape, temperature, logprobs):
    ops = select(torch.device("cpu"), kernels)
    prompts = [ODD_PROMPT[:40], [3, 1, 4, 1, 5], [9] * 11, [2, 4, 6]]
    params = [SamplingParams(max_tokens=24, temperature=temperature, logprobs=logprobs)] * len(prompts)
    answers = [
        run(engine(draft, shape, ops, borrowed_tokens=borrowed), prompts, params, [1, 2, 3, 4])
        for draft, borrowed in ((None, 0), (HALF, 0), (HALF, 4), (HALF, 64))
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_a_token_of_the_answer_is_drafted_when_it_comes_again():
    steps = {borrowed: drafted(engine(HALF, borrowed_tokens=borrowed), [[2, 4]] * 2) for borrowed in (0, 64)}
    assert accepted_unknown(steps[64]) > 0 == accepted_unknown(steps[0])
    assert len(steps[64]) < len(steps[0])


def test_a_request_keeps_the_tokens_it_saw_last():
    lender = Lender.fit(HALF, TARGET, OPS)
    borrowers, text = Borrowers(lender, 3), [2, 4, 1, 3]
    assert borrowers.see(7, [2, 4]) is None

    def held(text):
        borrowed = borrowers.see(7, text)
        tokens = borrowed.tokens_B[: borrowed.count]
        torch.testing.assert_close(borrowed.rows_BD[: borrowed.count], lender.rows(tokens.tolist()))
        return set(tokens.tolist())

    assert held(text) == {1, 3}
    assert held([*text, 5, 1]) == {1, 3, 5}
    assert held([*text, 5, 1, 7]) == {1, 5, 7}
    assert held([*text, 5, 1, 7, 9, 11, 13, 15, 13, 6]) == {11, 13, 15}
    borrowers.forget(7)
    assert held(list(range(100))) == {95, 97, 99}


class Watched(Borrowers):
    """Checks that what a request has borrowed is what stands in its text."""

    seen: tuple[int, ...] = ()

    def see(self, request_id, tokens):
        borrowed = super().see(request_id, tokens)
        assert {token for token in tokens if token % 2} == set(borrowed.tokens_B[: borrowed.count].tolist())
        Watched.seen += (request_id,)
        return borrowed


@pytest.mark.parametrize("pages", [None, 24])
def test_a_text_is_seen_whole_also_when_its_request_starts_over(pages, monkeypatch):
    monkeypatch.setattr("slipstream.engine.build.Borrowers", Watched)
    monkeypatch.setattr(Watched, "seen", ())
    built = engine(HALF, num_pages=pages, max_context=64)
    run(built, [[*ODD_PROMPT[:9], i] for i in range(4)], [SamplingParams(max_tokens=30)] * 4, [0, 1, 2, 3])
    assert set(Watched.seen) == {0, 1, 2, 3}
    assert (built.stats.preemptions > 0) == (pages is not None)


def test_a_prompt_whose_pages_were_cached_lends_its_tokens_all_the_same():
    steps = []
    for cached in (False, True):
        twice = engine(HALF, prefix_cache=cached, borrowed_tokens=64)
        first = drafted(twice, [ODD_PROMPT[:40]])
        again = drafted(twice, [ODD_PROMPT[:40]])
        steps.append([[tokens for step in part for _, tokens in step] for part in (first, again)])
        assert (twice.stats.cached_tokens > 0) == cached
    assert steps[0] == steps[1] and steps[1][0] == steps[1][1]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (lambda: knowing_half(tiny_draft(TARGET, vocab_size=VOCAB, draft_vocab_size=VOCAB)), "of the variance"),
        (lambda: knowing_half(knowing_half(HALF)), "28 known tokens are too few"),
        (lambda: WHOLE, None),
    ],
    ids=["a head of its own", "few tokens", "all tokens"],
)
def test_where_rows_cannot_be_made_nothing_is_borrowed_and_a_line_says_why(draft, reason, caplog):
    with caplog.at_level(logging.INFO, logger="slipstream.speculation.borrowed"):
        built = engine(draft())
    assert built.drafter.borrowers is None
    assert [reason in record.message for record in caplog.records] == ([] if reason is None else [True])


def test_without_room_for_borrowed_tokens_only_known_ones_are_drafted(caplog):
    with caplog.at_level(logging.INFO, logger="slipstream.speculation.borrowed"):
        none = engine(HALF, borrowed_tokens=0)
    assert none.drafter.borrowers is None and not caplog.records
    assert accepted_unknown(drafted(none, [ODD_PROMPT])) == 0
    with pytest.raises(ConfigError, match="borrowed_tokens is -1"):
        EngineConfig(borrowed_tokens=-1)


def test_cycles_go_on_with_the_drafts_own_tokens():
    assert engine(HALF, cuda_graphs="on").drafter.borrowers is None
