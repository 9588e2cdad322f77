"""Stored features: what the target made of every token of a corpus, on disk, found again by text.

A folder holds `features.json` (what the features were made from) and numbered shards. A shard is one safetensors file:
`texts`, the numbers of the texts in it, and `states` [tokens, L + 1, D], for each of their tokens the L captured states
and, last, the target's normed final state, which is all that its opinion needs beside its head.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slipstream.errors import DataError
from slipstream.train.data.corpus import Array, Corpus, disk_error

FORMAT = "slipstream-features-1"
MANIFEST = "features.json"
_ROWS = ("row_length", "rows_per_step", "parts", "seed")
_MAY_DIFFER = (*_ROWS, "shard_bytes")


@dataclass(frozen=True)
class Manifest:
    """What a folder's features were made from; from `row_length` on: in which rows, which only rounding depends on.

    Args:
        target, corpus: digests of the weights and of the texts.
        dtype: of the states, as torch names it ("bfloat16").
        parts: into how many passes the rows of a step were dealt, one for each process of the run.
    """

    target: str
    corpus: str
    captured_layers: tuple[int, ...]
    width: int
    dtype: str
    num_tokens: int
    row_length: int
    rows_per_step: int
    parts: int
    seed: int
    shard_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """What one token takes on disk."""
        return (len(self.captured_layers) + 1) * self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The states' type."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def digest(self) -> str:
        """What every shard carries, so that a shard of another folder is noticed."""
        return hashlib.sha256(json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()).hexdigest()

    def settle(self, folder: Path) -> "Manifest":
        """Return the folder's own manifest, or this one if the folder is new; refuse what was made from other things.

        Rows may differ: what is there was made in the folder's rows, and so is what is still missing.
        """
        path = folder / MANIFEST
        if not path.is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise DataError(f"{folder}: is not a folder of features, and not empty; name another folder.")
            return self
        found = _read_manifest(path)
        mine, theirs = asdict(self), asdict(found)
        if differs := [name for name in mine if name not in _MAY_DIFFER and mine[name] != theirs[name]]:
            raise DataError(
                f"{folder}: its features were made from something else ({', '.join(differs)} differ); "
                f"name another folder, or delete this one to store them anew."
            )
        return found

    def same_rows(self, other: "Manifest") -> bool:
        """Tell whether both pack texts into the same rows."""
        return all(getattr(self, name) == getattr(other, name) for name in _ROWS)

    def write(self, folder: Path) -> None:
        """Put the manifest into the folder, which is made if need be."""
        path = folder / MANIFEST
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_error(path, error) from error


class FeatureStore:
    """A complete folder, opened for reading by text; files are mapped, so only what is asked for is read."""

    def __init__(self, folder: Path, manifest: Manifest, corpus: Corpus) -> None:
        self.manifest = manifest
        lengths = np.diff(corpus.offsets)
        self._lengths = lengths
        self._shard = np.full(len(lengths), -1, np.int64)
        self._start = np.zeros(len(lengths), np.int64)
        self._states = []
        for number, path in enumerate(sorted(folder.glob("features-*.safetensors"))):
            texts = read_texts(path, manifest)
            self._shard[texts] = number
            self._start[texts] = np.cumsum(lengths[texts]) - lengths[texts]
            self._states.append(safe_open(path, framework="pt").get_slice("states"))  # type: ignore[no-untyped-call]
        if absent := int((self._shard < 0).sum()):
            raise DataError(f"{folder}: has no features of {absent} texts; run the same command again to add them.")

    def states(self, text: int) -> Tensor:
        """Return one text's states, [tokens, L + 1, D]."""
        start = int(self._start[text])
        states: Tensor = self._states[self._shard[text]][start : start + int(self._lengths[text])]
        return states

    def rows(self, rows: Sequence[Sequence[int]], row_length: int) -> Tensor:
        """Lay texts out in rows, [L + 1, B, T, D]; padding is zero, which nothing looks at."""
        return lay_out([[self.states(text) for text in texts] for texts in rows], row_length)


def lay_out(rows: Sequence[Sequence[Tensor]], row_length: int) -> Tensor:
    """Lay texts' states, [tokens, L + 1, D] each, out in rows, [L + 1, B, T, D]; padding is zero."""
    first = rows[0][0]
    states_LBTD = first.new_zeros(first.shape[1], len(rows), row_length, first.shape[2])
    for row, texts in enumerate(rows):
        at = 0
        for states_TLD in texts:
            states_LBTD[:, row, at : at + len(states_TLD)] = states_TLD.transpose(0, 1)
            at += len(states_TLD)
    return states_LBTD


def corpus_digest(corpus: Corpus) -> str:
    """Return the digest of a corpus's texts; where the answers lie does not matter to the target."""
    digest = hashlib.sha256(corpus.ids.astype(np.uint32).tobytes())
    digest.update(corpus.offsets.astype(np.int64).tobytes())
    return digest.hexdigest()


def shard_path(folder: Path, number: int) -> Path:
    """Return where a shard lies."""
    return folder / f"features-{number:05d}.safetensors"


def write_shard(path: Path, texts: Sequence[int], states_NLD: Tensor, manifest: Manifest) -> None:
    """Write a shard under a temporary name, force it to the disk, and rename; whatever goes wrong leaves nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    content = {"texts": torch.tensor(texts, dtype=torch.int64), "states": states_NLD}
    try:
        with temporary.open("wb") as file:  # safetensors' own writer leaves a file of random name when it is killed
            file.write(save(content, {"manifest": manifest.digest}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_texts(path: Path, manifest: Manifest) -> Array:
    """Return the numbers of the texts in a shard, checking that the file is whole and belongs to the folder."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            texts: Array = file.get_tensor("texts")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it, and the same command makes it again.") from error
    if metadata.get("manifest") != manifest.digest:
        raise DataError(f"{path}: belongs to another folder of features; delete it, and the same command makes it.")
    return texts


def _read_manifest(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise DataError(f"{path}: was written by another version of slipstream; delete the folder.")
        names = {field.name for field in fields(Manifest)}
        if content.keys() != names:
            raise KeyError(", ".join(sorted(names ^ content.keys())))
        return Manifest(**{**content, "captured_layers": tuple(content["captured_layers"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete the folder to store the features anew.") from error
