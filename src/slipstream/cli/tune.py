"""`slipstream tune`: tiles for a model on the GPU at hand, into the user's cache."""

from typing import Annotated, Literal

import typer

from slipstream.cli import options
from slipstream.errors import ConfigError

_SECONDS_EACH = 0.05  # that a candidate is timed: there are hundreds


def tune(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id, or 'embedded': its shapes are used.")],
    weights: Annotated[
        Literal["dense", "fp8_per_channel"], typer.Option(help="How the blocks' weights are stored: BF16 or FP8.")
    ] = "dense",
    seconds: Annotated[float, typer.Option(min=1, help="Try nothing more after so long.")] = 150,
    device: Annotated[str, typer.Option(help="The GPU: cuda or cuda:N.")] = "cuda",
) -> None:
    """Try tiles for a model's GEMMs and attention on this GPU, and keep those that are faster.

    Only tiles that change no bits are tried, and the logits are compared all the same. Weights are random.
    What is found goes to the cache, where every later start reads it; `slipstream cache clear tuning` undoes it.

    Example:
      slipstream tune path/to/checkpoint --weights fp8_per_channel
    """
    import time

    import torch
    from rich.console import Console

    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here to tune for: run `slipstream tune` on the machine that has it.")
    from slipstream.checkpoint.config import model_spec
    from slipstream.checkpoint.reader import open_checkpoint
    from slipstream.kernels.triton.tuning import (
        architecture_of,
        check_architecture,
        read_tuning,
        tuned_file,
        write_tuned,
    )
    from slipstream.measure.rank import measured_ms
    from slipstream.measure.tune import Search, Subject
    from slipstream.measure.tune import tune as find_tiles

    console, began = Console(markup=False), time.monotonic()
    where = torch.device(device)
    check_architecture(architecture_of(where))
    options.fetch_if_embedded(model, Console(stderr=True))
    source = open_checkpoint(model)
    shipped, path = read_tuning(architecture_of(where)), tuned_file(where)
    search = Search(
        lambda step: measured_ms(step, where, _SECONDS_EACH),
        lambda: time.monotonic() - began > seconds,
        lambda line: console.print(line, highlight=False),
    )
    found = find_tiles(Subject(model_spec(source.config, source.folder), weights, where), shipped, search)
    if found == shipped:
        console.print("What ships is as fast as anything tried; nothing was written.")
        return
    write_tuned(path, shipped, found)
    console.print(f"{path}: written in {time.monotonic() - began:.0f} s")
