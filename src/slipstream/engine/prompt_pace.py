"""How many tokens of prompts a step may compute: many while nobody waits for a next token, few enough otherwise."""

from collections.abc import Sequence

from slipstream.engine.config import EngineConfig
from slipstream.engine.request import Request
from slipstream.executors.interface import Executor, StepCosts, StepOutput

PROMPT_SECONDS = 0.1
"""What prompts may take beside requests that decode: the longest pause a reader of their streams sees."""
_FEWEST = 256  # tokens: a pass over fewer takes hardly less time
_SMOOTHING = 0.3


class PromptPace:
    """Knows what prompts cost, from the executor or from watching, and says how much of them fits a step.

    A few tokens in the same pass cost a step little, and decoding hardly slows down. But a step costs almost as much
    for a few requests as for many: while the batch is far from full, it is better to compute prompts first.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._config, self._executor = config, executor
        self._tokens_per_second: float | None = None

    def budget(self, running: Sequence[Request], num_waiting: int) -> int:
        """Return how many tokens the next step may have."""
        most, num_decoding = self._config.max_batch_tokens, sum(request.decodes for request in running)
        if not num_decoding:
            return most
        costs = self._executor.costs(num_decoding)
        if costs is None:
            rate = self._tokens_per_second
            return most if rate is None else min(most, max(_FEWEST, int(rate * PROMPT_SECONDS)))
        few = self._few(costs)
        reachable = min(self._config.max_requests, len(running) + num_waiting)
        full = self._executor.costs(reachable) or costs
        worth_s = full.step_s * num_decoding / reachable  # what this step's tokens would cost in a fuller batch
        if costs.step_s - worth_s + costs.beside_s[few] <= few * costs.prompt_s:
            return min(most, num_decoding + few)
        return min(most, num_decoding + max(few, int(PROMPT_SECONDS / costs.prompt_s)))

    def _few(self, costs: StepCosts) -> int:
        """Return the most tokens that cost a step no more than its share, or the fewest it can have."""
        most_s = self._config.prefill_share * costs.step_s
        return max((size for size, seconds in costs.beside_s.items() if seconds <= most_s), default=min(costs.beside_s))

    def note(self, output: StepOutput) -> None:
        """Learn from a step whose prompts were timed apart from the rest."""
        seconds = output.seconds.get("prefill", 0.0)
        tokens = sum(row.num_tokens for row in output.rows if row.num_tokens > 1)
        if seconds > 0 and tokens >= _FEWEST:
            rate, before = tokens / seconds, self._tokens_per_second
            self._tokens_per_second = rate if before is None else before + _SMOOTHING * (rate - before)
