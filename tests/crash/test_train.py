"""`slipstream train` killed over and over, or without room: it goes on to the very draft of an undisturbed run."""

import json

import pytest
import yaml

from crash.program import Verb, contents, moments, small_disk
from slipstream.checkpoint.reader import open_checkpoint
from training import RECIPE, write_target_folder

pytestmark = pytest.mark.crash
KILLS = 12
SETTINGS = {"train": {**RECIPE["train"], "steps": 24, "log_every": 4, "eval_every": 8}}
WEIGHTS = (".safetensors", "config.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_target_folder(folder / "target")
    for name, numbers in (("train", range(40)), ("test", range(50, 58))):
        lines = [json.dumps({"question": f"How many is {i} and {i + 1}?"}) for i in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **SETTINGS}))
    return folder


def verb(forks, inputs, watch):
    fixed = ("train", str(inputs / "target"), "--recipe", str(inputs / "recipe.yaml"), "--data", str(inputs))
    return Verb(forks, (*fixed, "--device", "cpu", "--out", str(watch / "draft")), watch)


def weights(folder):
    return {name: data for name, data in contents(folder).items() if name.endswith(WEIGHTS)}


@pytest.fixture(scope="module")
def whole(forks, inputs, tmp_path_factory):
    watch = tmp_path_factory.mktemp("whole") / "watch"
    watch.mkdir()
    ended = verb(forks, inputs, watch).finish()
    return weights(watch / "draft"), ended.changes


def test_killed_a_dozen_times_on_its_way_it_ends_with_the_same_weights(forks, inputs, whole, tmp_path):
    expected, changes = whole
    watch = tmp_path / "watch"
    watch.mkdir()
    kills = 0
    # Each run goes on where the last was killed, so each gets a share of the way.
    for at, after_s in moments(40, max(2, changes // 4), KILLS, 0.3):
        kills += verb(forks, inputs, watch).run(at, after_s).killed
        if (watch / "draft").exists():
            open_checkpoint(watch / "draft")
    ended = verb(forks, inputs, watch).finish()
    assert weights(watch / "draft") == expected, ended.output
    assert not [path.name for path in watch.iterdir() if path.name.endswith((".partial", ".previous"))]
    assert kills >= 10


def test_a_disk_that_fills_is_a_sentence_and_the_run_goes_on_when_there_is_room(forks, inputs, whole, tmp_path):
    expected, changes = whole
    with small_disk(tmp_path / "disk", 24) as disk:
        for at, _ in moments(41, changes // 2, 3, 0.0):
            ended = verb(forks, inputs, disk).run(at, action="fill")
            assert ended.refused or ended.status == 0, ended.output
            (disk / "hog").unlink(missing_ok=True)
        verb(forks, inputs, disk).finish()
        assert weights(disk / "draft") == expected
