"""One running server for the tests of a module."""

from collections.abc import Iterator

import httpx
import pytest
from tiny_server import Running, tiny_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(tiny_engine()) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
    server.wait_idle()
