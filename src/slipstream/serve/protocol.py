"""What clients may send: the JSON of OpenAI's API and the extensions its open servers share, checked field by field.

Fields nobody here knows are ignored, as other servers do. Fields that ask for something this server cannot do are
declared in `_CANNOT`, and refused unless they hold the value that asks for nothing. A list is given up at its first
wrong element, and what a step of the engine has to go through for every token is limited in length.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from slipstream.serve.errors import HttpError
from slipstream.serve.structured import Structured
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Text = Annotated[str, Field(max_length=1 << 24)]
Name = Annotated[str, Field(max_length=512)]

MAX_MESSAGES = 1 << 14  # of a chat, and parts of a message
MAX_BIASES = 4096
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256


def _few_biases(value: Any) -> Any:  # whatever JSON came
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} tokens have a bias; {MAX_BIASES} may have one")
    return value


Biases = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]

_CANNOT: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "include_stop_str_in_output": (None, False),
    "continue_final_message": (None, False),
    "tools": (None, []),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "lora_path": (None,),
    "prediction": (None,),
}


class _Message(BaseModel):
    """Every message: unknown fields are ignored, and NaN is no number."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(_Message):
    """What a stream carries beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Structured):
    """The fields chats and completions share."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    max_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = 1.0
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Share cached prompts only with requests that send the same salt."
    )
    speculate: bool = Field(default=True, description="Let the draft guess. The answer is the same either way.")
    speculation_stats: bool = Field(
        default=False, description="Add drafted and accepted counts, by position, to `usage`."
    )
    return_tokens: bool = Field(
        default=False, description="Add to each choice its tokens: id, text, and where the draft guessed it."
    )
    return_token_ids: bool = Field(default=False, description="Add the ids of prompt and answer to each choice.")

    @model_validator(mode="before")
    @classmethod
    def refuse_what_cannot_be_done(cls, values: Any) -> Any:  # whatever JSON came
        """Refuse fields that ask for something this server does not do."""
        if isinstance(values, dict):
            for name, harmless in _CANNOT.items():
                if values.get(name) not in harmless:
                    raise HttpError(400, f"{name} is not supported by this server; leave it out.", param=name)
        return values


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class ContentPart(_Message):
    """A part of a message's content; only text can be read."""

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None


class ChatMessage(_Message):
    """One turn of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: str | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None  # whatever the model's template knows


class TokenizeRequest(_Message):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def has_one_source(self) -> "TokenizeRequest":
        """Ask for just one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Message):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class TreeRequest(_Message):
    """The body of /admin/speculation: what to change; what is left out stays."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    depth: Annotated[int, Field(ge=1, le=64)] | None = None
    width: Annotated[int, Field(ge=1, le=64)] | None = None
    budget: Annotated[int, Field(ge=0, le=64)] | None = None
    simulated_acceptance: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(fail_fast=True)] | None = Field(
        default=None, description="Chance that a drafted token is kept, by position; [] ends the simulation."
    )
