"""The draft's vocabulary: the target tokens found in most answers, special tokens always among them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.data.corpus import Corpus
from slipstream.train.draft.packing import answer_numbers


@dataclass(frozen=True)
class DraftVocab:
    """`token_ids_V` ascending target ids; `coverage` is the share of answer tokens among them."""

    token_ids_V: Tensor
    vocab_size: int
    coverage: float

    def draft_index(self) -> Tensor:
        """Return for each target token its place in the draft's vocabulary, or -1."""
        index = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        index[self.token_ids_V] = torch.arange(len(self.token_ids_V))
        return index


def coverage(corpus: Corpus, token_ids_V: Tensor) -> float:
    """Return the share of the corpus's answer tokens that a draft vocabulary holds."""
    used = corpus.ids[answer_numbers(corpus) > 0]
    return float(np.isin(used, token_ids_V.numpy()).mean()) if len(used) else 1.0


def exchange_tokens(token_ids_V: Tensor, corpus: Corpus, vocab_size: int, most: int) -> Tensor:
    """Return a draft's vocabulary with up to `most` tokens exchanged for those of the corpus's answers it lacks.

    Those taken in are in most answers; those given up occur nowhere in the answers and have the highest ids, which
    tokenizers give to what they merged last and met least. Their number stays the same.
    """
    used = corpus.ids[answer_numbers(corpus) > 0].astype(np.int64)
    known = token_ids_V.cpu().numpy()
    missing, counts = np.unique(used[~np.isin(used, known)], return_counts=True)
    wanted = missing[np.argsort(-counts, kind="stable")][:most]
    spare = np.sort(known[~np.isin(known, used)])[::-1][: len(wanted)]
    wanted = wanted[: len(spare)]
    kept = known[~np.isin(known, spare)]
    assert len(kept) + len(wanted) == len(known) and (not len(wanted) or wanted.max() < vocab_size)
    return torch.from_numpy(np.sort(np.concatenate([kept, wanted])).astype(np.int64))


def choose_vocab(corpus: Corpus, vocab_size: int, draft_vocab_size: int, forced: Iterable[int]) -> DraftVocab:
    """Take the tokens found in most answers; unused room goes to the lowest unused ids.

    What one answer says over and over is its own subject, and a draft may borrow it from the text.
    """
    forced_ids = sorted(set(forced))
    if draft_vocab_size > vocab_size:
        raise ConfigError(f"draft_vocab_size {draft_vocab_size} is more than the target's {vocab_size} tokens.")
    if forced_ids and (forced_ids[-1] >= vocab_size or forced_ids[0] < 0):
        raise ConfigError(
            f"Special token {forced_ids[-1]} lies outside the target's vocabulary of {vocab_size}: the tokenizer does "
            f"not belong to this target."
        )
    if len(forced_ids) > draft_vocab_size:
        raise ConfigError(
            f"draft_vocab_size {draft_vocab_size} has no room for the {len(forced_ids)} special tokens; raise it."
        )
    answers = answer_numbers(corpus)
    inside = answers > 0
    # Each token once for each answer it is in.
    found = np.unique(answers[inside].astype(np.int64) << 32 | corpus.ids[inside].astype(np.int64))
    counts = np.bincount(found & 0xFFFFFFFF, minlength=vocab_size)
    if len(counts) > vocab_size:
        raise ConfigError(f"The corpus has token {len(counts) - 1}, outside the target's vocabulary of {vocab_size}.")
    ranked = counts.copy()
    ranked[forced_ids] = counts.max() + 1
    chosen = np.sort(np.argsort(-ranked, kind="stable")[:draft_vocab_size])
    token_ids_V = torch.from_numpy(chosen.astype(np.int64))
    return DraftVocab(token_ids_V, vocab_size, coverage(corpus, token_ids_V))
