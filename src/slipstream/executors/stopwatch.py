"""What the parts of a step take: moments on the device's time line, read once the device is past them.

A GPU's moments are events in its stream, so marking one neither waits nor makes anything else wait.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.executors.interface import DecodePass, Phase, StepOutput
from slipstream.executors.rows import Row


class Lap:
    """One step's times, from its launch until they can be read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Phase | None, Any]] = []
        self._passes: list[DecodePass] = []
        self._num_passes = self._num_rows = self._num_tokens = self._num_emitted = 0
        self._told: Callable[[float, float], None] | None = None

    @property
    def over(self) -> bool:
        """Whether the device is past the last mark."""
        return not self._on_gpu or not self._marks or bool(self._marks[-1][1].query())

    def wait(self) -> None:
        """Wait until it is over."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()

    def mark(self, phase: Phase | None) -> None:
        """Say that what is launched from here on belongs to a phase; None ends the last one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Count what is launched within to a phase."""
        self.mark(phase)
        yield
        self.mark(None)

    def begin_pass(self, rows: Sequence[Row], told: Callable[[float, float], None] | None = None) -> None:
        """Take note of a pass that verifies for these rows, and for nobody else, as their text stands.

        Args:
            told: hears the mean length of their texts, and the seconds of the pass with its drafts, once that is known.
        """
        self._told = told
        self._num_passes += 1
        self._num_rows, self._num_tokens = len(rows), sum(len(row.tokens) for row in rows)

    def end_pass(self, num_emitted: int) -> None:
        """Take note of how many tokens the pass gave."""
        self._num_emitted += num_emitted

    def add_pass(self, decoded: DecodePass) -> None:
        """Count a pass that was timed elsewhere."""
        self._passes.append(decoded)

    def read(self) -> tuple[dict[Phase, float], list[DecodePass]]:
        """Return the seconds of each phase, and the passes that only decoded; once it is over.

        Two passes of one step were not timed apart, and are no pass here.
        """
        seconds: dict[Phase, float] = {}
        for (phase, began), (_, ended) in itertools.pairwise(self._marks):
            if phase is not None:
                elapsed = began.elapsed_time(ended) / 1e3 if self._on_gpu else ended - began
                seconds[phase] = seconds.get(phase, 0.0) + elapsed
        passes = self._passes[:]
        if self._num_passes == 1:
            context = self._num_tokens / self._num_rows
            times = seconds.get("draft", 0.0), seconds.get("verify", 0.0)
            passes.append(DecodePass(context, self._num_rows, self._num_emitted, *times))
            if self._told is not None:
                self._told(context, sum(times))
        for decoded in self._passes:
            seconds["draft"] = seconds.get("draft", 0.0) + decoded.draft_s
            seconds["verify"] = seconds.get("verify", 0.0) + decoded.verify_s
        return seconds, passes


class Laps:
    """Steps whose times were not read yet, the oldest first."""

    def __init__(self) -> None:
        self._laps: deque[Lap] = deque()

    def told_with(self, output: StepOutput, lap: Lap) -> StepOutput:
        """Return an output of the step `lap` timed, with the times of every step that the device is past."""
        self._laps.append(lap)
        return self._told(output)

    def rest(self) -> StepOutput:
        """Wait for every step, and return the times that were not told, with no rows."""
        for lap in self._laps:
            lap.wait()
        return self._told(StepOutput((), steps=0))

    def _told(self, output: StepOutput) -> StepOutput:
        seconds: dict[Phase, float] = {}
        passes: list[DecodePass] = []
        while self._laps and self._laps[0].over:
            times, decoded = self._laps.popleft().read()
            passes += decoded
            for phase, taken in times.items():
                seconds[phase] = seconds.get(phase, 0.0) + taken
        return StepOutput(output.rows, seconds, output.steps, passes, num_untold=len(self._laps))
