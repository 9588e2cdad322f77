"""What clients send to SGLang's `/generate`, and the same as completions."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from slipstream.serve.errors import HttpError
from slipstream.serve.fields import Others
from slipstream.serve.protocol import (
    MAX_STOP_TOKENS,
    MAX_STOPS,
    Biases,
    CompletionRequest,
    Count,
    Penalty,
    Request,
    Stop,
    Text,
    TokenId,
)
from slipstream.serve.sglang.fields import OF_GENERATE, OF_SAMPLING
from slipstream.serve.structured import Part, Schema, Source
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

T = TypeVar("T")

Rid = Annotated[str, Field(max_length=512)]
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_MAX_PROMPTS = 1 << 14
MAX_REPEATED = 1 << 12
"""Log probabilities of a streamed answer, all of which each of its events repeats."""

_OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
# Where a field of ours comes from, for messages; anything else of a completion is a field of sampling_params.
THEIRS = {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"} | {
    ours: f"sampling_params.{theirs}" for theirs, ours in _OURS.items()
}


class Sampling(Part):
    """SGLang's `sampling_params`."""

    max_new_tokens: Count | None = 128
    min_new_tokens: Count | None = 0
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    json_schema: Schema | Source | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    logit_bias: Biases | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    no_stop_trim: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, values: Any) -> Any:  # whatever JSON came
        """Drop nulls, and refuse what cannot be done; a null for max_new_tokens is SGLang's word for no limit."""
        if not isinstance(values, dict):
            return values
        OF_SAMPLING.check(values, cls.model_fields, "sampling_params.")
        return {k: v for k, v in values.items() if v is not None or k == "max_new_tokens"}


class GenerateRequest(Request):
    """The body of /generate: one prompt, or several; then most fields may be lists, one value for each."""

    others: ClassVar[Others] = OF_GENERATE

    text: Text | Annotated[list[Text], Field(fail_fast=True, max_length=_MAX_PROMPTS)] | None = None
    input_ids: (
        Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True, max_length=_MAX_PROMPTS)
        ]
        | None
    ) = None
    sampling_params: Sampling | Annotated[list[Sampling], Field(fail_fast=True)] | None = None
    stream: bool | None = False
    rid: Rid | Annotated[list[Rid], Field(fail_fast=True)] | None = None
    return_logprob: bool | Annotated[list[bool], Field(fail_fast=True)] | None = False
    logprob_start_len: int | Annotated[list[int], Field(fail_fast=True)] | None = -1
    top_logprobs_num: TopCount | Annotated[list[TopCount], Field(fail_fast=True)] | None = 0
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    extra_key: Annotated[str, Field(max_length=1024)] | None = None
    require_reasoning: bool | None = Field(
        default=False, description="The prompt ends inside the model's reasoning: a form holds after it."
    )

    @model_validator(mode="after")
    def has_one_source(self) -> "GenerateRequest":
        """Ask for just one of text and input_ids."""
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        return self

    @property
    def source(self) -> str:
        """The field that has the prompts."""
        return "text" if self.input_ids is None else "input_ids"

    @property
    def is_batch(self) -> bool:
        """Whether several prompts were sent; the answer is then a list, too."""
        source = self.text if self.input_ids is None else self.input_ids
        return isinstance(source, list) and not (source and isinstance(source[0], int))

    def completions(self) -> list[CompletionRequest]:
        """Return the request as completions, one for each prompt; raises HttpError."""
        source = self.text if self.input_ids is None else self.input_ids
        prompts: Sequence[Any] = source if self.is_batch and isinstance(source, list) else [source]
        if not prompts:
            raise HttpError(400, f"{self.source} is an empty list.", param=self.source)
        size = len(prompts)
        samplings = _for_each(self.sampling_params, size, "sampling_params")
        wanted = _for_each(self.return_logprob, size, "return_logprob")
        starts = _for_each(self.logprob_start_len, size, "logprob_start_len")
        tops = _for_each(self.top_logprobs_num, size, "top_logprobs_num")
        return [
            self._completion(prompt, sampling or Sampling(), (top or 0) if logprob else None, start)
            for prompt, sampling, logprob, start, top in zip(prompts, samplings, wanted, starts, tops, strict=True)
        ]

    def _completion(
        self, prompt: Any, sampling: Sampling, logprobs: int | None, start: int | None
    ) -> CompletionRequest:  # a text or token ids
        given = {
            _OURS.get(name, name): value
            for name, value in sampling
            if value is not None or name == "max_new_tokens"  # null leaves it to the context
        }
        scored = logprobs if start is not None and start >= 0 else None
        longest = sampling.max_new_tokens
        if self.stream and logprobs is not None and (longest is None or longest * (1 + logprobs) > MAX_REPEATED):
            raise HttpError(
                400,
                "return_logprob: each event of a stream repeats the log probabilities of those before it, up to "
                f"{MAX_REPEATED} in all. Ask for fewer tokens (max_new_tokens), or leave stream out.",
                param="return_logprob",
            )
        names = {"prompt", "logprobs", "prompt_logprobs", "cache_salt", *given}
        if "max_new_tokens" not in sampling.model_fields_set:
            names.discard("max_tokens")
        request = CompletionRequest.model_construct(
            names,
            prompt=prompt,
            logprobs=logprobs,
            prompt_logprobs=scored,
            cache_salt=self.cache_salt or self.extra_key,
            **given,
        )
        if request.max_tokens == 0:
            # Scoring without an answer: the engine always makes one token, which is then dropped.
            request.echo = True
        return request


def _for_each(value: T | list[T] | None, size: int, field: str) -> list[T | None]:
    """Return a value for each prompt: the one given, or those of a list."""
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise HttpError(400, f"{field} has {len(value)} entries for {size} prompts.", param=field)
    return list(value)
