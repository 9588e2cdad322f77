"""Progress: a time left that can be believed, bars on a terminal, and a line now and then where there is none."""

import io
import threading

import pytest
from rich.console import Console

from slipstream.cli.progress import Phase, Phases, clock_time
from slipstream.cli.train_display import Display, bars, results_table


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(io.StringIO):
    """A file that says when a line was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            self.told.set()
        return written


def test_the_time_left_follows_the_pace_so_far_once_there_is_one():
    clock = Clock()
    phase = Phase("quantizing", total=400e6, unit="MB", per=1e6, clock=clock)
    assert phase.seconds_left is None
    phase.advance(100e6)
    clock.now += 30
    assert phase.seconds_left == pytest.approx(90)
    assert phase.describe() == "100 of 400 MB, 3.3/s, 0:30, 1:30 left"
    phase.advance(300e6)
    phase.end()
    clock.now += 60
    assert phase.describe() == "400 of 400 MB, 13/s, 0:30"


def test_a_phase_without_a_total_says_how_long_it_has_taken():
    clock = Clock()
    phase = Phase("loading", total=None, clock=clock)
    clock.now += 3700
    assert phase.describe() == "1:01:40"
    assert clock_time(59.6) == "1:00"


def test_where_output_is_no_terminal_a_line_comes_now_and_then_and_one_at_the_end():
    file = Watched()
    with Phases(Console(file=file, width=40), period_s=0.01) as phases:
        phase = phases.start("questions of a long name", 20, "questions")
        phase.advance(5)
        assert file.told.wait(30)
        phase.advance(15)
    lines = file.getvalue().splitlines()
    assert lines[0] == "questions of a long name: 25%, 5 of 20 questions, 0:00"
    assert lines[-1].startswith("questions of a long name: done, 20 of 20 questions")


def test_what_is_quickly_done_says_nothing_into_a_file():
    file = Watched()
    with Phases(Console(file=file)) as phases:
        phases.start("checking", 1.0)
    assert file.getvalue() == ""


def test_on_a_terminal_bars_come_and_go():
    file = io.StringIO()
    with Phases(Console(file=file, force_terminal=True, width=80)) as phases:
        phases.start("answers", 4, "answers").advance(1)
    assert "25%" in file.getvalue() and "1 of 4 answers" in file.getvalue()


def test_a_training_shows_no_speed_before_there_is_one(monkeypatch):
    monkeypatch.setattr("slipstream.cli.train_display._EVERY_S", 0.0)
    file = io.StringIO()
    Display(bars(Console(file=file, width=80))).features(5725)
    assert file.getvalue() == "features: 5,725 of 0 tokens\n"


def test_results_of_a_training_fit_80_columns():
    entry = {"acceptance_length": 1.125, "acceptance_length_without_loops": 1.125, "rates": [0.11, 0.01, 0.0]}
    long = {**entry, "rates": [0.75, 0.5, 0.25, 0.12, 0.06, 0.03]}
    results = {"held-out": {"texts": 16, "loop_share": 0.0, "chains": {"3": entry, "6": long}}}
    file = io.StringIO()
    Console(file=file, width=80).print(results_table("acceptance length", results, {}))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[-2].endswith("75% 50% 25% 12% 6% 3%")
    assert "held-out" in lines[-3] and lines[-3].endswith("11% 1% 0%")
