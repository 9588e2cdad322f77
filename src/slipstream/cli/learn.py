"""`slipstream learn`: the trainer that `slipstream serve --learn` starts beside it; by hand on another machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.cli import options


def learn(
    folder: Annotated[Path, typer.Argument(help="The folder that `slipstream serve --learn` keeps traffic in.")],
    target: Annotated[str, typer.Option(help="The target that is served.")] = "embedded",
    draft: Annotated[str, typer.Option(help="The draft that serving started with.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a round.")] = 240,
    fresh_tokens: Annotated[int, typer.Option(min=1, help="Answer tokens, new ones, before a round begins.")] = 6_000,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; half of the cores by default.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Hold one round on what there is, then end.")] = False,
    device: options.Device = "auto",
) -> None:
    """Adapt a draft to the traffic in a folder; a better one is used by the server that watches it.

    Examples:
      slipstream serve --learn traffic

      slipstream learn traffic --once
    """
    import os

    import torch

    from slipstream.train.run.learner import Learner, LearnSettings
    from slipstream.train.run.world import local_device

    torch.set_num_threads(threads or max(1, (os.cpu_count() or 2) // 2))
    console = Console(markup=False, highlight=False, soft_wrap=True)
    settings = LearnSettings(steps=steps, fresh_tokens=fresh_tokens)
    learner = Learner(folder, target, draft, local_device(device), settings, console.print)
    if once:
        learner.hold_round()
    else:
        learner.run()
