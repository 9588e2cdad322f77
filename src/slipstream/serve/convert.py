"""From what a client sent to jobs for the engine: tokens, sampling settings, seeds."""

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.checkpoint.spelled_tokens import mark_in
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.serve.config import ServeConfig
from slipstream.serve.continued import cut_at_end, marked_end
from slipstream.serve.defaults import SamplingDefaults
from slipstream.serve.errors import HttpError, too_long, too_many
from slipstream.serve.fixed_sampling import check_fixed
from slipstream.serve.protocol import ChatFields, ChatMessage, ChatRequest, CompletionRequest, Generation
from slipstream.serve.ticket import Job
from slipstream.serve.tools.chat import Chat, ChatRenderer
from slipstream.serve.tools.dialect import Dialect
from slipstream.serve.tools.form import PLAIN, AnswerForm
from slipstream.serve.tools.protocol import Choice, choice_of
from slipstream.serve.tools.reasoning import Opening
from slipstream.speculation.grammar import Grammar
from slipstream.speculation.sampling import SamplingParams, derive_seed

MAX_TOKENIZED = 1 << 20  # tokens that /tokenize gives at once
_UNDIVIDED = 1 << 16  # characters that are tokenized without asking whether they are too many
MAX_LOGPROBS = 1 << 20  # of one answer, some 80 MB of JSON
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class ChatPrompt:
    """A chat in tokens, what an answer may call, and how it begins."""

    tokens: list[int]
    choice: Choice
    begins: Opening


