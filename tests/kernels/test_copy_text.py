"""A text to copy from: the automaton finds what followed the last occurrence of an ending, in Python and in C++."""

import random

import pytest

from slipstream.kernels.reference.text import Text
from slipstream.kernels.texts import MATCH_LENGTHS

PRIOR = [0.1 * (index + 1) for index in range(len(MATCH_LENGTHS))]


def occurs(text, piece):
    """Return where a piece ends in a text, the text's own end left out."""
    return [end for end in range(len(piece), len(text)) if text[end - len(piece) : end] == piece]


def longest_ending(text):
    return next((n for n in range(len(text) - 1, 0, -1) if occurs(text, text[-n:])), 0)


@pytest.mark.parametrize("alphabet", [2, 3, 7, 40])
def test_a_run_is_what_followed_an_occurrence_of_the_longest_ending(alphabet):
    choose = random.Random(alphabet)
    tokens, text = [], Text(PRIOR)
    for _ in range(200):
        token = choose.randrange(alphabet)
        tokens.append(token)
        text.extend([token], learns=False)
        length = longest_ending(tokens)
        run = text.copy((), 5, 0.0)
        if not length:
            assert run.tokens == []
            continue
        continued = [[*tokens[end:], *run.tokens][:5] for end in occurs(tokens, tokens[-length:])]
        assert run.tokens in continued
        assert len(run.tokens) == 5
        assert run.chances == sorted(run.chances, reverse=True)


def test_of_two_occurrences_the_last_is_copied():
    text = Text(PRIOR)
    text.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], learns=False)
    assert text.copy((), 3, 0.0).tokens == [4, 9, 1]
    assert text.copy((3,), 2, 0.0).tokens == [9, 1]
    assert text.copy((5,), 2, 0.0).tokens == []


def test_a_repetition_is_read_on_into_the_run_itself():
    text = Text(PRIOR)
    text.extend([8, 1, 2, 3, 1, 2, 3], learns=False)
    assert text.copy((), 9, 0.0).tokens == [1, 2, 3] * 3


def test_chances_follow_what_answers_did():
    text = Text([0.5] * len(MATCH_LENGTHS))
    text.extend([1, 2, 3, 4, 5, 6], learns=False)
    before = text.copy((1, 2), 1, 0.0).chances
    for token in (7, 1, 2, 3, 4, 5, 6):
        text.extend([token], learns=True)
    tried, right = text.learned()
    assert sum(tried) == 5 and tried == right  # nothing was matched at 7 and 1
    assert text.copy((9, 1, 2), 1, 0.0).chances > before
    for token in (1, 2, 9, 1, 2, 8, 1, 2, 7):
        text.extend([token], learns=True)
    assert sum(text.learned().right) < sum(text.learned().tried)


@pytest.mark.parametrize("alphabet", [2, 5, 60])
def test_the_library_has_the_same_text(fast_ops, alphabet):
    choose = random.Random(alphabet)
    reference, native = Text(PRIOR), fast_ops.copy_text(PRIOR)
    for turn in range(150):
        if choose.random() < 0.2 and reference.num_tokens:
            piece = reference._tokens[-choose.randrange(1, 30) :][:12]
        else:
            piece = [choose.randrange(alphabet) for _ in range(choose.randrange(1, 6))]
        for text in (reference, native):
            text.extend(piece, learns=turn > 40)
        assert native.num_tokens == reference.num_tokens
        assert native.learned() == reference.learned()
        path = [choose.randrange(alphabet) for _ in range(choose.randrange(4))]
        assert native.copy(path, 20, 0.01) == reference.copy(path, 20, 0.01)
