"""Other programs, installed on demand: only when asked for with `-m interop`."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "interop" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="installs another program; run with -m interop")
    for item in items:
        if "tests/interop/" in item.nodeid:
            item.add_marker(skip)
