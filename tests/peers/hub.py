"""A Hugging Face cache in which every model is the embedded one: other projects' tests find their tokenizers there."""

import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"[\"']([A-Za-z][\w.-]+/[A-Za-z][\w.-]+)[\"']")
_COMMIT = "0" * 40


def names_in(places: Iterable[Path]) -> set[str]:
    """Return everything in Python files that looks like the name of a model."""
    files = (file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    return {name for file in files for name in _NAME.findall(file.read_text(encoding="utf-8"))}


def fill(home: Path, names: Iterable[str], model: Path) -> None:
    """Give each name the tokenizer and configuration of one model."""
    for name in names:
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_COMMIT)
        for file in model.iterdir():
            if file.suffix != ".gguf" and not (snapshot / file.name).exists():
                (snapshot / file.name).symlink_to(file)
