"""The chat template taken apart: the token ids around a user turn and an answer, so that turns can be sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.train.errors import DataError

_USER, _ANSWER, _AGAIN = "slipstreamuserturn", "slipstreamanswer", "slipstreamnextturn"


class ChatTokenizer(Protocol):
    """The part of a tokenizer that data generation needs (`slipstream.checkpoint.tokenizer.Tokenizer` has it)."""

    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]

    @property
    def has_chat_template(self) -> bool:
        """Whether the target came with a chat template."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Turn text into ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Turn ids into text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat as the target was trained to see it."""
        ...


@dataclass(frozen=True)
class ChatFrame:
    """Ids before a user turn, from there to the answer, and from the answer's end token to the next user turn."""

    before_user: list[int]
    to_answer: list[int]
    to_next_user: list[int]


def chat_frame(tokenizer: ChatTokenizer, system: str | None) -> ChatFrame:
    """Take the template apart for one system prompt; None leaves it to the template's default."""
    require_template(tokenizer)
    start = [] if system is None else [{"role": "system", "content": system}]
    user = {"role": "user", "content": _USER}
    first = tokenizer.render_chat([*start, user])
    again = tokenizer.render_chat(
        [*start, user, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _AGAIN}]
    )
    before, found, after = first.partition(_USER)
    next_turn = again.partition(_ANSWER)[2].partition(_AGAIN)[0]
    to_next = tokenizer.encode(next_turn, add_special=False)
    if not found or not next_turn or not to_next or to_next[0] not in tokenizer.eos_token_ids:
        raise DataError(
            "The target's chat template does not show a user turn as it is, or does not end an answer with an end "
            "token, so turns cannot be sampled from it; give prompts from files only (magpie: 0)."
        )
    return ChatFrame(
        tokenizer.encode(before, add_special=False), tokenizer.encode(after, add_special=False), to_next[1:]
    )


def encode_prompt(tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a chat up to the answer, exactly as serving would."""
    require_template(tokenizer)
    return tokenizer.encode(tokenizer.render_chat(messages), add_special=False)


def require_template(tokenizer: ChatTokenizer) -> None:
    """Refuse a target that cannot be talked to."""
    if not tokenizer.has_chat_template:
        raise DataError(
            "The target has no chat template, so it cannot be asked questions. Use an instruction-tuned target, or "
            "add chat_template.jinja to its folder."
        )
