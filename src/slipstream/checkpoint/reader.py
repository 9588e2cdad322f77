"""Open a checkpoint: a Hugging Face folder of one file or many shards, a GGUF file, or a hub id."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.checkpoint.embedded import Progress
from slipstream.checkpoint.files import check_inside, find_file, listed, read_json, short
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.hub import resolve
from slipstream.checkpoint.shards import Shard, open_shard
from slipstream.checkpoint.source import TensorInfo, TensorSource
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

_NUMBERED = re.compile(r"(?P<stem>.*-)(?P<number>\d+)-of-(?P<total>\d+)(?P<suffix>\.\w+)")
# In the order tried: transformers' own names first, then whatever else holds tensors.
_WEIGHT_PATTERNS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
_MAX_LISTED = 4
_MOST_SHARDS = 10_000
_LONGEST_NAME = 256
_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def open_checkpoint(path_or_id: str | Path | None, progress: Progress | None = None) -> TensorSource:
    """Open a folder, a .gguf file, a hub id, or the embedded model (None or "embedded")."""
    path = resolve(path_or_id, progress)
    return GgufReader(path) if path.suffix == ".gguf" else CheckpointReader(path)


class CheckpointReader:
    """A Hugging Face folder opened for reading.

    Opening reads headers only and checks that files, index and shards agree; tensors are mapped when asked for.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: is not a folder, so it cannot be a checkpoint.")
        config = find_file(folder, "config.json")
        if config is None:
            raise CheckpointError(
                f"{folder}: has no config.json, so it is not a Hugging Face checkpoint folder "
                f"(adapters and training states are not read)."
            )
        self._folder = folder
        self._config = read_json(config)
        self._shards: dict[Path, Shard] = {path: open_shard(path) for path in _weight_files(folder)}
        self._infos = _merge(self._shards)
        _check_index(folder, self._infos)

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return self._folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json: foreign JSON, hence Any."""
        return self._config

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Describe one tensor without reading its data."""
        if name not in self._infos:
            raise CheckpointError(f"{self._folder}: has no tensor named {name!r}.")
        return self._infos[name]

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """Read one tensor whole."""
        return self._shards[self.info(name).file].tensor(name, device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded) of one tensor, on the CPU."""
        return self._shards[self.info(name).file].rows(name, start, stop)

    def part(self, name: str, window: Window) -> Tensor:
        """Read a part of one tensor, on the CPU."""
        return self._shards[self.info(name).file].part(name, window)


def _weight_files(folder: Path) -> list[Path]:
    index = _index_file(folder)
    if index is not None:
        names = sorted(set(_weight_map(index).values()))
        if len(names) > _MOST_SHARDS:
            raise CheckpointError(f"{index}: names {len(names)} files, more than any checkpoint has; fetch it again.")
        paths = {name: _named_by(index, name) for name in names}
        if absent := [name for name, path in paths.items() if path is None]:
            raise CheckpointError(f"{index}: names {listed(absent)}, absent from the folder; fetch the missing files.")
        return [path for path in paths.values() if path is not None]
    for pattern in _WEIGHT_PATTERNS:
        if files := sorted(folder.glob(pattern)):
            for file in files:
                check_inside(file, folder)
            _check_numbering(files)
            return files
    raise CheckpointError(f"{folder}: holds no weights (no *.safetensors and no pytorch_model*.bin file).")


def _index_file(folder: Path) -> Path | None:
    for name in _INDEX_NAMES:
        path = find_file(folder, name)
        if path is not None and (name == _INDEX_NAMES[0] or not any(folder.glob("*.safetensors"))):
            return path
    return None


def _named_by(index: Path, name: str) -> Path | None:
    """Return the file an index names; an index names files of its own folder, and nothing else."""
    if not name or name != Path(name).name or "\0" in name:
        raise CheckpointError(
            f"{index}: places tensors in {short(name)!r}, which is no name of a file in its folder; fetch it again."
        )
    return find_file(index.parent, name) if len(name) < _LONGEST_NAME else None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: field 'weight_map' is missing or empty.")
    return {str(name): str(file) for name, file in weight_map.items()}


def _check_numbering(files: list[Path]) -> None:
    present = {path.name for path in files}
    for path in files:
        match = _NUMBERED.fullmatch(path.name)
        if match is None:
            continue
        total, width = int(match["total"]), len(match["number"])
        expected = (
            f"{match['stem']}{number:0{width}d}-of-{match['total']}{match['suffix']}" for number in range(1, total + 1)
        )
        if absent := list(itertools.islice((name for name in expected if name not in present), _MAX_LISTED)):
            more = " and more" if len(absent) == _MAX_LISTED else ""
            raise CheckpointError(
                f"{path.parent}: {path.name} is one of {total} shards, and {', '.join(absent)}{more} is missing."
            )


def _merge(shards: Mapping[Path, Shard]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for path, shard in shards.items():
        for name, info in shard.infos.items():
            if name in infos:
                raise CheckpointError(
                    f"{path}: tensor {short(name)!r} is also in {infos[name].file.name}; "
                    f"remove the file that does not belong to the checkpoint."
                )
            infos[name] = info
    return infos


def _check_index(folder: Path, infos: Mapping[str, TensorInfo]) -> None:
    index = _index_file(folder)
    if index is None:
        return
    for name, file in _weight_map(index).items():
        if name not in infos:
            raise CheckpointError(f"{index}: places tensor {short(name)!r} in {file}, which does not hold it.")
        if infos[name].file.name != file:
            raise CheckpointError(
                f"{index}: places tensor {short(name)!r} in {file}, but it is in {infos[name].file.name}."
            )
