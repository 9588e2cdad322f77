"""Where a draft came from: the folders it was started from and averaged with, and their own records."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.train.errors import TrainingError

Record = dict[str, Any]  # a slipstream.json, which may be another version's
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Lineage:
    """Digests of the drafts behind a draft; `records` holds what is known of each, by digest."""

    started_from: str | None = None
    averaged_with: str | None = None
    records: dict[str, Record] = field(default_factory=dict)

    @staticmethod
    def read(started_from: Path | None, averaged_with: Path | None) -> "Lineage":
        """Take down what the folders say of themselves."""
        records: dict[str, Record] = {}
        digests = [None if folder is None else _take(folder, records) for folder in (started_from, averaged_with)]
        return Lineage(digests[0], digests[1], records)


def stages(record: Record) -> list[Record]:
    """Return the records of a draft's training, first stage first, its own last."""
    earlier = record.get("records", {}).get(record.get("started_from"))
    return [*(stages({**earlier, "records": record["records"]}) if earlier else []), record]


def _take(folder: Path, records: dict[str, Record]) -> str:
    """Add a folder's record, and those it carries, under the digest of its weights."""
    draft_spec(open_checkpoint(folder).config, folder, None)  # it must be a draft, said now and not after the data
    digest = weights_digest(folder)
    path = folder / "slipstream.json"
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path}: cannot be read ({error}).") from error
        records.update(content.pop("records", {}))
        records[digest] = content
    return digest


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a folder's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
