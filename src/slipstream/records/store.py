"""Record files on disk: written whole or not at all, and read back with every field checked."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.records.evals import Gsm8kRecord, LosslessRecord, PerplexityRecord
from slipstream.records.point import PointRecord
from slipstream.records.schema import read

Record = PointRecord | Gsm8kRecord | LosslessRecord | PerplexityRecord
KINDS: dict[str, type[PointRecord] | type[Gsm8kRecord] | type[LosslessRecord] | type[PerplexityRecord]] = {
    "bench": PointRecord,
    "gsm8k": Gsm8kRecord,
    "lossless": LosslessRecord,
    "perplexity": PerplexityRecord,
}


class RecordError(SlipstreamError):
    """A record file cannot be read as one, or not be written."""


@dataclass(frozen=True)
class RecordSet:
    """Everything read from a set of files, sorted by kind."""

    points: tuple[PointRecord, ...] = ()
    gsm8k: tuple[Gsm8kRecord, ...] = ()
    lossless: tuple[LosslessRecord, ...] = ()
    perplexity: tuple[PerplexityRecord, ...] = ()


def write_record(path: Path, record: Record) -> None:
    """Write `record` to `path` through a temporary name, so that a reader never sees half a file."""
    write_text(path, json.dumps(dataclasses.asdict(record), indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text to `path` through a temporary name in the same folder."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through a temporary name in the same folder."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(
            f"{path}: cannot be written ({error.strerror or error}). Free some space, or name another place."
        ) from error


def check_writable(path: Path) -> None:
    """Raise RecordError if a file could not be written at `path`; to be asked before hours of work, not after."""
    if path.is_dir():
        raise RecordError(f"{path}: is a folder; name the file to write.")
    existing = next((parent for parent in path.parents if parent.exists()), Path())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RecordError(f"{path}: cannot be written, since {existing} is no folder that you may write to.")


def set_aside(path: Path) -> None:
    """Keep an older record under `superseded/` of the run's folder, so that nothing measured is ever lost."""
    if not path.exists():
        return
    folder = path.parent.parent / "superseded"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (kept := folder / f"{path.stem}.{number}.json").exists():
        number += 1
    path.rename(kept)


def read_record(path: Path) -> Record:
    """Read one record file of any kind."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(
            f"{path}: not a readable record ({error}). Name records or folders of them; one that is damaged is "
            "measured again once it is moved away."
        ) from error
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise RecordError(f"{path}: kind {kind!r} is not a slipstream record. It should be one of {', '.join(KINDS)}.")
    return read(KINDS[kind], value, str(path))


def read_records(paths: Iterable[Path]) -> RecordSet:
    """Read files, and every record below folders; names that begin with a dot and `superseded` folders are left out."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = (p for p in path.rglob("*.json") if not p.name.startswith(".") and "superseded" not in p.parts)
            files.extend(sorted(found))
        elif path.is_file():
            files.append(path)
        else:
            raise RecordError(f"{path}: no such file or folder.")
    records = [read_record(path) for path in files]
    return RecordSet(
        points=tuple(r for r in records if isinstance(r, PointRecord)),
        gsm8k=tuple(r for r in records if isinstance(r, Gsm8kRecord)),
        lossless=tuple(r for r in records if isinstance(r, LosslessRecord)),
        perplexity=tuple(r for r in records if isinstance(r, PerplexityRecord)),
    )


def sha256_of(value: object) -> str:
    """Hash a JSON-like value in one canonical spelling."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
