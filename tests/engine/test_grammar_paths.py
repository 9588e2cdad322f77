"""A grammar rules out tokens along each node's own path, so any draft gives the answer that plain decoding gives."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residues import Residues
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, run, tiny_draft, tiny_target


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0, 2),
    st.sampled_from([TreeShape.chain(3), TreeShape(depth=3, width=3, budget=9)]),
    st.booleans(),
)
def test_a_grammar_gives_the_same_answer_with_any_tree_as_without_one(seed, temperature, shape, follows):
    target = tiny_target(seed % 7)
    draft = follower_draft(target) if follows else tiny_draft(target, seed % 5)
    prompt = [seed % VOCAB, 3, 5, 8]
    params = SamplingParams(max_tokens=24, temperature=temperature, grammar=Residues(20), repetition_penalty=1.3)
    plain = run(engine_of(target), [prompt], [params], [seed])
    speculative = run(engine_of(target, draft, shape), [prompt], [params], [seed])
    assert speculative == plain
    assert len(plain[0]) == 20
    assert all(token % 3 == index % 3 for index, token in enumerate(plain[0]))


class Spelled:
    """The answer is one text, which its state drafts; a `wrong` one drafts other tokens, too."""

    def __init__(self, text: Sequence[int], wrong: bool = False) -> None:
        self._text, self._wrong = list(text), wrong

    def start(self) -> "_SpelledState":
        return _SpelledState(self._text, self._wrong)


class _SpelledState:
    def __init__(self, text: list[int], wrong: bool) -> None:
        self._text, self._wrong, self._num_taken = text, wrong, 0

    @property
    def finished(self) -> bool:
        return self._num_taken >= len(self._text)

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        end = self._num_taken + len(path)
        if list(path) != self._text[self._num_taken : end] or end >= len(self._text):
            return None
        return torch.arange(VOCAB) == self._text[end]

    def draft(self, guess: Sequence[int], most: int) -> list[int]:
        forced = self._text[self._num_taken : self._num_taken + most]
        return [*forced[: most // 2], *guess[most // 2 :]] if self._wrong else forced

    def advance(self, tokens: Sequence[int]) -> None:
        self._num_taken += len(tokens)


@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape(depth=3, width=2, budget=4)])
def test_what_a_grammar_leaves_no_choice_about_takes_a_pass_for_every_chain_of_tokens(shape):
    target = tiny_target(1)
    text = [7 * i % VOCAB for i in range(20)]
    engine = engine_of(target, tiny_draft(target, 2), shape)
    assert run(engine, [[1, 2, 3]], [SamplingParams(max_tokens=24, grammar=Spelled(text))], [0]) == [text]
    assert engine.stats.steps == 20 // 5


def test_a_grammar_that_drafts_wrong_tokens_changes_nothing():
    target = tiny_target(1)
    text = [7 * i % VOCAB for i in range(20)]
    engine = engine_of(target, tiny_draft(target, 2), TreeShape.chain(4))
    assert run(engine, [[1, 2, 3]], [SamplingParams(max_tokens=24, grammar=Spelled(text, wrong=True))], [0]) == [text]
