"""Runs SGLang's own server tests against ours: a pytest plugin for its Python that replaces the launcher only.

SGLang's package is imported for its clients, constants and test cases. Two things let it be imported on any machine:
torchvision is stubbed, and model types that the installed transformers has already may be registered again.
"""

import importlib
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import stubs
from launcher import launcher_for
from record import Recorder
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.import_utils import is_torchvision_available


def pytest_addoption(parser: Any) -> None:
    """Take where our server is and where the outcomes go."""
    group = parser.getgroup("slipstream")
    group.addoption("--slipstream-python")
    group.addoption("--slipstream-source")
    group.addoption("--slipstream-out", type=Path)


def pytest_configure(config: Any) -> None:
    """Replace the launcher."""
    sys.path.insert(0, str(config.rootpath / "python"))
    sys.path.insert(0, str(config.rootpath / "test" / "registered"))
    let_sglang_be_imported()
    theirs: Any = importlib.import_module("sglang.test.test_utils")
    out: Path = config.getoption("--slipstream-out")
    launcher = launcher_for(
        config.getoption("--slipstream-python"), config.getoption("--slipstream-source"), out.with_suffix(".log")
    )

    def popen_launch_server(
        model: str, base_url: str, timeout: float = 0, api_key: str | None = None, other_args: Any = None, **_: Any
    ) -> Any:
        flags = [str(part) for part in other_args or ()] + ([] if api_key is None else ["--api-key", api_key])
        flags += [] if "--page-size" in flags else ["--page-size", "1"]  # SGLang's default
        return launcher.process(model, flags, urlsplit(base_url).port)

    theirs.popen_launch_server = popen_launch_server
    config.pluginmanager.register(Recorder(out, {"dropped_flags": launcher.dropped}))
    config.add_cleanup(launcher.stop)


def let_sglang_be_imported() -> None:
    """Put up with a machine that has no GPU, and with a newer transformers."""
    is_torchvision_available()  # remembered: transformers goes on to know that it is absent
    stubs.install("torchvision")
    register = type(CONFIG_MAPPING).register
    type(CONFIG_MAPPING).register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
