"""The CPU benchmark's arithmetic: what counts as decoding, ratios paired by round."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from peers.arms import decoded
from peers.tables import Point, Results, Turn


def test_prompts_and_stragglers_are_left_out_of_decoding():
    events = [
        (1.0, 0, [7]),  # the first answer begins
        (2.0, 1, [8]),  # from here on both decode
        (2.5, 0, [7, 7]),
        (3.0, 1, [8]),
        (3.0, 0, [7]),  # the first answer has all four of its tokens
        (9.0, 1, [8, 8]),
    ]
    found = decoded(events, num_prompts=2, tokens=4)
    assert found.answers == [[7, 7, 7, 7], [8, 8, 8, 8]]
    assert (found.num_tokens, found.seconds, found.num_passes, found.whole_seconds) == (4, 1.0, 3, 9.0)
    assert found.speed == 4.0


ONE = Point("chat", 1)


def turn(number, arm, speed, program="slipstream", point=ONE):
    return Turn(number, point, arm, program, speed, 1.0, 1.0, 1.0)


def test_ratios_are_paired_within_a_round_so_that_a_slow_round_is_slow_for_both():
    speeds = [(100, 50), (10, 5), (120, 60), (80, 40), (33, 11)]
    turns = [
        item
        for number, (ours, theirs) in enumerate(speeds)
        for item in (turn(number, "slipstream", ours), turn(number, "llama.cpp same file", theirs, "llama"))
    ]
    results = Results(turns, {})
    ratio = results.ratio("slipstream", "llama.cpp same file", Point("chat", 1))
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 3.0)


def test_a_peer_that_is_missing_leaves_no_ratio():
    results = Results([turn(0, "slipstream", 100)], {"slipstream": 200.0})
    assert results.ratio("slipstream", None, Point("chat", 1)) is None
    assert results.table(Point("chat", 1)).row_count == 1


def test_the_best_format_of_a_peer_is_the_fastest_at_that_point():
    one, eight = Point("chat", 1), Point("chat", 8)
    turns = [turn(0, name, speed, "llama", point) for name, point, speed in
             (("a", one, 5), ("b", one, 6), ("a", eight, 9), ("b", eight, 8))]  # fmt: skip
    results = Results(turns, {})
    assert [results.best(results.arms(point, "llama"), point) for point in (one, eight)] == ["b", "a"]
    assert results.ratio("a", "b", eight).median == pytest.approx(9 / 8)
