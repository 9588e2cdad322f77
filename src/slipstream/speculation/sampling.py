"""How a request wants its tokens made, checked when built."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from slipstream.errors import RequestError
from slipstream.speculation.grammar import Grammar

MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
"""Below this a temperature is 0: dividing logits by less overflows float32, and the best token wins anyway."""

_WHOLE = {"max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n"}


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a request's tokens and when it ends.

    Args:
        temperature: 0 takes the best token; so does anything below MIN_TEMPERATURE.
        seed: the same seed gives the same text, with a draft or without; None draws one (and the result names it).
        top_k: 0 keeps the whole vocabulary.
        stop: strings that end the answer; they are not part of it.
        ignore_eos: go on past the model's end tokens (measurements want fixed lengths).
        logprobs: None, or how many alternatives to report beside each token (0 = the token alone).
        prompt_logprobs: the same for the prompt's own tokens; such a request computes its whole prompt.
        grammar: what the answer must follow; tokens that break it are ruled out at every node.
        cache_salt: requests share cached pages only with requests of the same salt; it never changes the tokens.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        bounds: tuple[tuple[str, object, int, int], ...] = (
            ("max_tokens", self.max_tokens, 1, 2**31),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            ("temperature", self.temperature, 0, 100),
            ("top_k", self.top_k, 0, 2**31),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("presence_penalty", self.presence_penalty, -2, 2),
            ("frequency_penalty", self.frequency_penalty, -2, 2),
            ("repetition_penalty", self.repetition_penalty, 0, 10),
            ("seed", 0 if self.seed is None else self.seed, -(2**63), 2**63 - 1),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0, MAX_TOP_LOGPROBS),
            ("prompt_logprobs", 0 if self.prompt_logprobs is None else self.prompt_logprobs, 0, MAX_TOP_LOGPROBS),
            ("n", self.n, 1, 128),
        )
        for name, value, low, high in bounds:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RequestError(f"{name} is {value!r}; it must be a number.")
            if name in _WHOLE and not isinstance(value, Integral):
                raise RequestError(f"{name} is {value!r}; it must be a whole number.")
            if value < low or not value <= high:
                raise RequestError(f"{name} is {value!r}; it must lie between {low} and {high}.")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {self.cache_salt!r}; it must be text, and '' is none.")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p == 0:
            raise RequestError("top_p is 0, which keeps no token; use temperature 0 for greedy decoding.")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0; it must be above 0 (1 changes nothing).")
        if isinstance(self.stop, str):  # type: ignore[unreachable]  # callers without a type checker get here
            raise RequestError(f"stop is one string, {self.stop!r}; give a tuple of them: stop=({self.stop!r},).")
        lists: tuple[tuple[str, object, type, str], ...] = (
            ("stop", self.stop, str, "texts"),
            ("stop_token_ids", self.stop_token_ids, Integral, "token ids"),
            ("logit_bias", self.logit_bias, Integral, "biases by token id"),
        )
        for name, given, kind, what in lists:
            if not (isinstance(given, Collection) and all(isinstance(one, kind) for one in given)):
                raise RequestError(f"{name} is {given!r}; it holds {what}.")
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string, which would end every answer at once.")
        biases: Mapping[int, object] = self.logit_bias
        for token, bias in biases.items():
            if not (isinstance(bias, Real) and not bias < -100 and bias <= 100):
                raise RequestError(f"logit_bias for token {token} is {bias!r}; it must lie between -100 and 100.")

    @property
    def counts_tokens(self) -> bool:
        """Tell whether tokens already in the text matter."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of a request's index-th sample (the first keeps the request's own)."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
