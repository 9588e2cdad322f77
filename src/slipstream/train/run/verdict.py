"""What decides whether an adapted draft serves: whose texts it is judged on, what it must gain, what it may lose."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.kernels.training.loss import product_f32
from slipstream.models.target import Target
from slipstream.train.data.corpus import Corpus
from slipstream.train.draft.features import FeatureStore

LEAST_OWN = 0.25
"""Share of an answer that must be the target's likeliest token: 1 of greedy answers, a half or so at temperature 1."""
_RESAMPLED = 400
_DOUBT = 0.05


@dataclass(frozen=True)
class Bars:
    """What a draft must reach.

    Args:
        gain: of tokens a pass on held-back traffic, over the draft in use.
        loss: share of tokens a pass that general texts may lose, beside the draft that learning started from.
        texts: held-back answers needed to tell.
    """

    gain: float = 1.03
    loss: float = 0.03
    texts: int = 6


@dataclass(frozen=True)
class Verdict:
    """What was found: tokens a pass on held-back traffic before and after, and on general texts; why not, if not."""

    before: float
    after: float
    general_first: float
    general: float
    refused: str = ""

    def __str__(self) -> str:
        return (
            f"held-back traffic {self.before:.2f} to {self.after:.2f} tokens a pass, general texts "
            f"{self.general_first:.2f} to {self.general:.2f}: {self.refused or 'deployed'}"
        )


def own_texts(target: Target, corpus: Corpus, store: FeatureStore) -> list[bool]:
    """Tell of each text whether the target may have written its answer: whoever can write to the folder may lie."""
    assert target.lm_head.weight is not None
    found = []
    for number in range(len(corpus)):
        text = corpus.text(number)
        start, end = text.spans[0]
        rows_ND = store.states(number)[start - 1 : end - 1, -1].to(target.lm_head.weight)
        best_N = product_f32(rows_ND, target.lm_head.weight).argmax(-1).cpu()
        share = (best_N == torch.tensor(list(text.ids[start:end]))).float().mean().item()
        found.append(share >= LEAST_OWN)
    return found


Rounds = Sequence[Sequence[int]]


def tokens_a_pass(rounds: Rounds) -> float:
    """Return emitted tokens per pass over texts' rounds, the target's own included."""
    count = sum(map(len, rounds))
    return (sum(map(sum, rounds)) + count) / max(1, count)


def judge(held: tuple[Rounds, Rounds], general: tuple[Rounds, Rounds], bars: Bars) -> Verdict:
    """Compare drafts on the same texts.

    Args:
        held: rounds on held-back traffic, of the draft in use and of the adapted one.
        general: rounds on general texts, of the draft that learning started from and of the adapted one.
    """
    numbers = [tokens_a_pass(rounds) for rounds in (*held, *general)]
    before, after, first, now = numbers
    refused = ""
    if len(held[0]) < bars.texts:
        refused = f"{len(held[0])} held-back answers are too few to tell"
    elif after < bars.gain * before:
        refused = f"a gain of {after / before - 1:.1%} is less than the {bars.gain - 1:.0%} asked for"
    elif _lowest_gain(*held) <= 1.0:
        refused = "the gain may be an accident of these answers"
    elif now < (1 - bars.loss) * first:
        refused = f"general texts lose {1 - now / first:.1%}"
    return Verdict(before, after, first, now, refused)


def _lowest_gain(before: Rounds, after: Rounds) -> float:
    """Return the gain that resampled sets of the same texts reach in all but one of twenty cases."""
    sums = np.array([[sum(r) + len(r), len(r)] for rounds in (before, after) for r in rounds], dtype=float)
    both = sums.reshape(2, len(before), 2)
    chosen = np.random.default_rng(0).integers(len(before), size=(_RESAMPLED, len(before)))
    totals = both[:, chosen].sum(2)
    lengths = totals[..., 0] / np.maximum(totals[..., 1], 1)
    return float(np.quantile(lengths[1] / lengths[0], _DOUBT))
