"""`slipstream recipes`: the recipes that come with slipstream, and a copy of them to run and change."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ConfigError

app = typer.Typer(invoke_without_command=True)
_PAGE = re.compile(r"docs/[\w/-]+\.md")


@app.callback()
def recipes(context: typer.Context) -> None:
    """List the recipes that come with slipstream; `slipstream recipes copy` writes them here.

    Example:
      slipstream recipes
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "about", box=None, pad_edge=False)
    for name, path in _found().items():
        table.add_row(name, _about(path))
    console = Console()
    console.print(table)
    console.print("\nslipstream recipes copy NAME", style="bold", highlight=False)


@app.command()
def copy(
    name: Annotated[str | None, typer.Argument(help="A recipe's name; all of them if left out.")] = None,
    to: Annotated[Path, typer.Argument(help="Folder to write recipes/ and docs/ into.")] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")] = False,
) -> None:
    """Copy a recipe with the prompts and pages it names, laid out as in the documentation's commands.

    Example:
      slipstream recipes copy bench/embedded

      slipstream bench run recipes/bench/embedded.yaml
    """
    found = _found()
    if name is not None and name not in found:
        raise ConfigError(f"There is no recipe named {name}; there are {', '.join(found)}.")
    wanted = found.values() if name is None else [found[name]]
    files = sorted({path for recipe in wanted for path in _with_what_it_names(recipe)})
    targets = {path: to / path.relative_to(_top()) for path in files}
    if not overwrite and (there := [str(path) for path in targets.values() if path.exists()]):
        raise ConfigError(f"{there[0]}: is already there. Name another folder, or give --overwrite.")
    for path, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for recipe in wanted:
        print(targets[recipe])


def _top() -> Path:
    """Return the folder that holds recipes/ and docs/: in the package where it was installed, else the clone's top."""
    package = Path(__file__).parents[1]
    return package if (package / "recipes").is_dir() else package.parents[1]


def _found() -> dict[str, Path]:
    folder = _top() / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*.yaml"))}


def _with_what_it_names(recipe: Path) -> Iterator[Path]:
    """Yield a recipe, what lies beside it and is no recipe (prompts, a README), and the pages they name."""
    beside = [path for path in recipe.parent.rglob("*") if path.is_file()]
    files = [recipe, *(path for path in beside if path.parent != recipe.parent or path.suffix != ".yaml")]
    yield from files
    for path in files:
        for page in _PAGE.findall(path.read_text(encoding="utf-8")):
            if (_top() / page).is_file():
                yield _top() / page


def _about(recipe: Path) -> str:
    """Return the first sentence of the comment a recipe opens with."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    opening = [line.removeprefix("#").strip() for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")]]
    return re.split(r"(?<=[.:])\s", " ".join(opening))[0].rstrip(":")
