"""Running the target over a corpus once and storing what training needs of it, at a disk cost known beforehand."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import DataError
from slipstream.kernels.training.seen import Seen
from slipstream.train.data.corpus import Corpus
from slipstream.train.draft.features import FeatureStore, Manifest, corpus_digest, read_texts, shard_path, write_shard
from slipstream.train.draft.objective import Objective
from slipstream.train.draft.packing import Packer, epoch_rows, to_device
from slipstream.train.draft.server_states import ServerStates
from slipstream.train.draft.target import dtype_name
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.world import World

SHARD_BYTES = 512_000_000
CPU_SHARD_BYTES = 32_000_000
"""On a CPU a shard of the usual size would take minutes, and what interrupts it would lose them."""

Rows = list[list[int]]


@dataclass(frozen=True)
class DiskCost:
    """What storing a corpus's features takes: `stored_bytes` are there already, `free_bytes` are left on the disk."""

    manifest: Manifest
    stored_bytes: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        """The whole folder, once complete."""
        return self.manifest.num_tokens * self.manifest.bytes_per_token

    @property
    def needed_bytes(self) -> int:
        """What is still to be written."""
        return self.total_bytes - self.stored_bytes

    def __str__(self) -> str:
        manifest = self.manifest
        return (
            f"{manifest.num_tokens:,} tokens x {manifest.bytes_per_token:,} bytes ({len(manifest.captured_layers)} "
            f"captured layers and the last state, {manifest.width} wide, {manifest.dtype}) = "
            f"{_size(self.total_bytes)}; {_size(self.stored_bytes)} stored already, {_size(self.free_bytes)} free"
        )


@dataclass(frozen=True)
class CaptureHooks:
    """What a person watches: `announce` the cost, before anything is written; `report` tokens stored so far."""

    announce: Callable[[DiskCost], None] = lambda cost: None
    report: Callable[[int], None] = lambda tokens: None


class Capture:
    """Stores a corpus's features in a folder; a call that was interrupted is simply made again."""

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        wanted: Manifest,
        folder: Path,
        servers: ServerStates | None = None,
    ) -> None:
        """Plan the shards; `wanted` is what the features shall be made from, and a folder of others is refused.

        Where `servers` give the states, the target is not run here.
        """
        self._objective, self._corpus, self._folder, self._servers = objective, corpus, folder, servers
        self.manifest = wanted.settle(folder)
        self._lengths = np.diff(corpus.offsets)
        self._packer = Packer(corpus, self.manifest.row_length, self.manifest.rows_per_step, 1, self.manifest.seed)
        self._shards = _plan(self.manifest, corpus)

    def cost(self) -> DiskCost:
        """Work out what the folder takes, and what is there of it."""
        stored = sum(self._tokens(shard) for number, shard in enumerate(self._shards) if self._stored(number, shard))
        disk = next(place for place in (self._folder, *self._folder.absolute().parents) if place.exists())
        return DiskCost(self.manifest, stored * self.manifest.bytes_per_token, shutil.disk_usage(disk).free)

    def run(self, world: World, hooks: CaptureHooks) -> FeatureStore:
        """Store what is missing, shards dealt out among the processes, and open the folder."""
        cost = self.cost()
        hooks.announce(cost)
        if cost.needed_bytes > cost.free_bytes:
            raise DataError(
                f"{self._folder}: the features need {_size(cost.needed_bytes)} more and the disk has "
                f"{_size(cost.free_bytes)} free. Free some space, name a folder on a larger disk, generate less data "
                f"(data.answer_tokens), or train without storing them."
            )
        world.wait()  # until every process has looked at the folder as it was
        if world.rank == 0:
            self.manifest.write(self._folder)
        world.wait()
        done = 0
        for number, shard in enumerate(self._shards):
            if number % world.size == world.rank and not self._stored(number, shard):
                self._store(number, shard)
            done += self._tokens(shard)
            hooks.report(done)
        world.wait()
        return FeatureStore(self._folder, self.manifest, self._corpus)

    def _stored(self, number: int, shard: list[Rows]) -> bool:
        path = shard_path(self._folder, number)
        if not path.exists():
            return False
        if read_texts(path, self.manifest).tolist() != _texts(shard):
            raise DataError(f"{path}: holds other texts than it should; delete it, and the same command makes it anew.")
        return True

    def _tokens(self, shard: list[Rows]) -> int:
        return int(self._lengths[_texts(shard)].sum())

    def _store(self, number: int, shard: list[Rows]) -> None:
        """Write what the target makes of a shard's texts."""
        texts = _texts(shard)
        if self._servers is None:
            states_NLD = self._run(shard)
        else:
            states_NLD = torch.cat(self._servers.of([self._corpus.text(text).ids for text in texts]))
        write_shard(shard_path(self._folder, number), texts, states_NLD, self.manifest)

    @torch.no_grad()
    def _run(self, shard: list[Rows]) -> Tensor:
        """Run the target over a shard's rows, pass by pass as training would."""
        manifest, target = self.manifest, self._objective.target
        shape = (self._tokens(shard), len(manifest.captured_layers) + 1, manifest.width)
        states_NLD, at = torch.empty(shape, dtype=manifest.torch_dtype), 0
        for rows in shard:
            batch = to_device(self._packer.pack(rows), target.embed_tokens.device)
            seen = Seen(batch.text_BT)
            last_BTD, captured = self._objective.features(batch.ids_BT, batch.positions_BT, seen)
            states_BTLD = torch.stack([*captured, last_BTD], 2).cpu()
            for row, texts in enumerate(rows):
                length = int(self._lengths[texts].sum())
                states_NLD[at : at + length] = states_BTLD[row, :length]
                at += length
        return states_NLD


def wanted_manifest(
    objective: Objective, corpus: Corpus, target_digest: str, config: TrainConfig, world: World
) -> Manifest:
    """Say what features a run needs, made in the very rows and passes of its first epoch."""
    captured = objective.draft.spec.captured_layers
    assert captured is not None
    return Manifest(
        target=target_digest,
        corpus=corpus_digest(corpus),
        captured_layers=captured,
        width=objective.target.spec.hidden_size,
        dtype=dtype_name(objective.target.embed_tokens.dtype),
        num_tokens=len(corpus.ids),
        row_length=config.row_length,
        rows_per_step=config.rows_per_step,
        parts=world.size,
        seed=config.seed,
        shard_bytes=SHARD_BYTES if objective.target.embed_tokens.device.type == "cuda" else CPU_SHARD_BYTES,
    )


@contextmanager
def moved(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Have a module on another device for a while; where it is there already, nothing happens."""
    home = next((parameter.device for parameter in module.parameters()), device)
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def _plan(manifest: Manifest, corpus: Corpus) -> list[list[Rows]]:
    """Return the passes of each shard: whole steps, as many as fit `shard_bytes` and one at least."""
    rows = epoch_rows(corpus, manifest.row_length, manifest.seed, 0)
    steps = [rows[start : start + manifest.rows_per_step] for start in range(0, len(rows), manifest.rows_per_step)]
    step_bytes = manifest.rows_per_step * manifest.row_length * manifest.bytes_per_token
    count = max(1, manifest.shard_bytes // step_bytes)
    return [
        [
            passed
            for step in steps[start : start + count]
            for part in range(manifest.parts)
            if (passed := step[part :: manifest.parts])
        ]
        for start in range(0, len(steps), count)
    ]


def _texts(shard: Sequence[Rows]) -> list[int]:
    return [text for rows in shard for texts in rows for text in texts]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
