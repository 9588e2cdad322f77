import pytest

from training import tiny_target


@pytest.fixture
def target():
    return tiny_target()
