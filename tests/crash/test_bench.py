"""`slipstream bench run` killed or without room: a point is measured once and whole, and what was finished is kept."""

import json
import sys
from pathlib import Path

import pytest

from crash.program import Verb, make_read_only, moments, small_disk
from ports import free_port
from slipstream.records.store import read_records

pytestmark = pytest.mark.crash
KILLS = 14
FAKE = Path(__file__).parents[1] / "bench" / "fake_server.py"
SEEDS = [1, 2, 3, 4]


def write_recipe(folder):
    """Write a recipe of eight points on a server that answers at once, and that the sweep itself starts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.json").write_text(json.dumps({"ttft_s": 0.002, "step_s": 0.0005}))
    program = [sys.executable, str(FAKE), "serve"]
    recipe = {
        "name": "crash",
        "about": "test",
        "machine": {"name": "here", "gpus": 0},
        "target": {"id": "fake", "context": 4096, "token_range": [10, 100]},
        "drafts": {},
        "servers": {"vllm": {"port": free_port(num=16), "program": program, "start_timeout_s": 60}},
        "baseline": "plain",
        "arms": {"plain": {"flags": {"behaviour": str(folder / "plain.json")}}},
        "workloads": {"w": {"kind": "random", "input_tokens": 16, "output_tokens": 8}},
        "concurrency": [1, 2],
        "seeds": SEEDS,
        "traffic": {"requests_per_stream": 4, "warmups_per_stream": 0, "timeout_s": 10.0},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def verb(forks, recipe, watch):
    return Verb(forks, ("bench", "run", str(recipe), "--out", str(watch / "out")), watch)


def records(watch):
    """Return the bytes of each point's record, all of which are whole and valid."""
    folder = watch / "out" / "points"
    files = [] if not folder.exists() else [p for p in folder.iterdir() if not p.name.startswith(".")]
    for point in read_records(files).points:
        assert point.status == "valid", point.reasons
    return {path.name: path.read_bytes() for path in files}


def test_killed_over_and_over_it_keeps_what_was_measured_and_measures_the_rest(forks, tmp_path):
    recipe = write_recipe(tmp_path / "recipe")
    whole = tmp_path / "whole" / "watch"
    whole.mkdir(parents=True)
    changes = verb(forks, recipe, whole).finish().changes
    assert len(records(whole)) == 2 * len(SEEDS)
    kills, watch = 0, tmp_path / "0" / "watch"
    watch.mkdir(parents=True)
    for number, (at, after_s) in enumerate(moments(50, changes // 2, KILLS, 0.05)):
        before = records(watch)
        kills += verb(forks, recipe, watch).run(at, after_s).killed
        after = records(watch)
        assert {name: after.get(name) for name in before} == before, "a finished point was taken again"
        if len(after) == 2 * len(SEEDS):  # all is measured: begin again
            watch = tmp_path / str(number + 1) / "watch"
            watch.mkdir(parents=True)
    before = records(watch)
    verb(forks, recipe, watch).finish()
    after = records(watch)
    assert after.keys() == records(whole).keys()
    assert {name: after[name] for name in before} == before
    assert kills >= 10


def test_without_room_it_is_a_sentence_and_goes_on_when_there_is_some(forks, tmp_path):
    recipe = write_recipe(tmp_path / "recipe")
    with small_disk(tmp_path / "disk", 2) as disk:
        for at, _ in moments(51, 12, 3, 0.0):
            before = records(disk)
            ended = verb(forks, recipe, disk).run(at, action="fill")
            assert ended.refused or ended.status == 0, ended.output
            assert records(disk).items() >= before.items()
            (disk / "hog").unlink(missing_ok=True)
        verb(forks, recipe, disk).finish()
        done = records(disk)
        assert len(done) == 2 * len(SEEDS)
        make_read_only(disk)
        verb(forks, recipe, disk).finish()  # nothing is left to measure
        assert records(disk) == done
