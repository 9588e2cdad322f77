"""The time a sweep still takes is told from the points most like those to come."""

from pathlib import Path

import pytest

from slipstream.bench.estimate import TimeLeft, in_words
from slipstream.bench.plan import build_plan
from slipstream.bench.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parents[2]

POINTS = list(build_plan(load_recipe(ROOT / "recipes/bench/embedded.yaml")).points())


def test_nothing_is_known_before_the_first_point():
    assert TimeLeft(POINTS).seconds() is None


def test_points_of_the_same_load_are_expected_to_take_as_long():
    left = TimeLeft(POINTS)
    first = POINTS[0]
    alike = [p for p in POINTS if (p.key.workload, p.key.concurrency) == (first.key.workload, first.key.concurrency)]
    only = TimeLeft(alike)
    only.measured(first.key, 10.0)
    assert only.seconds() == pytest.approx(10.0 * (len(alike) - 1))
    left.measured(first.key, 10.0)
    assert left.seconds() > only.seconds()


def test_nothing_is_left_once_all_are_measured():
    left = TimeLeft(POINTS)
    for point in POINTS:
        left.measured(point.key, 3.0)
    assert left.seconds() == 0


def test_times_are_written_for_people():
    assert [in_words(s) for s in (4.2, 119, 600, 9000)] == ["4 s", "119 s", "10 min", "2.5 h"]
