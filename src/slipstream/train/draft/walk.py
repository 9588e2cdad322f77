"""Acceptance length without decoding: on a text the target wrote greedily, walk the rounds a chain would take.

Every accepted token is a token of the text, and the keys of earlier slots are those drafting recomputes from true
features, so one unrolled pass over the text tells how many drafted tokens each possible round would keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.kernels.training.loss import product_f32
from slipstream.kernels.training.seen import Seen
from slipstream.train.data.corpus import Array, Corpus, Text
from slipstream.train.data.generate import loop_end
from slipstream.train.draft.objective import Objective
from slipstream.train.draft.unroll import UnrollContext, shift_left


@dataclass(frozen=True)
class Walk:
    """Rounds walked over a set of texts with chains of one length.

    Args:
        tokens: tokens emitted by rounds (an answer's first token comes from the prompt's own pass).
        accepted: for each draft position, in how many rounds it was kept.
    """

    tokens: int
    rounds: int
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass, the target's own included."""
        return self.tokens / max(1, self.rounds)

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of rounds that kept each draft position."""
        return tuple(count / max(1, self.rounds) for count in self.accepted)


def walk_rounds(kept_T: Sequence[int], start: int, end: int, chain: int) -> list[int]:
    """Return how many drafted tokens each round keeps.

    Args:
        kept_T: for each slot, how many of its drafted tokens in a row equal the text's.
        start: the slot of the last prompt token, where the first round begins.
        end: the text's length.
    """
    rounds, slot = [], start
    while slot + 2 < end:
        kept = min(int(kept_T[slot]), chain, end - (slot + 2))
        rounds.append(kept)
        slot += kept + 1
    return rounds


def summarize(rounds: Sequence[int], chain: int) -> Walk:
    """Add rounds up."""
    accepted = tuple(sum(kept > position for kept in rounds) for position in range(chain))
    return Walk(sum(rounds) + len(rounds), len(rounds), accepted)


@torch.no_grad()
def kept_tokens(objective: Objective, texts: Sequence[Text], steps: int) -> Array:
    """Return for each slot of each text (rows padded to one length) how many drafted tokens in a row are right."""
    device = objective.target.embed_tokens.device
    length = -(-max(len(text.ids) for text in texts) // 64) * 64
    ids, number = np.zeros((len(texts), length), np.int64), np.full((len(texts), length), -1, np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        number[row, : len(text.ids)] = 0
    ids_BT = torch.from_numpy(ids).to(device)
    seen = Seen(torch.from_numpy(number).to(device))
    positions_BT = torch.arange(length, device=device).expand(len(texts), -1)
    _, captured = objective.features(ids_BT, positions_BT, seen)
    ctx = UnrollContext(objective.ops, positions_BT, seen)
    right_BT = torch.ones_like(ids_BT)
    kept_BT = torch.zeros_like(ids_BT)
    draft, head = objective.draft, objective.head()
    for step, hidden in enumerate(objective.unroll(captured, ids_BT, ctx, steps)):
        best_BT = product_f32(hidden.normed_TD.flatten(0, 1), head).argmax(-1).view_as(ids_BT)
        right_BT = right_BT & (draft.token_ids_V[best_BT] == shift_left(ids_BT, 2 + step))
        kept_BT += right_BT
    kept: Array = kept_BT.cpu().numpy()
    return kept


@dataclass(frozen=True)
class Measured:
    """The walk over one evaluation set: for each chain length all texts, and the texts that do not loop."""

    num_texts: int
    loop_share: float
    walks: dict[int, Walk]
    without_loops: dict[int, Walk]


def measure(objective: Objective, corpus: Corpus, chains: Sequence[int] = (3, 6), batch: int = 32) -> Measured:
    """Walk an evaluation set: texts of one prompt and one greedy answer each."""
    texts = sorted((corpus.text(i) for i in range(len(corpus))), key=lambda text: len(text.ids))
    loops = [loop_end(text.ids[text.spans[0][0] :]) is not None for text in texts]
    all_rounds: dict[int, list[list[int]]] = {chain: [] for chain in chains}
    for first in range(0, len(texts), batch):
        some = texts[first : first + batch]
        kept = kept_tokens(objective, some, max(chains))
        for row, text in enumerate(some):
            start, end = text.spans[0]
            for chain in chains:
                all_rounds[chain].append(walk_rounds(kept[row].tolist(), start - 1, end, chain))
    walks, clean = {}, {}
    for chain, rounds in all_rounds.items():
        walks[chain] = summarize([kept for text in rounds for kept in text], chain)
        clean[chain] = summarize(
            [kept for text, looped in zip(rounds, loops, strict=True) if not looped for kept in text], chain
        )
    return Measured(len(texts), sum(loops) / max(1, len(loops)), walks, clean)
