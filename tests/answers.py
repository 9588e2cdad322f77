"""Comparing answers: tokens exactly, log probabilities as far as the reference's rounding allows."""

from collections.abc import Sequence

import pytest

from slipstream.executors.interface import TokenLogprob

TOLERANCE = 1e-4
"""The reference leaves products to torch, whose last bits depend on how many rows share a pass."""


def assert_same_answers(
    got: Sequence[Sequence[tuple[int, TokenLogprob | None]]],
    expected: Sequence[Sequence[tuple[int, TokenLogprob | None]]],
    exact: bool = False,
) -> None:
    """Compare answers given as tokens with their log probabilities; `exact` compares those to the bit, too."""
    if exact:
        assert got == expected
        return
    assert [[token for token, _ in answer] for answer in got] == [[token for token, _ in answer] for answer in expected]
    for (_, one), (_, other) in zip(
        *([pair for answer in side for pair in answer] for side in (got, expected)), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=TOLERANCE)
