"""Processes and checkpoints that the tests of a session share."""

import pytest

import tiny_moe
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


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory):
    """Latent attention and experts, one of them shared, after a dense block."""
    return tiny_moe.save(tiny_moe.deepseek(vocab_size=folders.VOCAB), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="session")
def minimax(tmp_path_factory):
    """Experts in every block, and norms over all heads; the heads are those four ranks can split."""
    changes = {"vocab_size": folders.VOCAB, "num_attention_heads": 8}
    return tiny_moe.save(tiny_moe.minimax(**changes), tmp_path_factory.mktemp("minimax"))
