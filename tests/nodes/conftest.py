"""What the tests over several machines share."""

import pytest

from tests.nodes.namespaces import two_machines
from tests.parallel import folders


@pytest.fixture
def machines():
    with two_machines() as made:
        yield made


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A tiny target and a draft that guesses well."""
    return folders.write_pair(tmp_path_factory.mktemp("pair"))
