"""`slipstream export`: a draft's folder in the dialect of the engine that shall read it."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    draft: Annotated[str, typer.Argument(help="A draft's folder or hub id; 'embedded' is the one that ships.")],
    dialect: Annotated[
        Literal["sglang", "vllm", "speculators", "gguf"], typer.Option(help="Who shall read it; gguf is llama.cpp's.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder (for gguf, file) to write; it must not exist.")],
    target: Annotated[
        str | None, typer.Option(help="The target: its name for speculators, its folder or .gguf file for gguf.")
    ] = None,
) -> None:
    """Write a draft again for another engine; engines differ in how they name tensors and count captured layers.

    Example:
      slipstream export embedded --dialect vllm --out draft-vllm
      slipstream export DRAFT --dialect gguf --target target.gguf --out draft.gguf
    """
    from slipstream.checkpoint.draft_gguf import write_gguf_draft
    from slipstream.checkpoint.draft_rewrite import rewrite_draft
    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.checkpoint.hub import is_embedded
    from slipstream.checkpoint.reader import open_checkpoint

    source = embedded_draft() if is_embedded(draft) else draft
    if source is None:
        raise typer.BadParameter("This copy of slipstream ships no draft; name a folder.")
    if dialect == "gguf":
        if target is None:
            raise typer.BadParameter("llama.cpp's drafts name their target's layers and words: give --target.")
        write_gguf_draft(open_checkpoint(source), target, out)
    else:
        rewrite_draft(source, dialect, out, target)
    print(f"draft in {dialect}'s dialect: {out}")
