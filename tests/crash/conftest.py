"""One process that the runs of a session are forks of."""

import pytest

from crash.program import Forks


@pytest.fixture(scope="session")
def forks():
    process = Forks()
    yield process
    process.close()
