"""`slipstream quantize` killed, or its disk full: its folder is whole or not there, and a rerun has the same bytes."""

import pytest

from crash.program import Verb, contents, make_read_only, moments, small_disk
from quant.folders import draft_tensors, write_folder
from slipstream.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.crash
KILLS = 12


def verb(forks, source, watch, *more):
    return Verb(forks, ("quantize", str(source), "--scheme", "ptpc_fp8", "--out", str(watch / "q"), *more), watch)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "model", draft_tensors(), shards=4)


@pytest.fixture(scope="module")
def whole(forks, source, tmp_path_factory):
    watch = tmp_path_factory.mktemp("whole") / "watch"
    watch.mkdir()
    ended = verb(forks, source, watch).finish()
    return contents(watch / "q"), ended.changes


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_killed_at_any_moment_it_leaves_all_or_nothing_and_is_taken_up(forks, source, whole, tmp_path):
    expected, changes = whole
    kills = 0
    for number, (at, after_s) in enumerate(moments(20, changes, KILLS, 0.02)):
        watch = tmp_path / str(number) / "watch"
        watch.mkdir(parents=True)
        kills += verb(forks, source, watch).run(at, after_s).killed
        if visible(watch):
            assert contents(watch / "q") == expected, f"killed at change {at} + {after_s:.3f} s"
            open_checkpoint(watch / "q")
        else:
            verb(forks, source, watch).finish()
        assert contents(watch / "q") == expected
        assert [path.name for path in watch.iterdir()] == ["q"], "nothing is left behind"
    assert kills >= 10


def test_killed_while_it_replaces_a_folder_the_old_or_the_new_one_is_there_after_a_rerun(
    forks, source, whole, tmp_path
):
    expected, changes = whole
    for number, at in enumerate(range(changes - 6, changes + 6)):
        watch = tmp_path / str(number) / "watch"
        watch.mkdir(parents=True)
        verb(forks, source, watch).finish()
        before = contents(watch / "q")
        ended = verb(forks, source, watch, "--overwrite").run(at)
        if visible(watch):
            assert contents(watch / "q") in (before, expected)
        verb(forks, source, watch, "--overwrite").finish()
        assert contents(watch / "q") == expected
        assert [path.name for path in watch.iterdir()] == ["q"], f"killed at change {at}"
        if not ended.killed:
            break


def test_a_disk_that_fills_is_a_sentence_and_a_rerun_has_the_same_bytes(forks, source, whole, tmp_path):
    expected, changes = whole
    with small_disk(tmp_path / "disk", 80) as disk:
        for at, _ in moments(21, changes - 2, 3, 0.0):
            ended = verb(forks, source, disk).run(at, action="fill")
            assert ended.refused or ended.status == 0, ended.output
            assert not visible(disk) or set(visible(disk)) <= {"hog", "q"}
            if (disk / "q").exists():
                assert contents(disk / "q") == expected
            (disk / "hog").unlink(missing_ok=True)
            verb(forks, source, disk, "--overwrite").finish()
            assert contents(disk / "q") == expected
        make_read_only(disk)
        ended = verb(forks, source, disk, "--overwrite").run()
        assert ended.refused and "Read-only file system" in ended.output
        assert contents(disk / "q") == expected
