"""The first conversion of the embedded model, killed or without room: what is in the cache is whole, or made again."""

import shutil

import pytest

from checkpoint.gguf_samples import write_gguf
from crash.program import Verb, contents, make_read_only, moments, small_disk

pytestmark = pytest.mark.crash
KILLS = 14


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("source") / "model.gguf")


def verb(forks, source, cache):
    return Verb(forks, (str(source), str(cache / "models")), cache, "crash.convert")


@pytest.fixture(scope="module")
def whole(forks, source, tmp_path_factory):
    cache = tmp_path_factory.mktemp("whole") / "cache"
    cache.mkdir()
    ended = verb(forks, source, cache).finish()
    return only_folder(cache), ended.changes


def only_folder(cache):
    [folder] = [path for path in (cache / "models").iterdir() if not path.name.startswith(".")]
    return contents(folder)


def test_killed_at_any_moment_it_is_made_whole_by_the_next_use(forks, source, whole, tmp_path):
    expected, changes = whole
    kills = 0
    for number, (at, after_s) in enumerate(moments(30, changes, KILLS, 0.02)):
        cache = tmp_path / str(number) / "cache"
        cache.mkdir(parents=True)
        kills += verb(forks, source, cache).run(at, after_s).killed
        ended = verb(forks, source, cache).finish()
        assert str(cache / "models") in ended.output
        assert only_folder(cache) == expected, f"killed at change {at} + {after_s:.3f} s"
    assert kills >= 10


def test_without_room_it_is_a_sentence_and_a_read_only_cache_is_used_as_it_is(forks, source, whole, tmp_path):
    expected, changes = whole
    with small_disk(tmp_path / "disk", 4) as cache:
        for at, _ in moments(31, changes - 2, 4, 0.0):
            ended = verb(forks, source, cache).run(at, action="fill")
            assert ended.refused or ended.status == 0, ended.output
            (cache / "hog").unlink(missing_ok=True)
            verb(forks, source, cache).finish()
            assert only_folder(cache) == expected
            shutil.rmtree(cache / "models")
        make_read_only(cache)
        ended = verb(forks, source, cache).run()
        assert ended.refused and "Read-only file system" in ended.output
    with small_disk(tmp_path / "other", 4) as cache:
        verb(forks, source, cache).finish()
        make_read_only(cache)
        verb(forks, source, cache).finish()
        assert only_folder(cache) == expected
