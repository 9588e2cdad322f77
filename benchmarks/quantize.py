"""Time and memory of `slipstream quantize` beside amd-quark 0.13's file-to-file pass, on the same files in one run.

    python benchmarks/quantize.py        # installs amd-quark into an environment of its own

Each measurement is a process of its own: wall and CPU seconds are the whole process's, "work" is the wall time less
the imports, and peak memory is the process's maximum resident size less that of a process that imports torch.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
QUARK = ("amd-quark==0.13", "transformers", "accelerate", "ninja")
SCHEMES = {"ptpc_fp8": "ptpc_fp8", "int4": "int4_wo_per_channel", "mxfp4": "mxfp4"}

# The kernel's count for a child begins with its parent's size, so each process reports its own.
PEAK = """
import atexit, re, sys
status = lambda: open("/proc/self/status").read()
atexit.register(lambda: print("peak", re.search(r"VmHWM:\\s+(\\d+)", status())[1], file=sys.stderr))
"""
OURS = """
import time; begun = time.perf_counter()
import sys, torch, typer
from slipstream.cli.quantize import quantize
import slipstream.quant.quantize
print("imported", time.perf_counter() - begun, file=sys.stderr)
typer.run(quantize)
"""
THEIRS = """
import time; begun = time.perf_counter()
import sys
from quark.torch import LLMTemplate, ModelQuantizer
print("imported", time.perf_counter() - begun, file=sys.stderr)
source, out, scheme = sys.argv[1:]
config = LLMTemplate.get("llama").get_config(scheme=scheme, exclude_layers=["fc", "lm_head", "embed_tokens", "*norm"])
ModelQuantizer(config).direct_quantize_checkpoint(source, out, device="cpu")
"""


@dataclass(frozen=True)
class Measured:
    """One process's cost."""

    wall_s: float
    work_s: float
    cpu_s: float
    peak_mib: float


def main() -> None:
    """Build checkpoints, measure both tools, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--folder", type=Path, help="keep checkpoints and Quark here (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-quantize-") as temporary:
        console = Console(width=130)
        console.print(_table(args.folder or Path(temporary), args.schemes))


def _table(folder: Path, schemes: list[str]) -> Table:
    sources = [_once(folder / name, build) for name, build in (("single", _single), ("shards", _shards))]
    quark, out = _quark_python(folder / "quark-venv"), folder / "out"
    baseline = _measure([sys.executable, "-c", f"{PEAK}import torch"], out).peak_mib
    table = Table(title=f"{os.cpu_count()} cores, torch {torch.__version__}; seconds, MiB above `import torch`")
    for column in ("checkpoint", "scheme", "tool", "wall", "work", "CPU", "MB/s", "peak", "wall less", "work less"):
        table.add_column(column, justify="left" if column in ("checkpoint", "scheme", "tool") else "right")
    for source, scheme in itertools.product(sources, schemes):
        megabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e6
        _warm(source)
        theirs = _measure([quark, "-c", PEAK + THEIRS, source, out, SCHEMES[scheme]], out)
        ours = [sys.executable, "-c", PEAK + OURS, source, "--scheme", scheme, "--out", out]
        costs = {
            "slipstream best": _measure(ours, out),
            "slipstream quark": _measure([*ours, "--exact", "quark"], out),
            "amd-quark 0.13": theirs,
        }
        for tool, cost in costs.items():
            less = (f"{theirs.wall_s / cost.wall_s:.1f}x", f"{theirs.work_s / cost.work_s:.1f}x")
            numbers = (
                f"{cost.wall_s:.1f}",
                f"{cost.work_s:.1f}",
                f"{cost.cpu_s:.1f}",
                f"{megabytes / cost.work_s:.0f}",
            )
            table.add_row(source.name, scheme, tool, *numbers, f"{cost.peak_mib - baseline:.0f}", *less)
        table.add_section()
    return table


def _single(folder: Path) -> None:
    """Write one file of 2.5 GB, half of it an embedding and a head that stay, like a draft of a large model."""
    width, inner = 5120, 20480
    weights = {"embed_tokens": (80_000, width), "fc": (width, 3 * width), "lm_head": (32_000, width)}
    for block in ("midlayer", "layers.1"):
        weights |= {f"{block}.mlp.gate_proj": (inner, width), f"{block}.mlp.up_proj": (inner, width)}
    weights |= {"midlayer.mlp.down_proj": (width, inner), "midlayer.self_attn.q_proj": (width, 2 * width)}
    save_file(_normal(weights), folder / "model.safetensors", {"format": "pt"})
    _write_config(folder)


def _shards(folder: Path) -> None:
    """Write four files of 500 MB, every tensor a layer to quantize, like a target."""
    weight_map = {}
    for i in range(4):
        file = f"model-{i + 1:05d}-of-00004.safetensors"
        block = f"model.layers.{i}"
        weights = {f"{block}.mlp.{name}_proj": (14336, 4096) for name in ("gate", "up")}
        weights |= {f"{block}.mlp.down_proj": (4096, 14336)}
        weights |= {f"{block}.self_attn.{name}_proj": (4096, 4096) for name in ("q", "k", "v", "o")}
        tensors = _normal(weights)
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_config(folder)


def _normal(weights: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    pool = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors = {}
    for i, (name, (rows, columns)) in enumerate(weights.items()):
        repeats = -(-rows * columns // pool.numel())
        tensors[f"{name}.weight"] = pool.roll(i * 977).repeat(repeats)[: rows * columns].view(rows, columns).clone()
    return tensors


def _write_config(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def _once(folder: Path, build: Callable[[Path], None]) -> Path:
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        build(partial)
        partial.rename(folder)
    return folder


def _quark_python(venv: Path) -> Path:
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        constraints = ROOT / "constraints.txt"
        for packages in (("torch",), QUARK):
            subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, *packages], check=True)
        # Its first import compiles an extension; that is not measured.
        environment = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        subprocess.run([python, "-c", "import quark.torch"], check=True, env=environment, capture_output=True)
    return python


def _measure(command: list[str | Path], out: Path) -> Measured:
    """Run a command that writes `out`, which is removed before and after."""
    shutil.rmtree(out, ignore_errors=True)
    interpreter = Path(command[0]).parent
    environment = {
        **os.environ,
        "PATH": f"{interpreter}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src") if command[0] == sys.executable else "",
    }
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read()
    if process.returncode:
        sys.exit(f"{command[0]} failed:\n{text[-2000:]}")
    shutil.rmtree(out, ignore_errors=True)
    told = dict(re.findall(r"^(imported|peak) ([\d.]+)$", text, re.MULTILINE))
    work_s = wall_s - float(told.get("imported", 0.0))
    return Measured(wall_s, work_s, usage.ru_utime + usage.ru_stime, float(told["peak"]) / 1024)


def _warm(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


if __name__ == "__main__":
    main()
