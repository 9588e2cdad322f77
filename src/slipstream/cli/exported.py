"""A draft as another engine reads it: written once in its dialect, and kept."""

import logging
from pathlib import Path

from slipstream.checkpoint.dflash_config import block_size
from slipstream.checkpoint.draft_config import is_dflash
from slipstream.checkpoint.draft_export import DraftDialect
from slipstream.checkpoint.draft_rewrite import rewrite_draft
from slipstream.checkpoint.hub import resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import FolderExistsError
from slipstream.errors import CheckpointError
from slipstream.records.store import sha256_of

_log = logging.getLogger(__name__)


def exported_draft(source: str | Path, dialect: DraftDialect, folder: Path) -> Path:
    """Return the draft in a dialect, written into `folder` on the first call for its files as they are."""
    found = resolve(source).resolve()
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found.iterdir())]
    made = folder / f"{found.name}-{sha256_of([str(found), files])[:12]}-{dialect}"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rewrite_draft(found, dialect, made)
        except FolderExistsError:
            return made  # another process was quicker
    return made


def tokens_of_block(source: str) -> int | None:
    """Return how many tokens a DFlash draft fills at once, the known one included; None for any other draft."""
    opened = open_checkpoint(source)
    return block_size(opened.config, opened.folder) if is_dflash(opened.config) else None


def draft_for(engine: DraftDialect, source: str, folder: Path) -> str:
    """Return what an engine is given as its draft: an export, or the draft itself where none can be written of it.

    Quantized drafts and drafts with latent attention are published in the form their engines read.
    """
    try:
        return str(exported_draft(source, engine, folder))
    except CheckpointError as error:
        _log.warning("the draft goes to %s as it is: %s", engine, error)
        return str(Path(source).resolve()) if Path(source).exists() else source
