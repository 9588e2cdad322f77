"""The training corpus on disk: token ids and answer spans exactly as the target produced them, in numbered shards.

A shard is one safetensors file: `ids` (uint16 or uint32, all texts joined), `offsets` (where each text starts), and
`spans` (text, start, end) of every answer, ends excluded. Its metadata carries the digest of those bytes.

The draft's vocabulary is chosen from it: the target tokens found in most answers, special tokens always among them.
"""

import errno
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from slipstream.errors import ConfigError, DataError

FORMAT = "slipstream-corpus-1"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Text:
    """One conversation: its ids, and where the target's answers lie in it (ends excluded)."""

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Corpus:
    """Many texts, joined: text i is ids[offsets[i]:offsets[i + 1]]; spans rows are (text, start, end)."""

    ids: Array
    offsets: Array
    spans: Array
    digests: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_answer_tokens(self) -> int:
        """How many tokens the target wrote."""
        return int((self.spans[:, 2] - self.spans[:, 1]).sum())

    def text(self, index: int) -> Text:
        """Return one conversation."""
        mine = self.spans[self.spans[:, 0] == index]
        return Text(
            self.ids[self.offsets[index] : self.offsets[index + 1]].tolist(),
            [(int(start), int(end)) for _, start, end in mine],
        )


def join(texts: Iterable[Text]) -> Corpus:
    """Join texts into a corpus."""
    ids: list[Array] = []
    offsets, spans = [0], []
    for index, text in enumerate(texts):
        ids.append(np.asarray(text.ids, dtype=np.uint32))
        offsets.append(offsets[-1] + len(text.ids))
        spans += [(index, start, end) for start, end in text.spans]
    return Corpus(
        np.concatenate(ids) if ids else np.zeros(0, np.uint32),
        np.asarray(offsets, dtype=np.int64),
        np.asarray(spans, dtype=np.int32).reshape(-1, 3),
    )


def answer_numbers(corpus: Corpus) -> Array:
    """Return for every token the number of the answer it belongs to, counted from 1; 0 outside answers."""
    numbers = np.zeros(len(corpus.ids), np.int32)
    starts = corpus.offsets[corpus.spans[:, 0]]
    for number, (start, (_, begin, end)) in enumerate(zip(starts.tolist(), corpus.spans.tolist(), strict=True), 1):
        numbers[start + begin : start + end] = number
    return numbers


def write_shard(path: Path, texts: Iterable[Text], notes: dict[str, Any] | None = None) -> Corpus:
    """Write texts as one shard, under a temporary name until it is whole; `notes` is JSON for people."""
    corpus = join(texts)
    ids = corpus.ids.astype(np.uint16) if not len(corpus.ids) or corpus.ids.max() < 65536 else corpus.ids
    arrays = {"ids": ids, "offsets": corpus.offsets, "spans": corpus.spans}
    metadata = {"format": FORMAT, "sha256": _digest(arrays), "notes": json.dumps(notes or {})}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error
    return Corpus(ids, corpus.offsets, corpus.spans, (metadata["sha256"],))


def read_shard(path: Path) -> Corpus:
    """Read one shard, checking its digest."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in ("ids", "offsets", "spans")}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: is not a readable corpus shard ({error}); delete it and generate again.") from error
    if metadata.get("format") != FORMAT or metadata.get("sha256") != _digest(arrays):
        raise DataError(f"{path}: is damaged or not a {FORMAT} shard; delete it and generate again.")
    return Corpus(arrays["ids"], arrays["offsets"], arrays["spans"], (metadata["sha256"],))


def read_notes(path: Path) -> dict[str, Any]:  # JSON of whoever wrote it
    """Return what was noted beside a shard's texts."""
    try:
        with safe_open(path, framework="np") as file:
            notes = json.loads((file.metadata() or {}).get("notes", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path}: is not a readable corpus shard ({error}); delete it and generate again.") from error
    return notes if isinstance(notes, dict) else {}


def shard_paths(folder: Path) -> list[Path]:
    """Return a corpus folder's shards in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_corpus(folder: Path) -> Corpus:
    """Read all shards of a folder as one corpus."""
    shards = [read_shard(path) for path in shard_paths(folder)]
    if not shards:
        raise DataError(f"{folder}: holds no corpus shards (shard-*.safetensors); generate data first.")
    ids = np.concatenate([shard.ids for shard in shards])
    offsets, spans, num_texts, num_tokens = [np.zeros(1, np.int64)], [], 0, 0
    for shard in shards:
        offsets.append(shard.offsets[1:] + num_tokens)
        spans.append(shard.spans + np.asarray([num_texts, 0, 0], dtype=np.int32))
        num_texts, num_tokens = num_texts + len(shard), num_tokens + len(shard.ids)
    corpus = Corpus(ids, np.concatenate(offsets), np.concatenate(spans), tuple(s.digests[0] for s in shards))
    if corpus.num_answer_tokens == 0:
        raise DataError(f"{folder}: the corpus has no answers, so there is nothing to learn from.")
    return corpus


def disk_error(path: Path, error: Exception) -> DataError:
    """Say that writing failed, and what to do."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "the disk is full; free some space, then start again and the run goes on" if full else str(error)
    return DataError(f"{path}: could not be written: {remedy}.")


def _digest(arrays: dict[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + str(arrays[name].dtype).encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


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
