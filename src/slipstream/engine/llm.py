"""The Python interface: `LLM(model, draft=...)`, `generate`, `chat` and `stream`, with typed results."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.engine.config import PATIENCE_S
from slipstream.engine.loading import LoadOptions, load
from slipstream.engine.output import Emission, EmittedToken
from slipstream.engine.request import FinishReason
from slipstream.errors import RequestError
from slipstream.speculation.sampling import SamplingParams, derive_seed
from slipstream.speculation.statistics import AcceptanceStats

_UNWATCHED_S = 0.1  # patience with steps whose tokens nobody reads as they come

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Plain text, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class Completion:
    """One answer."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[EmittedToken, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    stats: AcceptanceStats

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return [token.token_id for token in self.tokens]


class LLM:
    """A target with its draft, ready to answer.

    >>> llm = LLM()                                        # the embedded model
    >>> llm = LLM(LoadOptions(model="path/to/folder", draft="path/to/draft"))
    >>> llm.chat([{"role": "user", "content": "Hello"}]).text
    """

    def __init__(self, options: LoadOptions | None = None) -> None:
        self._loaded = load(options or LoadOptions())
        self.engine = self._loaded.engine
        self.tokenizer = self._loaded.tokenizer
        self.summary = self._loaded.summary

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Answer prompts together; with `params.n` > 1 a prompt's answers stand next to each other."""
        params = params or SamplingParams()
        ids = [request_id for prompt in prompts for request_id in self._add(prompt, params)]
        pieces: dict[int, list[Emission]] = {request_id: [] for request_id in ids}
        while any(not emissions or emissions[-1].finish_reason is None for emissions in pieces.values()):
            for emission in self.engine.step(_UNWATCHED_S):
                if emission.request_id in pieces:
                    pieces[emission.request_id].append(emission)
        return [self._completion(request_id, pieces[request_id]) for request_id in ids]

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Completion:
        """Answer a chat."""
        return self.generate([messages], params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, speculate: bool = True
    ) -> Iterator[Emission]:
        """Yield an answer step by step; closing the iterator early ends the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream has one answer.")
        (request_id,) = self._add(prompt, params, speculate)
        try:
            done = False
            while not done:
                for emission in self.engine.step(PATIENCE_S):
                    if emission.request_id == request_id:
                        if emission.error is not None:
                            raise emission.error
                        yield emission
                        done = emission.finish_reason is not None
        finally:
            self.engine.abort(request_id)

    def close(self) -> None:
        """End the processes that hold the other parts of a split model; a model that is not split has none."""
        self._loaded.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if all(isinstance(part, int) for part in prompt):
            return [part for part in prompt if isinstance(part, int)]
        return self.tokenizer.encode_chat([part for part in prompt if isinstance(part, Mapping)])

    def _add(self, prompt: Prompt, params: SamplingParams, speculate: bool = True) -> list[int]:
        ids = self.encode(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [self._add_one(ids, params, derive_seed(seed, index), speculate) for index in range(params.n)]

    def _add_one(self, ids: list[int], params: SamplingParams, seed: int, speculate: bool) -> int:
        return self.engine.add(ids, params, seed, self.tokenizer.eos_token_ids, self.tokenizer.detokenizer(), speculate)

    def _completion(self, request_id: int, emissions: Sequence[Emission]) -> Completion:
        last = emissions[-1]
        if last.error is not None:
            raise last.error
        assert last.finish_reason is not None
        return Completion(
            prompt_tokens=last.prompt,
            tokens=tuple(token for emission in emissions for token in emission.tokens),
            text="".join(emission.text for emission in emissions),
            finish_reason=last.finish_reason,
            seed=last.seed,
            stats=last.stats,
        )
