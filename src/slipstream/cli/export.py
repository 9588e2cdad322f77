"""`slipstream export`: a draft's folder in the dialect of the engine that shall read it."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    draft: Annotated[str, typer.Argument(help="A draft's folder or hub id; 'embedded' is the one that ships.")],
    dialect: Annotated[Literal["sglang", "vllm", "speculators"], typer.Option(help="Who shall read it.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
    target: Annotated[str | None, typer.Option(help="The target's name, for the speculators dialect.")] = None,
) -> None:
    """Write a draft again for another engine; engines differ in how they name tensors and count captured layers.

    Example:
      slipstream export embedded --dialect vllm --out draft-vllm
    """
    from slipstream.checkpoint.draft_rewrite import rewrite_draft
    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.checkpoint.hub import is_embedded

    source = embedded_draft() if is_embedded(draft) else draft
    if source is None:
        raise typer.BadParameter("This copy of slipstream ships no draft; name a folder.")
    rewrite_draft(source, dialect, out, target)
    print(f"draft in {dialect}'s dialect: {out}")
