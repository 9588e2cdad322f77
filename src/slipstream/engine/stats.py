"""What an engine counts while it runs, and what it says when a draft's counts look wrong."""

import logging
from collections import deque
from dataclasses import dataclass, field

from slipstream.executors.interface import DecodePass, Phase, StepOutput
from slipstream.speculation.statistics import AcceptanceStats

logger = logging.getLogger(__name__)

_SUSPICIOUS_PASSES, _SUSPICIOUS_RATE = 200, 0.03


@dataclass
class ContextCosts:
    """What passes that only decode took at contexts of about one length."""

    passes: int = 0
    rows: int = 0
    emitted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add(self, decoded: DecodePass) -> None:
        """Count a pass."""
        self.passes += 1
        self.rows += decoded.num_rows
        self.emitted += decoded.num_emitted
        self.draft_s += decoded.draft_s
        self.verify_s += decoded.verify_s


@dataclass
class EngineStats:
    """Counts since the engine was built.

    Args:
        phase_seconds: what the time of steps went to, as executors measured it; on a GPU the device's own time. The
            host's is the rest, so that they add up to `busy_s`.
        by_context: passes that only decode, by the context they are counted at (see `counted_context`).
        busy_s: from the first step of a busy spell to the end of its last, over all of them.
    """

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    phase_seconds: dict[Phase, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "mixed": 0.0, "host": 0.0}
    )
    by_context: dict[int, ContextCosts] = field(default_factory=dict)
    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    _begun_s: deque[float] = field(default_factory=deque, repr=False)
    _num_untold: int = field(default=0, repr=False)

    def add_times(self, output: StepOutput) -> None:
        """Count what an executor measured."""
        for phase, seconds in output.seconds.items():
            self.phase_seconds[phase] += seconds
        for decoded in output.passes:
            self.by_context.setdefault(counted_context(decoded.context), ContextCosts()).add(decoded)
        self._num_untold = output.num_untold

    def begin_step(self) -> None:
        """Take note that a step is submitted by the call whose time is counted next."""
        self._begun_s.append(self.busy_s)

    def add_busy(self, seconds: float, in_flight: int) -> None:
        """Count the time of a call, and the host's part of it.

        That part is known up to where the oldest step began whose times are not: while the host launches a step the
        device runs it, so what passed since may be either's.
        """
        self.busy_s += seconds
        while len(self._begun_s) > in_flight + self._num_untold:
            self._begun_s.popleft()
        known_s = self._begun_s[0] if self._begun_s else self.busy_s
        others = sum(taken for phase, taken in self.phase_seconds.items() if phase != "host")
        self.phase_seconds["host"] = max(self.phase_seconds["host"], known_s - others)


def counted_context(context: float) -> int:
    """Return the least of 64, 96, 128, 192, 256, ... that is not below a context."""
    bound = 64
    while bound < context:
        bound = bound * 3 // 2 if bound & (bound - 1) == 0 else bound * 4 // 3
    return bound


class DraftDoubt:
    """Says once that a draft accepts next to nothing, and why that usually is."""

    def __init__(self) -> None:
        self._settled = False

    def look(self, stats: AcceptanceStats) -> None:
        """Judge the draft as soon as enough passes are counted."""
        if self._settled or not stats.offered or stats.offered[0] < _SUSPICIOUS_PASSES:
            return
        self._settled = True
        if stats.rates[0] < _SUSPICIOUS_RATE:
            logger.warning(
                "The draft's first token was accepted in %.1f%% of %d passes. It loads but does not fit: it may have "
                "been trained for another target or another quantization of it, its captured layers may follow the "
                "other convention (off by one), or its rope theta, norm_output or norm_before_residual are not what "
                "it was trained with. Decoding stays exact, only slower.",
                100 * stats.rates[0],
                stats.offered[0],
            )
