"""An engine without a model: it emits at a steady pace, through the thread and the listener that the true one uses.

What it does for a token on the engine's thread is what the true one does after its pass: text, log probabilities,
statistics. Run as a program, it serves until it is ended.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

import torch

from slipstream.checkpoint.embedded import embedded_model
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.config import EngineConfig
from slipstream.engine.output import Detokenizer, Emission, EmittedToken, TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.engine.stats import EngineStats
from slipstream.serve.app import build_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.logs import set_up_logs
from slipstream.serve.server import avoid_pauses, server_for
from slipstream.speculation.drafter import NoDrafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening, counting each of the one hundred and twelve steps, "
    "and lit the lamp before the fishing boats turned home. “Naïve,” said the café's owner, pointing at the 3 "
    "gulls on the roof; nobody — not even the keeper — could explain why they waited there until dawn. "
)


class _Answer:
    """What the engine keeps for a request."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, seed: int, detokenizer: Detokenizer) -> None:
        self.prompt, self.params, self.seed, self.detokenizer = tuple(prompt), params, seed, detokenizer
        self.num_output = 0
        self.stats = AcceptanceStats()


class FakeEngine:
    """Emits `tokens_per_step` tokens of a fixed text to every request in each step.

    Args:
        num_together: requests that must have come before the first step; they then run in step with each other.
        period_s: from one step to the next.
    """

    def __init__(self, tokenizer: Tokenizer, num_together: int, period_s: float, tokens_per_step: int) -> None:
        self.config = EngineConfig(max_context=131072, max_requests=1024)
        self.vocab_size = 131072
        self.simulated_acceptance: tuple[float, ...] = ()
        self.stats = EngineStats()
        self.drafter = NoDrafter(torch.device("cpu"))
        self.num_waiting, self.page_usage = 0, 0.0
        self._tokens = tokenizer.encode(TEXT, False)
        self._num_together, self._period_s, self._tokens_per_step = num_together, period_s, tokens_per_step
        self._answers: dict[int, _Answer] = {}
        self._ids = itertools.count()
        self._due = 0.0

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._answers)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; not before everybody is there."""
        self._num_together = 0 if len(self._answers) >= self._num_together else self._num_together
        return bool(self._answers) and not self._num_together

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        end_tokens: Sequence[int],
        detokenizer: Detokenizer,
        speculate: bool,
    ) -> int:
        """Take a request on."""
        del end_tokens, speculate
        request_id = next(self._ids)
        self._answers[request_id] = _Answer(prompt, params, seed, detokenizer)
        return request_id

    def abort(self, request_id: int) -> bool:
        """Forget a request."""
        return self._answers.pop(request_id, None) is not None

    def step(self, patience_s: float) -> list[Emission]:
        """Wait as if a GPU computed, then emit."""
        del patience_s
        now = time.perf_counter()
        late_s = now - self._due - self._period_s
        self._due = now if late_s > 0.1 else self._due + self._period_s  # after a silence it does not catch up
        if self._due > now:
            time.sleep(self._due - now)
        self.stats.steps += 1
        return [self._emit(request_id, answer) for request_id, answer in list(self._answers.items())]

    def _emit(self, request_id: int, answer: _Answer) -> Emission:
        count = min(self._tokens_per_step, answer.params.max_tokens - answer.num_output)
        emitted = []
        for position in range(1, count + 1):
            token = self._tokens[(answer.num_output + request_id + position) % len(self._tokens)]
            text = answer.detokenizer.push([token])
            emitted.append(EmittedToken(token, text, position if position < count else 0, self._logprob(answer, token)))
        answer.stats.record([1] * (count - 1), count, count - 1, answer.num_output == 0)
        answer.num_output += count
        finished = answer.num_output >= answer.params.max_tokens
        if finished:
            del self._answers[request_id]
        return Emission(
            request_id,
            answer.prompt,
            answer.seed,
            tuple(emitted),
            answer.stats,
            FinishReason.LENGTH if finished else None,
            answer.detokenizer.finish() if finished else "",
        )

    def _logprob(self, answer: _Answer, token: int) -> TokenLogprob | None:
        wanted = answer.params.logprobs
        if wanted is None:
            return None
        likeliest = self._tokens[token % len(self._tokens) :][:wanted]
        return TokenLogprob(
            token, -0.1234567, tuple((other, -0.7654321 * rank) for rank, other in enumerate(likeliest))
        )

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Look at every token, as the true engine does."""
        del params
        assert not any(not 0 <= token < self.vocab_size for token in prompt)

    def rest(self) -> None:
        """Do nothing: there is no device."""

    def hurry(self) -> None:
        """Do nothing: steps are short."""

    def when_lost(self, callback: object) -> None:
        """Do nothing: there are no ranks."""

    def check_invariants(self) -> None:
        """Do nothing: there are no pages."""


def main() -> None:
    """Serve a fake engine until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--together", type=int, required=True)
    parser.add_argument("--period-s", type=float, required=True)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    options = parser.parse_args()
    set_up_logs("warning", as_json=False)
    tokenizer = Tokenizer.load(embedded_model())
    engine = FakeEngine(tokenizer, options.together, options.period_s, options.tokens_per_step)
    config = ServeConfig("fake", port=options.port)
    app = build_app(engine, tokenizer, config, int(time.time()))  # type: ignore[arg-type]  # an engine in what is used
    avoid_pauses()
    server_for(app, config).run()


if __name__ == "__main__":
    sys.exit(main())
