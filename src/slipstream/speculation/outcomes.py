"""What came of a round of drafting and checking, as plain values: what controllers learn from."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.kernels import Cut, RoundResult, row_work


@dataclass(frozen=True)
class Beyond:
    """What copying had to do with a request's round.

    Args:
        checked: copied nodes, beyond the chain's.
        foretold: tokens that were kept and that copying alone would have had.
        kept: drafted tokens that were kept, whoever drafted them.
    """

    checked: int
    foretold: int
    kept: int


@dataclass(frozen=True)
class DraftedChain:
    """One request's chain in a round: the cumulative log-probability of every drafted token, how many of them were
    checked, and how many of those kept; and what was copied beside it, if anything was.
    """

    scores: Sequence[float]
    checked: int
    kept: int
    beyond: Beyond | None = None

    def gained(self, count: int) -> int:
        """Return how many tokens more were kept than copying alone would have had, had so many been checked."""
        if self.beyond is None:
            return min(self.kept, count)
        return max((self.beyond.kept if count >= self.kept else count) - self.foretold, 0)

    @property
    def foretold(self) -> int:
        """Tokens that were kept and that copying alone would have had."""
        return 0 if self.beyond is None else self.beyond.foretold

    @property
    def copied(self) -> int:
        """Nodes checked beyond the chain's."""
        return 0 if self.beyond is None else self.beyond.checked


@dataclass(frozen=True)
class DraftedPass:
    """One round of drafting and checking, with nothing else in it (no prompt).

    Args:
        levels: how many levels the draft ran over.
        draft_s: what proposing took.
        check_s: from the proposal to the target's verdict.
        round_s: the whole round.
        follow_s: what letting the draft follow took.
    """

    chains: Sequence[DraftedChain]
    levels: int
    draft_s: float
    check_s: float
    round_s: float
    follow_s: float = 0.0

    @property
    def rows(self) -> int:
        """Nodes the target checked, roots included."""
        return sum(1 + chain.checked + chain.copied for chain in self.chains)

    @property
    def emitted(self) -> int:
        """Tokens it gave out."""
        return sum(1 + (chain.kept if chain.beyond is None else chain.beyond.kept) for chain in self.chains)

    @property
    def work(self) -> float:
        """What checking cost beyond reading the weights, in rows."""
        return row_work(self.rows)

    def within(self, cut: Cut) -> tuple[int, int, int]:
        """Return how many levels would have run, tokens been checked and been kept, had chains been cut so.

        What copying would have had anyway is nothing that the draft gained, nor that it cost.
        """
        floor = math.exp(cut.trust * cut.floor)
        levels, worth = 0, cut.need
        while levels < self.levels and worth >= cut.need:
            scores = [chain.scores[levels] for chain in self.chains if levels < len(chain.scores)]
            above = [math.exp(cut.trust * score) - floor for score in scores if score >= cut.floor]
            worth = sum(above) if above else -1.0
            levels += 1
        counts = [
            sum(score >= cut.floor for score in chain.scores[: min(levels, chain.checked)]) for chain in self.chains
        ]
        checked = (max(count - chain.foretold, 0) for chain, count in zip(self.chains, counts, strict=True))
        return levels, sum(checked), sum(map(DraftedChain.gained, self.chains, counts))


def chains_of(result: RoundResult) -> list[DraftedChain]:
    """Return what came of each request's chain in a round that ran as one call."""
    chains = []
    for scores, drafted, tokens, foretold in zip(
        result.scores, result.drafted, result.tokens, result.foretold, strict=True
    ):
        guess = zip(drafted.tokens[: drafted.guessed], tokens[:-1], strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], guess))
        copied = len(drafted.tokens) - drafted.guessed
        chains.append(DraftedChain(scores, drafted.guessed, kept, Beyond(copied, foretold, max(len(tokens), 1) - 1)))
    return chains
