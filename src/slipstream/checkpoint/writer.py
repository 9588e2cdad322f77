"""Write a checkpoint folder: bounded safetensors shards, and a folder that appears whole or not at all."""

import json
import os
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slipstream.checkpoint.in_place import WorkFolder, mend, put_in_place
from slipstream.errors import CheckpointError

DEFAULT_SHARD_BYTES = 4_000_000_000
RECORD_FILE = "slipstream.json"
"""What slipstream says of itself in every folder that a verb writes."""


class FolderExistsError(CheckpointError):
    """The folder to be written is already there, and overwriting was not asked for."""


def refuse_foreign(folder: Path) -> None:
    """Raise unless `folder` may be replaced: it is absent, empty, or slipstream wrote it (slipstream.json is there)."""
    if not folder.name:
        raise CheckpointError(f"{folder}: is no name for a new folder; give one.")
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / RECORD_FILE).is_file()):
        return
    if folder.exists():
        raise FolderExistsError(
            f"{folder}: is already there and slipstream did not write it (it holds no {RECORD_FILE}), so it is not "
            f"replaced. Name another folder, or move it away first."
        )


class CheckpointWriter:
    """Writes one checkpoint folder; use it in a `with` block.

    Everything goes to a hidden folder beside the final one, which is renamed into place when the block ends. If the
    block raises, or the disk is full, the hidden folder is removed and what was there before stays. At most one
    shard's tensors are held in memory.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES, overwrite: bool = False) -> None:
        if max_shard_bytes < 1:
            raise CheckpointError(f"A shard of {max_shard_bytes} bytes cannot hold anything.")
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._overwrite = overwrite
        self._hidden: WorkFolder | None = None
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._total_bytes = 0
        try:
            mend(folder)
            self._refuse_existing()
            self._hidden = WorkFolder(folder, uuid.uuid4().hex[:12])
        except OSError as error:
            raise self._failure(error) from error
        self._work = self._hidden.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is on disk once its shard is full, at the latest on commit."""
        if name in self._names:
            raise CheckpointError(f"{self._folder}: tensor {name!r} was added twice.")
        tensor = tensor.detach().cpu().contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + nbytes > self._max_shard_bytes:
            self._flush()
        if tensor.untyped_storage().nbytes() != nbytes or self._shares_memory(tensor):
            tensor = tensor.clone()  # safetensors refuses tensors that share memory
        self._names.add(name)
        self._pending[name] = tensor
        self._pending_bytes += nbytes
        self._total_bytes += nbytes

    def write_text(self, name: str, text: str) -> None:
        """Write a text file into the folder."""
        try:
            (self._work / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file, such as config.json, into the folder."""
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def copy_file(self, source: Path, name: str | None = None) -> None:
        """Copy a file as it is into the folder, under its own name unless another is given."""
        try:
            shutil.copyfile(source, self._work / (name or source.name))
        except OSError as error:
            raise self._failure(error) from error

    def commit(self) -> None:
        """Write what is pending and put the folder in its place."""
        try:
            self._flush()
            self._name_shards()
            self._refuse_existing()
            put_in_place(self._work, self._folder)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove everything written so far; after a commit there is nothing left to remove."""
        self._pending.clear()
        if self._hidden is not None:
            self._hidden.close()

    def _shares_memory(self, tensor: Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        return any(other.untyped_storage().data_ptr() == pointer for other in self._pending.values())

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._work / f"shard-{len(self._shards)}.safetensors"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
            # safetensors gives the file to its owner alone; the user's umask, as the folder shows it, decides.
            path.chmod(self._work.stat().st_mode & 0o666)
            with path.open("rb") as file:
                os.fsync(file.fileno())  # a folder that has its name has its weights, whatever happens to the machine
        except (SafetensorError, OSError) as error:
            raise self._failure(error) from error
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            final = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._work / f"shard-{i}.safetensors").rename(self._work / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self.write_json("model.safetensors.index.json", index)

    def _refuse_existing(self) -> None:
        if self._overwrite or not self._folder.exists():
            return
        if not self._folder.is_dir() or any(self._folder.iterdir()):
            raise FolderExistsError(f"{self._folder}: is already there. Name another folder, or move it away first.")

    def _failure(self, error: Exception) -> CheckpointError:
        self.abort()
        return CheckpointError(
            f"{self._folder}: cannot be written ({error}). Free space or choose another place; "
            f"nothing was left behind, and what was there before is unchanged."
        )
