"""What an engine counts while it runs, and what it says when a draft's counts look wrong."""

import logging
from dataclasses import dataclass, field

from slipstream.executors.interface import Phase
from slipstream.speculation.statistics import AcceptanceStats

logger = logging.getLogger(__name__)

_SUSPICIOUS_PASSES, _SUSPICIOUS_RATE = 200, 0.03


@dataclass
class EngineStats:
    """Counts since the engine was built.

    `phase_seconds` is the time spent on prompts, drafting, checking, and the engine's own bookkeeping. On a GPU it is
    the device's own time; prompts that share a pass with drafts count as verify.
    """

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    phase_seconds: dict[Phase, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
    )
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


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
