"""What an engine counts while it runs."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.speculation.statistics import AcceptanceStats

Phase = Literal["draft", "verify", "host"]


@dataclass
class EngineStats:
    """Counts since the engine was built.

    `phase_seconds` is the time the engine's thread spent drafting, checking, and on its own bookkeeping. Of a cycle
    on the device only the sum is known; it is shared between draft and verify by the bytes of weights each reads.
    """

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    phase_seconds: dict[Phase, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "host": 0.0})
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
