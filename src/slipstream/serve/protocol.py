"""What clients may send: the JSON of OpenAI's API and the extensions its open servers share, checked field by field.

What is declared here works; `fields.py` says what becomes of the fields of other servers that are not. A null is an
absence. A list is given up at its first wrong element, and what a step of the engine has to go through for every token
is limited in length.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from slipstream.serve.errors import HttpError
from slipstream.serve.fields import OF_CHATS, Others
from slipstream.serve.structured import Part, Structured
from slipstream.serve.tools.protocol import HistoryCalls, RawTools, Thinking
from slipstream.speculation.sampling import MAX_TOP_LOGPROBS

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Text = Annotated[str, Field(max_length=1 << 24)]
Name = Annotated[str, Field(max_length=512)]
Salt = Annotated[str, Field(max_length=1024)]

_NAME_LENGTH = 100  # of a client's own names in messages
MAX_MESSAGES = 1 << 14  # of a chat, and parts of a message
MAX_BIASES = 4096
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256


def _few_biases(value: Any) -> Any:  # whatever JSON came
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} tokens have a bias; {MAX_BIASES} may have one")
    keys = map(str, value) if isinstance(value, dict) else ()  # numbers, where another API's request has read them
    wrong = [key[:_NAME_LENGTH] for key in keys if not key.strip().isdecimal()]
    if wrong:
        raise ValueError(f"its names are token ids, and {', '.join(map(repr, wrong[:8]))} cannot be one")
    return value


Biases = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Part):
    """What a stream carries beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Request(Part):
    """The body of a request; its fields are those declared, and the others of its table."""

    others: ClassVar[Others] = OF_CHATS

    @model_validator(mode="before")
    @classmethod
    def refuse_what_cannot_be_done(cls, values: Any) -> Any:  # whatever JSON came
        """Refuse fields that ask for something this server does not do."""
        if isinstance(values, dict):
            cls.others.check(values, cls.model_fields)
        return values


class Generation(Request, Structured):
    """The fields chats and completions share."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # where these are left out, defaults.py says
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = Field(default=False, description="SGLang's word for include_stop_str_in_output.")
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="Keep this many tokens of a longer prompt; -1: as many as leave room for the answer."
    )
    truncation_side: Literal["left", "right"] = Field(default="left", description="Where a long prompt is cut.")
    cache_salt: Salt | None = Field(
        default=None, description="Share cached prompts only with requests that send the same salt."
    )
    extra_key: Salt | None = Field(default=None, description="SGLang's field; a second part of cache_salt.")
    request_id: Name | None = Field(default=None, description="What the answer's id ends with.")
    rid: Name | None = Field(default=None, description="SGLang's word for request_id; the answer's id is just this.")
    speculate: bool = Field(default=True, description="Let the draft guess. The answer is the same either way.")
    speculation_stats: bool = Field(
        default=False, description="Add drafted and accepted counts, by position, to `usage`."
    )
    return_tokens: bool = Field(
        default=False, description="Add to each choice its tokens: id, text, and where the draft guessed it."
    )
    return_token_ids: bool = Field(default=False, description="Add the token ids of prompts and answers.")
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Write tokens among log probabilities as `token_id:N`."
    )

    @model_validator(mode="before")
    @classmethod
    def streams_if_it_has_options(cls, values: Any) -> Any:  # whatever JSON came
        """Refuse options of a stream where there is none."""
        if isinstance(values, dict) and values.get("stream_options") and not values.get("stream"):
            raise HttpError(400, "stream_options needs stream to be true.", param="stream_options")
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
    echo: bool = False
    add_special_tokens: bool = True


class ContentPart(Part):
    """A part of a message's content; only text can be read."""

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None


class ChatMessage(Part):
    """One turn of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: HistoryCalls | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(default=None, description="Another name of `reasoning_content`.")


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatFields(Part):
    """What a chat's prompt is made of, beside its messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = Field(
        default=False, description="Go on with the last message, which is the assistant's, instead of answering it."
    )
    chat_template_kwargs: dict[str, Any] | None = None  # whatever the model's template knows
    tools: RawTools | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None  # foreign JSON
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None  # foreign JSON
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="How much to think, where the model's template has a switch for it; none: not at all."
    )
    thinking: Thinking | None = None
    thinking_budget: Count | None = Field(default=None, description="For templates that know a budget of tokens.")


class ChatRequest(ChatFields, Generation):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_prompt_token_ids: bool = Field(default=False, description="Add the prompt's token ids to each choice.")
    include_reasoning: bool = Field(default=True, description="Tell what the model thought, as `reasoning_content`.")
    separate_reasoning: bool = Field(default=True, description="False: what the model thought is part of the text.")
    stream_reasoning: bool = Field(default=True, description="False: a stream has what it thought in one piece.")


class TokenizeRequest(ChatFields, Request):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: Name | None = None
    prompt: Text | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(default=None, description="By default for a text; templates write them.")
    return_token_strs: bool = Field(default=False, description="Add the tokens as the vocabulary has them.")

    @model_validator(mode="after")
    def has_one_source(self) -> "TokenizeRequest":
        """Ask for just one of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Request):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: (
        Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    skip_special_tokens: bool = False


class DraftRequest(Part):
    """The body of /admin/draft: the draft to take over, or whether to return to the one before."""

    model_config = ConfigDict(extra="forbid")

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="A draft's folder on the server, or a hub id."
    )
    go_back: bool = False


class TreeRequest(Part):
    """The body of /admin/speculation: what to change; what is left out stays."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    depth: Annotated[int, Field(ge=1, le=64)] | None = None
    width: Annotated[int, Field(ge=1, le=64)] | None = None
    budget: Annotated[int, Field(ge=0, le=64)] | None = None
    simulated_acceptance: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(fail_fast=True)] | None = Field(
        default=None, description="Chance that a drafted token is kept, by position; [] ends the simulation."
    )
