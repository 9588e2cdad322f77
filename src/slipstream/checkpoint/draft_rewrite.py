"""Writes a draft's folder again for another engine: its names and config.json in that engine's dialect."""

from pathlib import Path

from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.draft_export import DraftDialect, DraftOrigin, draft_config
from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.files import find_file, read_json
from slipstream.checkpoint.names import canonical_draft_name, canonical_names, draft_name
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.errors import CheckpointError

_KEPT_FILES = ("slipstream.json", "README.md")


def rewrite_draft(source: str | Path, dialect: DraftDialect, folder: Path, target: str | None = None) -> None:
    """Write the draft at `source` to a new folder that the named engine reads right; the weights stay the same bits.

    Args:
        source: a draft's folder or hub id, in any dialect.
        target: the target's name, which the speculators dialect records, with its architecture if it is a folder here.
    """
    opened = open_checkpoint(source)
    if any(key in opened.config for key in ("quantization_config", "compression_config")):
        raise CheckpointError(
            f"{source}: is quantized, and its scheme names tensors as they are. Export the draft first, then quantize."
        )
    spec = draft_spec(opened.config, opened.folder, None)
    origin = None if target is None else DraftOrigin(target, _architecture(target))
    with CheckpointWriter(folder) as writer:
        for ours, theirs in canonical_names(opened.names(), canonical_draft_name).items():
            writer.add(draft_name(ours, dialect), opened.tensor(theirs))
        writer.write_json("config.json", draft_config(spec, dialect, origin))
        for name in _KEPT_FILES:
            if (path := find_file(opened.folder, name)) is not None:
                writer.copy_file(path)


def _architecture(target: str) -> str | None:
    path = Path(target) / "config.json"
    return next(iter(Fields(read_json(path), path).texts("architectures")), None) if path.is_file() else None
