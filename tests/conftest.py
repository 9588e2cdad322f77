"""Tiny random models shared by the tests; nothing here is downloaded."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

import interpreted  # noqa: F401  # decides what kernels are, so it comes before any module that has some

torch.set_num_threads(1)

# A commit is held to the same examples wherever it is tested; `pytest --hypothesis-profile explore` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("repeatable")


HOST_ONLY = (
    "test_cpu_", "test_triton_compile", "test_experts", "test_quantized_linear", "test_late_device", "test_load_moe",
    "test_rank", "test_executors_agree",
)  # fmt: skip
"""Files of tests that learn nothing from a GPU: the CPU's kernels and the reference on it, compiling, a stand-in for a
device, files, commands."""
ON_GPU = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu") != "cpu"


class FailuresAtOnce:
    """Names each test as it fails: time on a GPU may end before the tests do, and the summary comes last."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the test and the first line of what went wrong."""
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr if crash is None else crash.message).strip()
            terminal.write_line(
                f"\nFAILED {report.nodeid} ({report.when}): {message.partition(chr(10))[0]}", flush=True
            )


def pytest_configure(config: pytest.Config) -> None:
    """On a GPU say at once what failed; of xdist's processes the one that has the terminal does."""
    if ON_GPU and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, where the tests are to run on a GPU, those that do not use it."""
    return True if ON_GPU and collection_path.name.startswith(HOST_ONLY) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what installs other programs, unless it is asked for."""
    if "interop" not in (config.getoption("-m") or ""):
        skip = pytest.mark.skip(reason="installs another program; run with -m interop")
        for item in items:
            if item.get_closest_marker("interop"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _logs_end_with_the_test() -> Iterator[None]:
    """Undo what a verb has set up for its log: the stream it writes to is closed with the test."""
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    handlers, level, disabled = list(root.handlers), root.level, access.disabled
    yield
    if root.handlers != handlers:
        root.handlers[:] = handlers
        root.setLevel(level)
        access.disabled = disabled


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The team's data folder beside the repository; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this clone")
    return folder


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder, fetched and converted on first use."""
    from slipstream.checkpoint.embedded_folder import embedded_folder

    return embedded_folder()
