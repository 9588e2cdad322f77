"""Tiny random models shared by the tests; nothing here is downloaded."""

import os
import sys
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


HOST_ONLY = ("test_cpu_", "test_triton_compile", "test_late_device", "test_load_moe", "test_rank")
"""Files of tests that learn nothing from a GPU: CPU kernels, compiling, a stand-in for a device, files, commands."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, where the tests are to run on a GPU, those that do not use it."""
    on_gpu = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu") != "cpu"
    return True if on_gpu and collection_path.name.startswith(HOST_ONLY) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what installs other programs, unless it is asked for."""
    if "interop" not in (config.getoption("-m") or ""):
        skip = pytest.mark.skip(reason="installs another program; run with -m interop")
        for item in items:
            if item.get_closest_marker("interop"):
                item.add_marker(skip)


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
    from slipstream.checkpoint.embedded import embedded_model

    return embedded_model()
