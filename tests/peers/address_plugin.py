"""Writes down how tests went that take a server's address; a pytest plugin for the other project's Python."""

from pathlib import Path
from typing import Any

from record import Recorder


def pytest_addoption(parser: Any) -> None:
    """Take where the outcomes go."""
    parser.getgroup("slipstream").addoption("--slipstream-out", type=Path)


def pytest_configure(config: Any) -> None:
    """Record."""
    config.pluginmanager.register(Recorder(config.getoption("--slipstream-out"), {}))
