"""How many tokens of prompts a step may compute: many while nobody waits for a next token, few enough otherwise."""

from collections.abc import Iterable

from slipstream.engine.config import EngineConfig
from slipstream.engine.request import Request
from slipstream.executors.interface import Executor, StepOutput

PROMPT_SECONDS = 0.1
"""What prompts may take beside requests that decode, where that was not measured: the longest pause a reader sees."""
_FEWEST = 256  # tokens: a pass over fewer takes hardly less time
_SMOOTHING = 0.3


class PromptPace:
    """Knows what prompts cost, from the executor or from watching, and says how much of them fits a step."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._most, self._share = config.max_batch_tokens, config.prefill_share
        self._executor = executor
        self._tokens_per_second: float | None = None

    def budget(self, running: Iterable[Request]) -> int:
        """Return how many tokens the next step may have."""
        num_decoding = sum(request.decodes for request in running)
        if not num_decoding:
            return self._most
        beside = self._executor.prompt_tokens_beside(num_decoding, self._share)
        if beside is not None:
            return min(self._most, num_decoding + beside)
        rate = self._tokens_per_second
        return self._most if rate is None else min(self._most, max(_FEWEST, int(rate * PROMPT_SECONDS)))

    def note(self, output: StepOutput) -> None:
        """Learn from a step whose prompts were timed apart from the rest."""
        seconds = output.seconds.get("prefill", 0.0)
        tokens = sum(row.num_tokens for row in output.rows if row.num_tokens > 1)
        if seconds > 0 and tokens >= _FEWEST:
            rate, before = tokens / seconds, self._tokens_per_second
            self._tokens_per_second = rate if before is None else before + _SMOOTHING * (rate - before)
