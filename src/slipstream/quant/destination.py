"""The folder a pass writes: a hidden work folder that survives a kill, and takes its place only when it is whole."""

import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from slipstream.checkpoint.files import find_file, lies_inside, read_json
from slipstream.checkpoint.in_place import mend, put_in_place
from slipstream.checkpoint.writer import RECORD_FILE, FolderExistsError, refuse_foreign
from slipstream.errors import CheckpointError
from slipstream.quant.plan import QuantizePlan, ShardPlan

_log = logging.getLogger(__name__)
_STATE = ".slipstream-quantize.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_SPARE_BYTES = 64 << 20  # for config, index and whatever else the folder holds


class Destination:
    """Where a plan's files go; use it in a `with` block.

    Files are written under `.NAME.partial` beside the folder. The work folder stays behind when a pass is stopped,
    whether by an error or by a kill, so that the next one can take it up; `commit` renames it into place.
    """

    def __init__(self, plan: QuantizePlan, folder: Path, overwrite: bool) -> None:
        self._plan = plan
        self._folder = folder
        self._overwrite = overwrite
        self._work = folder.parent / f".{folder.name}.partial"
        self._lock: IO[str] | None = None
        self._done: dict[str, Any] = {}
        self._own = False
        self._fingerprint = plan.fingerprint()

    def __enter__(self) -> Self:
        with self.reporting_full_disk():
            mend(self._folder)
            self._refuse()
            self._work.mkdir(parents=True, exist_ok=True)
            self._lock = (self._work / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise CheckpointError(f"{self._folder}: another slipstream quantize is writing it; wait for it.") from error
        try:
            self._take_up()
            self._check_space()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def unfinished(self, shard: ShardPlan) -> Path:
        """The path a file has while it is written."""
        return self._work / f"{shard.file_name}.writing"

    def finished(self, shard: ShardPlan) -> dict[str, Any] | None:
        """Return what `finish` was told about a file that an earlier run completed; None if it is still to do."""
        summary = self._done.get(shard.file_name)
        path = self._work / shard.file_name
        if summary is None or not path.is_file() or path.stat().st_size != shard.layout.nbytes:
            return None
        return dict(summary)

    def finish(self, shard: ShardPlan, summary: Mapping[str, Any]) -> None:
        """Give a file its name, and remember it as done."""
        with self.reporting_full_disk():
            self.unfinished(shard).rename(self._work / shard.file_name)
            self._done[shard.file_name] = dict(summary)
            self._save_state()

    def commit(self, record: Mapping[str, Any]) -> None:
        """Write config.json, the index and slipstream.json, carry the rest over, and put the folder in its place."""
        with self.reporting_full_disk():
            self._carry_over()
            config = dict(self._plan.checkpoint.config)
            config["quantization_config"] = self._plan.quantization_config()
            _write_json(self._work / "config.json", config)
            self._write_index()
            self._write_record(record)
            (self._work / _STATE).unlink()
            (self._work / ".lock").unlink()
            put_in_place(self._work, self._folder)
            self._own = False

    @contextmanager
    def reporting_full_disk(self) -> Iterator[None]:
        """Turn the operating system's refusals into sentences."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kept = f" The {len(self._done)} files that were done are kept in {self._work}." if self._done else ""
            raise CheckpointError(
                f"{self._folder}: cannot be written ({error.strerror or error}), and nothing was put there. "
                f"{'Free some space' if full else 'See to that'} and run the same command again.{kept}"
            ) from error

    def _leave(self) -> None:
        """Unlock; a work folder without a single whole file is of no use to a later run."""
        if self._own and not self._done:
            shutil.rmtree(self._work, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _refuse(self) -> None:
        source, target = self._plan.checkpoint.folder.resolve(), self._folder.resolve()
        if target == source or target in source.parents or source in target.parents:
            raise CheckpointError(
                f"{self._folder}: lies in or around the source {source}; name a folder apart from it."
            )
        if self._overwrite:
            refuse_foreign(self._folder)
        elif self._folder.exists() and (self._folder.is_file() or any(self._folder.iterdir())):
            raise FolderExistsError(
                f"{self._folder}: is already there. Name another folder, or pass --overwrite to replace it."
            )

    def _take_up(self) -> None:
        state = self._work / _STATE
        if state.is_file():
            saved = read_json(state)
            if saved.get("fingerprint") == self._fingerprint:
                self._done = dict(saved.get("done") or {})
            elif not self._overwrite:
                raise CheckpointError(
                    f"{self._work}: holds an unfinished run with other settings or another source. Repeat that "
                    f"command to finish it, or pass --overwrite (or remove the folder) to begin again."
                )
        self._own = True
        keep = {*self._done, _STATE, ".lock"}
        for path in self._work.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with self.reporting_full_disk():
            self._save_state()

    def _check_space(self) -> None:
        needed = sum(shard.layout.nbytes for shard in self._plan.shards if self.finished(shard) is None) + _SPARE_BYTES
        free = shutil.disk_usage(self._work).free
        if free < needed:
            raise CheckpointError(
                f"{self._folder}: needs {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB free. "
                f"Free some space or choose another place; nothing was written."
            )

    def _save_state(self) -> None:
        _write_json(self._work / _STATE, {"fingerprint": self._fingerprint, "done": self._done})

    def _carry_over(self) -> None:
        source = self._plan.checkpoint.folder
        for path in sorted(source.rglob("*")):
            relative = path.relative_to(source)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and not hidden and not path.name.endswith(_WEIGHTS):
                if not lies_inside(path, source):
                    _log.warning("%s leads out of its folder and is left out.", path)
                    continue
                (self._work / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self._work / relative)

    def _write_index(self) -> None:
        if len(self._plan.shards) == 1:
            return
        tensors = [
            (name, shard, placed) for shard in self._plan.shards for name, placed in shard.layout.tensors.items()
        ]
        _write_json(
            self._work / "model.safetensors.index.json",
            {
                "metadata": {"total_size": sum(placed.nbytes for _, _, placed in tensors)},
                "weight_map": {name: shard.file_name for name, shard, _ in sorted(tensors, key=lambda t: t[0])},
            },
        )

    def _write_record(self, record: Mapping[str, Any]) -> None:
        path = find_file(self._plan.checkpoint.folder, RECORD_FILE)
        earlier = {} if path is None else read_json(path)
        _write_json(self._work / RECORD_FILE, {**earlier, "quantize": dict(record)})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
