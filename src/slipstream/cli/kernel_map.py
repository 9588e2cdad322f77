"""`slipstream doctor --kernels`: which kernel carries which operation of a pass, from the dispatch code itself."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.checkpoint.spec import ModelSpec
    from slipstream.kernels.triton.record import Recorded

BATCHES = ((1, 1), (1, 4), (8, 1), (8, 4), (12, 6), (40, 1), (40, 4), (1, 512))
"""Requests and query tokens of each: decoding, chains of three drafted tokens, trees, a chunk of a prompt."""
_OPERATIONS = ("gemm", "attention", "mla", "moe", "norm", "rope", "gather")


def print_kernel_map(architecture: str | None, model: str | None, batch: str | None, max_keys: int) -> None:
    """Print the kernels of a pass for several batches, or for one ("12x6" is 12 requests of 6 nodes)."""
    console = Console()
    architecture = architecture or _here()
    spec, title = _spec(model)
    batches = BATCHES if batch is None else (_batch(batch),)
    table = Table(title=f"{title} on {architecture}, up to {max_keys:,} keys", title_justify="left")
    table.add_column("requests x nodes", style="bold")
    table.add_column("weights")
    table.add_column("kernels of two blocks and the head, by operation", overflow="fold")
    from slipstream.models.fused.survey import Workload, record_pass

    for requests, nodes in batches:
        for weights, name in (("dense", "BF16"), ("fp8_per_channel", "FP8")):
            launches = record_pass(spec, architecture, Workload(requests, nodes, max_keys), weights)
            table.add_row(f"{requests} x {nodes}", name, _summary(launches))
    console.print(table)
    console.print("What each does, and why: docs/kernels.md.")


def _summary(launches: "list[Recorded]") -> str:
    """Return the modules that launched, by operation, with how often."""
    lines = []
    for operation in _OPERATIONS:
        names = Counter(
            launch.module.removeprefix("triton.")
            for launch in launches
            if launch.module.removeprefix("triton.").partition(".")[0] == operation
        )
        if names:
            parts = (f"{name.removeprefix(operation + '.')} {count}" for name, count in names.items())
            lines.append(f"{operation}: {', '.join(parts)}")
    return "\n".join(lines)


def _batch(text: str) -> tuple[int, int]:
    requests, _, nodes = text.partition("x")
    if not (requests.isdigit() and nodes.isdigit() and int(requests) and int(nodes)):
        raise ConfigError(f"--batch {text}: write requests x nodes, as in 12x6.")
    return int(requests), int(nodes)


def _here() -> str:
    import torch

    from slipstream.kernels.triton.tuning import architecture_of

    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here; name one with --arch, as in --arch sm_90.")
    return architecture_of(torch.device("cuda"))


def _spec(model: str | None) -> "tuple[ModelSpec, str]":
    from slipstream.checkpoint.spec import ModelSpec, RopeSpec

    if model is None:
        shape = (128256, 4096, 14336, 32, 32, 8, 128, 1e-5, RopeSpec(500000.0, 128), 131072, False)
        return ModelSpec("LlamaForCausalLM", *shape), "Llama-3.1-8B"
    import json
    from pathlib import Path

    from slipstream.checkpoint.config import model_spec

    file = Path(model) / "config.json"
    if not file.is_file():
        raise ConfigError(f"--model {model}: there is no config.json there; name the folder of a checkpoint.")
    return model_spec(json.loads(file.read_text(encoding="utf-8")), file), model