@dataclass(frozen=True)
class Converter:
    """Turns requests into jobs, or into an HttpError that names the field.

    Args:
        max_answers: how many answers the server has room for; a request for more is refused before its prompts are
            looked at.
        defaults: the settings of requests that leave them out.
    """

    engine: Engine
    tokenizer: Tokenizer
    config: ServeConfig
    max_answers: int
    defaults: SamplingDefaults
    dialect: Dialect
    renderer: ChatRenderer

    def check_model(self, name: str | None) -> None:
        """Raise unless the request's model is the one served (or it names none)."""
        known = (self.config.model_name, *self.config.aliases)
        if name is not None and name not in known:
            raise HttpError(404, f"The model {name!r} is not served here; {known[0]!r} is.", param="model")

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Raise for what can be seen without any work: another model, or too many answers."""
        self.check_model(request.model)
        prompt = request.prompt if isinstance(request, CompletionRequest) else None
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        asked = (len(prompt) if several and prompt is not None else 1) * request.n
        if asked > self.max_answers:
            raise too_many(asked, self.max_answers)
        if self.config.fixed_sampling is not None:
            check_fixed(request, self.config.fixed_sampling)

    def prompt(self, request: ChatRequest, limit: int | None = None) -> "ChatPrompt":
        """Return a chat's prompt, and how an answer to it begins.

        Args:
            limit: how many tokens it may have; by default what the context has room for.
        """
        if request.top_logprobs and not request.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        choice = choice_of(request.tools, request.tool_choice, request.parallel_tool_calls)
        self.dialect.check(choice)
        text = self.chat_text(request, request.messages, choice)
        given, _ = _wanted_tokens(request)
        tokens = self._cut(self.encode(text, False, limit or self._limit(request), "messages"), request, given)
        begun = _turn(request.messages[-1], len(request.messages) - 1)["content"]
        begins = self.dialect.opening(text, str(begun) if request.continue_final_message else None)
        self.dialect.check_thinking(request.reasoning_effort, request.thinking, begins)
        return ChatPrompt(tokens, choice, begins)

    def chat(self, request: ChatRequest, prompt: "ChatPrompt", grammar: Grammar | None) -> list[Job]:
        """Return a chat's jobs, one for each of its `n` answers."""
        given, field = _wanted_tokens(request)
        max_tokens = self._max_tokens(given, [prompt.tokens], field)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = self._params(request, grammar, max_tokens, logprobs, request.prompt_logprobs)
        form = self.dialect.form(prompt.choice, prompt.begins, request.separate_reasoning)
        form = dataclasses.replace(form, whole_reasoning=not request.stream_reasoning)
        return self._jobs(request, [prompt.tokens], params, form=form)

    def completion(self, request: CompletionRequest, grammar: Grammar | None, form: AnswerForm = PLAIN) -> list[Job]:
        """Return a completion's jobs: for each prompt, its `n` answers next to each other."""
        prompts = self._prompts(request)
        scored = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            scored = max(request.logprobs, scored or 0)
        # A prompt can be scored without an answer; the engine always makes one token, which is then dropped.
        wanted = 1 if request.max_tokens == 0 and request.echo else request.max_tokens
        if "max_tokens" not in request.model_fields_set:  # a default is no more than there is room for
            wanted = min(wanted or 1, self._max_tokens(None, prompts, "max_tokens"))
        max_tokens = self._max_tokens(wanted, prompts, "max_tokens")
        params = self._params(request, grammar, max_tokens, request.logprobs, scored)
        return self._jobs(request, prompts, params, _texts(request), form)

    def chat_text(self, fields: ChatFields, messages: Sequence[ChatMessage], choice: Choice) -> str:
        """Return a chat as the model reads it; what clients spelled of its control tokens is marked in it."""
        if not self.tokenizer.has_chat_template:
            raise HttpError(400, "This model has no chat template; send text to /v1/completions.", param="messages")
        turns = [_turn(message, index) for index, message in enumerate(messages)]
        variables = self.dialect.switches(fields.reasoning_effort, fields.thinking, fields.thinking_budget)
        if fields.documents is not None:
            variables["documents"] = fields.documents
        variables |= fields.chat_template_kwargs or {}
        tools = [] if choice.mode == "none" else fields.tools or []
        goes_on = fields.continue_final_message
        if goes_on and fields.add_generation_prompt and "add_generation_prompt" in fields.model_fields_set:
            both = "continue_final_message and add_generation_prompt are both true; an answer goes on or begins anew."
            raise HttpError(400, both, param="continue_final_message")
        turns = marked_end(turns) if goes_on else turns
        try:
            text = self.renderer.render(Chat(turns, fields.add_generation_prompt and not goes_on, tools, variables))
        except RequestError as error:
            raise HttpError(400, str(error), param="messages") from error
        except TypeError as error:  # a variable of the template that the call itself has already
            raise HttpError(400, f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error
        return cut_at_end(text) if goes_on else text

    def encode(self, text: str, add_special: bool, limit: int, field: str) -> list[int]:
        """Return a text's tokens; one with more than `limit` is refused, where possible after a part of it.

        A tokenizer takes seconds and a gigabyte for some texts of megabytes. What follows a part merges with its last
        few tokens only, so a part with an eighth more than the limit tells enough.
        """
        plenty = limit + limit // 8 + 64
        size = max(plenty + 1, _UNDIVIDED)
        try:
            while size < len(text):
                if len(self.tokenizer.encode(text[:size], False)) > plenty:
                    raise self._too_long(field, f"more than {plenty}", limit)
                size *= 4
            if mark_in(text):
                ids = [*self.tokenizer.encode("", add_special), *self.tokenizer.spelled.encode(text)]
            else:
                ids = self.tokenizer.encode(text, add_special)
        except RequestError as error:
            raise HttpError(400, f"{field}: {error}", param=field) from error
        if len(ids) > limit:
            raise self._too_long(field, str(len(ids)), limit)
        return ids

    def _too_long(self, field: str, count: str, limit: int) -> HttpError:
        if limit == self.engine.config.max_context:
            said = (
                f"This model's maximum context length is {limit} tokens; {field} has {count}, which is longer than the "
            )
            return too_long(said + "model's context length.", field)
        return HttpError(400, f"{field} has {count} tokens; the limit is {limit} tokens. Shorten it.", param=field)

    def _limit(self, request: Generation) -> int:
        """Return how many tokens a prompt may have before it is cut."""
        return self.engine.config.max_context if request.truncate_prompt_tokens is None else MAX_TOKENIZED

    def _cut(self, prompt: list[int], request: Generation, max_tokens: int | None) -> list[int]:
        """Return what a request wants kept of its prompt."""
        keep = request.truncate_prompt_tokens
        if keep is None or (keep == 0 and not prompt):
            return prompt
        room = self.engine.config.max_context
        if keep > room:
            raise too_long(
                f"This model's maximum context length is {room} tokens; truncate_prompt_tokens is {keep}.",
                "truncate_prompt_tokens",
            )
        if keep == 0:
            raise HttpError(400, "truncate_prompt_tokens is 0, which leaves no prompt.", param="truncate_prompt_tokens")
        kept = max(room - (max_tokens or 1), 1) if keep < 0 else keep
        return prompt[-kept:] if request.truncation_side == "left" else prompt[:kept]

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if not prompt and isinstance(prompt, list):
            raise HttpError(400, "prompt is an empty list.", param="prompt")
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        limit = self._limit(request)
        encoded = (
            self.encode(part, request.add_special_tokens, limit, "prompt") if isinstance(part, str) else part
            for part in several
        )
        return [self._cut(part, request, request.max_tokens) for part in encoded]

    def _max_tokens(self, wanted: int | None, prompts: Sequence[Sequence[int]], field: str) -> int:
        longest = max(len(prompt) for prompt in prompts)
        context = self.engine.config.max_context
        room = context - longest
        if room < 1:
            raise too_long(
                f"This model's maximum context length is {context} tokens; the prompt has {longest} tokens, which with "
                "an answer is longer than the model's context length.",
                "prompt",
            )
        limit = room if self.config.max_output_tokens is None else min(room, self.config.max_output_tokens)
        if wanted is None:
            return limit
        if wanted < 1:
            raise HttpError(400, f"{field} is {wanted}; it must be at least 1.", param=field)
        if wanted > room:
            raise too_long(
                f"max_tokens or max_completion_tokens is too large: {wanted}. This model's maximum context length is "
                f"{context} tokens, and the prompt has {longest}, so at most {limit} are possible.",
                field,
            )
        if wanted > limit:
            raise HttpError(400, f"{field} is {wanted}; this server gives at most {limit} tokens.", param=field)
        return wanted

    def _params(
        self,
        request: Generation,
        grammar: Grammar | None,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        if request.min_tokens > max_tokens:
            raise HttpError(400, f"min_tokens is {request.min_tokens}, more than {max_tokens}.", param="min_tokens")
        defaults = self.defaults if self.config.fixed_sampling is None else self.config.fixed_sampling.defaults
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                min_tokens=request.min_tokens,
                temperature=_first(request.temperature, defaults.temperature),
                top_k=max(_first(request.top_k, defaults.top_k), 0),
                top_p=_first(request.top_p, defaults.top_p),
                min_p=_first(request.min_p, defaults.min_p),
                presence_penalty=_first(request.presence_penalty, defaults.presence_penalty),
                frequency_penalty=_first(request.frequency_penalty, defaults.frequency_penalty),
                repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
                logit_bias=request.logit_bias or {},
                seed=request.seed,
                stop=tuple(text for text in stop if text),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=request.ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                n=request.n,
                grammar=grammar,
                cache_salt=_salt(request),
            )
        except RequestError as error:
            raise HttpError(400, str(error), param=str(error).split()[0]) from error

    def _jobs(
        self,
        request: Generation,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        texts: Sequence[str | None] = (None,),
        form: AnswerForm = PLAIN,
    ) -> list[Job]:
        _check_logprobs(prompts, params)
        for prompt in prompts:
            try:
                self.engine.check_request(prompt, params)
            except RequestError as error:
                raise HttpError(400, str(error), param=_field_of(str(error))) from error
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [
            Job(
                prompt,
                params,
                derive_seed(seed, index),
                request.speculate,
                request.skip_special_tokens,
                request.include_stop_str_in_output or request.no_stop_trim,
                text,
                form,
            )
            for prompt, text in zip(map(tuple, prompts), texts, strict=True)
            for index in range(params.n)
        ]


def _check_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Raise if a short request would have an answer of hundreds of megabytes; one answer to a prompt is always fine."""
    counts = {"prompt_logprobs": 0, "logprobs": 0}
    if params.prompt_logprobs is not None:
        counts["prompt_logprobs"] = params.n * sum(map(len, prompts)) * (1 + params.prompt_logprobs)
    if params.logprobs is not None:
        counts["logprobs"] = (params.n * len(prompts) - 1) * params.max_tokens * (1 + params.logprobs)
    for field, count in counts.items():
        if count > MAX_LOGPROBS:
            raise HttpError(
                400,
                f"{field} asks for up to {count} log probabilities in one answer; {MAX_LOGPROBS} are the most. "
                "Ask for fewer alternatives, answers (n) or tokens.",
                param=field,
            )


def _turn(message: ChatMessage, index: int) -> dict[str, object]:
    """Return a message as templates take it: its text parts joined, its calls' arguments as values."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise HttpError(
                    400,
                    f"messages[{index}].content has a part of type {part.type!r}; this model reads text only.",
                    param=f"messages[{index}].content",
                )
        content = "".join(part.text or "" for part in content)
    # Templates look whether there is content at all beside calls; some refuse nothing elsewhere.
    turn: dict[str, object] = {
        "role": message.role,
        "content": (content or None) if message.tool_calls else content or "",
    }
    thoughts = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", thoughts),
    ):
        if value is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments or "{}"},
            }
            for call in message.tool_calls
        ]
    return turn


def _wanted_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """Return how many tokens a chat's answer may have, and the field that says so."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def _texts(request: CompletionRequest) -> list[str | None]:
    """Return a completion's prompts as they were sent; None for those that are tokens, or were cut."""
    prompt = request.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    cut = request.truncate_prompt_tokens is not None
    return [part if isinstance(part, str) and not cut else None for part in several]


def _first(given: N | None, default: N) -> N:
    return default if given is None else given


def _salt(request: Generation) -> str:
    """Return what keeps a request's cached prompt apart; a length in front keeps two parts from looking like one."""
    salt, extra = request.cache_salt or "", request.extra_key or ""
    return f"{len(salt)}:{salt}{extra}" if extra else salt


def _field_of(message: str) -> str:
    first = message.split()[0]
    return first if "_" in first else "prompt"
