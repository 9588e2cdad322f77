"""`slipstream bench import`: entries of InferenceX's master files as recipes, and what cannot be one by name."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def import_(
    masters: Annotated[list[Path], typer.Argument(metavar="MASTER...", help="InferenceX master YAML files.")],
    key: Annotated[str | None, typer.Option(help="The entry to import; without it, entries are listed.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Import every entry, and count what cannot be.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the recipes.")] = Path(),
    token_range: Annotated[str, typer.Option(help="Token ids for random prompts, FIRST:LAST.")] = "0:32000",
    line: Annotated[
        str | None,
        typer.Option(help="The server's own command line, from its script's log: flags, environment and draft."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The draft, which InferenceX keeps in a script.")] = None,
    draft_precision: Annotated[str, typer.Option(help="The draft's number format.")] = "bf16",
    num_steps: Annotated[int | None, typer.Option(help="Tokens drafted at a time.")] = None,
    draft_tp: Annotated[int | None, typer.Option(help="Devices the draft is split over.")] = None,
    method: Annotated[
        Literal["eagle3"] | None, typer.Option(help="How rows draft that say mtp or draft_model.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Devices of the runner.")] = 8,
) -> None:
    """Turn InferenceX entries into recipes; a row that has no counterpart is named, and none is dropped.

    Examples:
      slipstream bench import amd-master.yaml

      slipstream bench import amd-master.yaml --key kimik2.5-int4-mi355x-sglang

      slipstream bench import *-master.yaml --all --out recipes
    """
    from slipstream.bench.inferencex import Unsaid, import_entry, read_master
    from slipstream.bench.recipe_file import RecipeError, token_ids_between
    from slipstream.bench.server_line import ServerLine, read_server_line
    from slipstream.records.store import write_text

    files = [read_master(path) for path in masters]
    if key is None and not every:
        print("\n".join(name for master in files for name in master.entries))
        return
    said = ServerLine() if line is None else read_server_line(line)
    unsaid = Unsaid(
        token_ids_between(token_range), gpus, draft, draft_precision, num_steps, draft_tp, method=method, line=said
    )
    whole = partly = refused = 0
    for master in files:
        for name in master.entries if key is None else [key]:
            try:
                found = import_entry(master, name, unsaid)
            except RecipeError as error:
                if key is not None:
                    raise
                refused += 1
                typer.echo(f"{master.name}: not imported: {error}", err=True)
                continue
            whole, partly = whole + (not found.left_out), partly + bool(found.left_out)
            for sentence in found.left_out:
                typer.echo(f"{master.name}: {name}: left out: {sentence}", err=True)
            for recipe, text in found.recipes.items():
                path = out / f"{recipe}.yaml" if key is not None else out / Path(master.name).stem / f"{recipe}.yaml"
                write_text(path, text)
                print(path)
    if every:
        print(f"{whole} entries imported whole, {partly} in part (rows above), {refused} refused (sentences above).")
