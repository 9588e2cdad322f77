"""Processes and checkpoints that the tests of a session share."""

import pytest

from parallel import folders
from parallel.ranks_at_work import RanksAtWork


@pytest.fixture(scope="session")
def at_work(tmp_path_factory):
    ranks = RanksAtWork(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """A Llama-class target with a draft that guesses well."""
    return folders.write_pair(tmp_path_factory.mktemp("dense"))
