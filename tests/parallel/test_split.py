"""A checkpoint that cannot be split as asked is refused before a rank is started, with the splits that would do."""

import multiprocessing

import pytest
from typer.testing import CliRunner

import tiny_moe
from parallel import folders
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.cli.main import app
from slipstream.engine.loading import LoadOptions, load
from slipstream.errors import ConfigError
from slipstream.kernels import select
from slipstream.models.split import check_target_split
from slipstream.models.topology import Topology
from tiny import tiny_target
from tiny_moe import CPU


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """INT4 in groups of 16: a rank of two would begin its 24 of 48 columns inside one."""
    base = tmp_path_factory.mktemp("grouped")
    target = folders.write_target(base / "dense", tiny_target(vocab_size=folders.VOCAB, hidden_size=64, head_dim=16))
    return tiny_moe.quantized(target, base / "int4", "int4", 16, "quark", ())


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Experts of 32 columns in one group each: they can be dealt out, but not cut."""
    base = tmp_path_factory.mktemp("experts")
    dense = tiny_moe.save(tiny_moe.deepseek(vocab_size=folders.VOCAB), base / "dense")
    return tiny_moe.quantized(dense, base / "int4", "int4", 32, "compressed-tensors", tiny_moe.EXPERTS_ONLY)


def refusal(folder, *split):
    with pytest.raises(ConfigError) as refused:
        check_target_split(open_checkpoint(folder), Topology(*split), select(CPU, "reference"))
    return str(refused.value)


def test_groups_that_a_rank_would_begin_inside_are_said_before_a_rank_is_started(grouped):
    before = multiprocessing.active_children()  # other tests may have ranks of their own
    line = ["generate", "--model", grouped, "--draft", "none", "--tp", "2", "--raw", "w1"]
    result = CliRunner().invoke(app, [str(word) for word in line])
    assert isinstance(result.exception, ConfigError)
    assert "columns [0, 24) of 48 begin or end inside a stored block of 16" in str(result.exception)
    assert "It cannot be split over any number of ranks: leave --tp out." in str(result.exception)
    assert multiprocessing.active_children() == before


def test_the_advice_names_splits_that_work(experts, dense):
    advice = refusal(experts, 2)
    assert "begin or end inside a stored block of 32" in advice
    assert "--tp 2 --ep 2 or --tp 4 --ep 4, or not at all" in advice
    for split in ((2, 2), (4, 4)):
        check_target_split(open_checkpoint(experts), Topology(*split), select(CPU, "reference"))
    assert "does not divide the target's 4 attention heads. It can be split with --tp 2 or --tp 4" in refusal(
        dense.target, 3
    )


def test_a_draft_that_cannot_be_split_may_stay_whole(dense, tmp_path):
    before = multiprocessing.active_children()
    draft = tiny_moe.quantized(dense.draft, tmp_path / "int4", "int4", 16, "quark", ())
    with pytest.raises(ConfigError, match=r"stored block of 16\. Keep the draft whole, on the first rank"):
        load(LoadOptions(dense.target, draft, device="cpu", topology=Topology(2, draft_tp=2)))
    assert multiprocessing.active_children() == before
