"""Acceptance length without decoding: on a text the target wrote greedily, walk the rounds a chain would take.

Every accepted token is a token of the text, and the keys of earlier slots are those drafting recomputes from true
features, so one unrolled pass over the text tells how many drafted tokens each possible round would keep.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.training.loss import product_f32
from slipstream.kernels.training.seen import Seen
from slipstream.train.data.corpus import Array, Corpus, Text
from slipstream.train.data.generate import loop_end
from slipstream.train.draft.features import FeatureStore, lay_out
from slipstream.train.draft.objective import Objective
from slipstream.train.draft.packing import UnrollContext, shift_left

_BATCH_TOKENS = 16_384


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
def kept_tokens(
    objective: Objective, texts: Sequence[Text], steps: int, stored: Sequence[Tensor] | None = None
) -> Array:
    """Return for each slot of each text (rows padded to one length) how many drafted tokens in a row are right.

    Where the texts' states are `stored`, [tokens, L + 1, D] each, the target is not run.
    Slots before all answers count none: nobody asks, and the head's product is most of the work of a long prompt.
    """
    device = objective.target.embed_tokens.device
    length = -(-max(len(text.ids) for text in texts) // 64) * 64
    ids, number = np.zeros((len(texts), length), np.int64), np.full((len(texts), length), -1, np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        number[row, : len(text.ids)] = 0
    ids_BT = torch.from_numpy(ids).to(device)
    seen = Seen(torch.from_numpy(number).to(device))
    positions_BT = torch.arange(length, device=device).expand(len(texts), -1)
    if stored is None:
        _, captured = objective.features(ids_BT, positions_BT, seen)
    else:
        captured = lay_out([[states] for states in stored], length)[:-1].to(device).unbind()
    ctx = UnrollContext(objective.ops, positions_BT, seen)
    right_BT = torch.ones_like(ids_BT)
    kept_BT = torch.zeros_like(ids_BT)
    draft, head = objective.draft, objective.head()
    first = min(text.spans[0][0] for text in texts) - 1
    slots_BS = torch.arange(first, length, device=device).expand(len(texts), -1)
    for step, hidden in enumerate(objective.unroll(captured, ids_BT, ctx, steps, slots_BS)):
        best_BS = product_f32(hidden.normed_TD.flatten(0, 1), head).argmax(-1).view(slots_BS.shape)
        right_BT[:, first:] &= draft.token_ids_V[best_BS] == shift_left(ids_BT, 2 + step)[:, first:]
        kept_BT[:, first:] += right_BT[:, first:]
    kept: Array = kept_BT.cpu().numpy()
    return kept


@dataclass(frozen=True)
class Measured:
    """The walk over one evaluation set: for each chain length all texts, and the texts that do not loop."""

    num_texts: int
    loop_share: float
    walks: dict[int, Walk]
    without_loops: dict[int, Walk]
    by_length: dict[str, dict[int, Walk]]


LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Where one bucket of prompt lengths ends and the next begins, in tokens."""


def length_name(tokens: int) -> str:
    """Return the bucket of a prompt's length: "below 512", "512 to 1024", ..., "8192 and more"."""
    at = bisect.bisect_right(LENGTHS, tokens)
    if at == 0:
        return f"below {LENGTHS[0]}"
    return f"{LENGTHS[at - 1]} to {LENGTHS[at]}" if at < len(LENGTHS) else f"{LENGTHS[-1]} and more"


def measure(
    objective: Objective, corpus: Corpus, chains: Sequence[int] = (3, 6), store: FeatureStore | None = None
) -> Measured:
    """Walk an evaluation set: texts of one prompt and one greedy answer each, whose states may be in a store."""
    order = np.argsort(np.diff(corpus.offsets), kind="stable").tolist()
    texts = [corpus.text(number) for number in order]
    all_rounds = _rounds(objective, texts, order, chains, store)
    loops = [loop_end(text.ids[text.spans[0][0] :]) is not None for text in texts]
    walks, clean, by_length = {}, {}, {}
    names = [length_name(text.spans[0][0]) for text in texts]
    for name in dict.fromkeys(names):
        by_length[name] = {
            chain: summarize([kept for at, text in enumerate(rounds) if names[at] == name for kept in text], chain)
            for chain, rounds in all_rounds.items()
        }
    for chain, rounds in all_rounds.items():
        walks[chain] = summarize([kept for text in rounds for kept in text], chain)
        clean[chain] = summarize(
            [kept for text, looped in zip(rounds, loops, strict=True) if not looped for kept in text], chain
        )
    return Measured(len(texts), sum(loops) / max(1, len(loops)), walks, clean, by_length)


def rounds_by_text(objective: Objective, corpus: Corpus, chain: int, store: FeatureStore) -> list[list[int]]:
    """Return how many drafted tokens each round of each text keeps, texts in the corpus's order."""
    order = np.argsort(np.diff(corpus.offsets), kind="stable").tolist()
    found = _rounds(objective, [corpus.text(number) for number in order], order, (chain,), store)[chain]
    by_number = dict(zip(order, found, strict=True))
    return [by_number[number] for number in range(len(corpus))]


def _rounds(
    objective: Objective,
    texts: Sequence[Text],
    numbers: Sequence[int],
    chains: Sequence[int],
    store: FeatureStore | None,
) -> dict[int, list[list[int]]]:
    """Walk texts, shortest first; `numbers` are those they have in the store."""
    rounds: dict[int, list[list[int]]] = {chain: [] for chain in chains}
    done = 0
    for some in _batches(texts):
        stored = None if store is None else [store.states(number) for number in numbers[done : done + len(some)]]
        kept = kept_tokens(objective, some, max(chains), stored)
        done += len(some)
        for row, text in enumerate(some):
            start, end = text.spans[0]
            for chain in chains:
                rounds[chain].append(walk_rounds(kept[row].tolist(), start - 1, end, chain))
    return rounds


def _batches(texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
    """Yield texts, shortest first, as many together as pad to `_BATCH_TOKENS`; one alone may be longer."""
    start = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or (end + 1 - start) * len(texts[end].ids) > _BATCH_TOKENS:
            yield texts[start:end]
            start = end
