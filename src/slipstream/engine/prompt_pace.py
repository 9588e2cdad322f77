"""How many tokens of prompts a step may compute: many while nobody waits for a next token, few enough otherwise."""

from collections.abc import Iterable

from slipstream.engine.request import Request
from slipstream.executors.interface import StepOutput

PROMPT_SECONDS = 0.1
"""What prompts may take beside requests that decode: the longest pause a reader of their streams sees."""
_FEWEST = 256  # tokens: a pass over fewer takes hardly less time
_SMOOTHING = 0.3


class PromptPace:
    """Measures how fast prompts are computed, and says how much of them fits a step."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._most = max_batch_tokens
        self._tokens_per_second: float | None = None

    def budget(self, running: Iterable[Request]) -> int:
        """Return how many tokens the next step may have."""
        rate = self._tokens_per_second
        if rate is None or not any(request.decodes for request in running):
            return self._most
        return min(self._most, max(_FEWEST, int(rate * PROMPT_SECONDS)))

    def note(self, output: StepOutput) -> None:
        """Learn from a step whose prompts were timed apart from the rest."""
        seconds = output.seconds.get("prefill", 0.0)
        tokens = sum(row.num_tokens for row in output.rows if row.num_tokens > 1)
        if seconds > 0 and tokens >= _FEWEST:
            rate, before = tokens / seconds, self._tokens_per_second
            self._tokens_per_second = rate if before is None else before + _SMOOTHING * (rate - before)
