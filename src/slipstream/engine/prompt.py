"""What a user may ask: plain text, token ids or a chat, one of them or a list; and the requests that become of it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.speculation.sampling import SamplingParams, derive_seed

Messages = Sequence[Mapping[str, str]]
"""The messages of a chat, each with `role` and `content`."""

Prompt = str | Sequence[int] | Messages
"""Plain text, token ids, or the messages of a chat."""

_KINDS = 'text, a list of token ids, or a list of messages such as [{"role": "user", "content": "Hello"}]'


@dataclass(frozen=True)
class Question:
    """One answer to make."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    speculate: bool


def several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt] | None:
    """Return a list's prompts, or None where there is one prompt alone; RequestError for what is neither."""
    if isinstance(prompts, str):
        return None
    _check_list(prompts)
    found: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, int | Mapping):
            return None
        found.append(prompt)
    return found


def alone(prompt: Prompt | Sequence[Prompt], params: SamplingParams) -> Prompt:
    """Return the one prompt; RequestError if there are several, or several answers are wanted."""
    if several(prompt) is not None:
        raise RequestError("Several prompts, where one is answered; give each its own call.")
    if params.n != 1:
        raise RequestError(f"n is {params.n}, and this gives one answer; generate([prompt], n={params.n}) gives more.")
    return cast("Prompt", prompt)  # what `several` looked for, and a type checker cannot


def check_chat(messages: Messages) -> None:
    """Raise RequestError for a prompt that is no chat."""
    _check_list(messages)
    if not messages or not all(isinstance(part, Mapping) for part in messages):  # of a str every part is a str
        raise RequestError(
            'A chat is a list of messages, as in [{"role": "user", "content": "Hello"}]; generate takes text and ids.'
        )


def questions(
    prompts: Sequence[Prompt], params: SamplingParams, speculate: bool, engine: Engine, tokenizer: Tokenizer
) -> list[Question]:
    """Return the answers to make, `params.n` for each prompt; RequestError for one that can never run, by its place."""
    if not isinstance(speculate, bool):
        raise RequestError(f"speculate is {speculate!r}; it is True or False.")
    made = []
    for place, prompt in enumerate(prompts, start=1):
        try:
            ids = encode(prompt, tokenizer)
            engine.check_request(ids, params)
        except RequestError as error:
            raise (RequestError(f"Prompt {place} of {len(prompts)}: {error}") if len(prompts) > 1 else error) from error
        seed = secrets.randbits(63) if params.seed is None else params.seed
        made += [Question(tuple(ids), params, derive_seed(seed, index), speculate) for index in range(params.n)]
    return made


def ask(engine: Engine, tokenizer: Tokenizer, question: Question) -> int:
    """Queue a question and return its request's id."""
    return engine.add(
        question.prompt,
        question.params,
        question.seed,
        tokenizer.eos_token_ids,
        tokenizer.detokenizer(),
        question.speculate,
    )


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return a prompt's token ids."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("The prompt is empty; give some text, or token ids.")
        return tokenizer.encode(prompt)
    _check_list(prompt)
    if not prompt:
        raise RequestError("The prompt is empty; give at least one token id or message.")
    if isinstance(prompt[0], Mapping):
        return tokenizer.encode_chat([_message(part) for part in prompt])
    wrong = next((part for part in prompt if not isinstance(part, int) or isinstance(part, bool)), None)
    if wrong is not None:
        raise RequestError(f"A prompt holds {wrong!r} ({type(wrong).__name__}); give {_KINDS}.")
    return [part for part in prompt if isinstance(part, int)]


def _check_list(given: object) -> None:
    if isinstance(given, Mapping):
        raise RequestError("A chat is a list of messages; put brackets around the one you gave.")
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise RequestError(f"A prompt is a {type(given).__name__}; give {_KINDS}, or a list of such prompts.")


def _message(given: object) -> Mapping[str, str]:
    if not isinstance(given, Mapping):
        raise RequestError(f"A chat holds {given!r} ({type(given).__name__}); every message has role and content.")
    missing = [name for name in ("role", "content") if not isinstance(given.get(name), str)]
    if missing:
        raise RequestError(f"The message {dict(given)!r} has no text as its {' and '.join(missing)}.")
    return given
