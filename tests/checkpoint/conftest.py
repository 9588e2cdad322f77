import pytest

from slipstream.checkpoint.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded_folder):
    return Tokenizer.load(embedded_folder)
