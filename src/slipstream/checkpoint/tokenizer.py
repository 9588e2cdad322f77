"""Text to token ids and back, chats included, from the files beside a checkpoint's weights."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from slipstream.checkpoint.chat_template import LONGEST_TEMPLATE, ChatTemplate, TemplateValue
from slipstream.checkpoint.files import find_file, read_json, read_text
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.checkpoint.spelled_tokens import SpelledTokens
from slipstream.checkpoint.tiktoken_file import FILE_NAME as TIKTOKEN_FILE
from slipstream.checkpoint.tiktoken_file import tiktoken_tokenizer
from slipstream.checkpoint.token_bytes import entry_bytes
from slipstream.checkpoint.tokenizer_file import read_tokenizer
from slipstream.errors import CheckpointError, RequestError

# Calls for one text hold Python's lock all the while, seconds for megabytes; calls for a batch let other threads run.
_LONG = 4096  # characters or tokens
_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that do not make a character (yet)


class Tokenizer:
    """A checkpoint's tokenizer: encoding, decoding, its chat template, and the tokens that end an answer."""

    def __init__(
        self,
        fast: FastTokenizer,
        settings: Mapping[str, Any],
        origin: Path,
        template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Wrap a `tokenizers` tokenizer.

        Args:
            fast: truncation and padding left in it are switched off.
            settings: the fields of tokenizer_config.json, foreign JSON.
            origin: the folder or file it came from, for messages.
            template: the chat template's source.
            eos_token_ids: the ids that end an answer, beside the tokenizer's own eos token.
        """
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._origin = origin
        self._template = None if template is None else ChatTemplate(template, str(origin))
        self._named = _named_tokens(settings)
        self._token_texts: dict[int, str] = {}
        self._pieces: dict[bool, dict[int, str | None]] | None = None
        if isinstance(fast.decoder, ByteLevel):
            self._pieces = {True: {}, False: {}}
        added = fast.get_added_tokens_decoder()
        self.added_token_ids = {token.content: i for i, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        bytes_by_name = (fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_token_ids = frozenset(i for i in bytes_by_name if i is not None)
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        ids = [*eos_token_ids, *([] if own_eos is None else [own_eos])]
        self.eos_token_ids = tuple(dict.fromkeys(ids))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load from a Hugging Face folder (tokenizer.json or tiktoken.model, and the files beside) or a .gguf file.

        An answer ends at the ids of generation_config.json (config.json when that names none) or those that a GGUF's
        turns end with, and at the tokenizer's own eos token.
        """
        if folder.suffix == ".gguf":
            built = gguf_tokenizer(GgufReader(folder))
            return cls(built.tokenizer, built.settings, folder, built.settings.get("chat_template"), built.ends)
        settings = _optional_json(folder, "tokenizer_config.json")
        fast = _fast_tokenizer(folder, settings)
        return cls(fast, settings, folder, _find_template(folder, settings), _eos_ids(folder))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a text; `add_special` lets the tokenizer put its bos, if it has one, in front."""
        try:
            ids: list[int] = self._encoding(text, add_special).ids
        except TypeError as error:  # what tokenizers makes of a string that is not Unicode text
            raise RequestError("The text holds half a surrogate pair, which is no character.") from error
        except Exception as error:  # tokenizers raises nothing narrower, for a character it has no token for
            raise RequestError(f"{self._origin}: its tokenizer cannot encode this text ({error}).") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids; bytes that make no character show as U+FFFD."""
        if len(ids) > _LONG:
            text: str = self._fast.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        else:
            text = self._fast.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special tokens by name; a piece of a character shows as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special=False)
            if token_id < self.vocab_size:  # a model may have more ids than that, and callers have any
                self._token_texts[token_id] = text
        return text

    def piece(self, token_id: int, skip_special: bool) -> str | None:
        """Return what a token adds to any text of whole characters; None where that depends on its neighbours.

        A decoder of bytes only joins them, so there a token of whole characters always adds the same, and is decoded
        once. Other decoders treat the first token otherwise, or join pieces.
        """
        if self._pieces is None:
            return None
        pieces = self._pieces[skip_special]
        try:
            return pieces[token_id]
        except KeyError:
            text = self.decode([token_id], skip_special)
            piece = None if _INCOMPLETE in text else text
            if token_id < self.vocab_size:
                pieces[token_id] = piece
            return piece

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes, also of one that is only a piece of a character."""
        text = self.token_text(token_id)
        entry: str | None = self._fast.id_to_token(token_id) if _INCOMPLETE in text else None
        return text.encode() if entry is None else entry_bytes(entry)

    def entry(self, token_id: int) -> str | None:
        """Return a token as the vocabulary has it, whatever letters that writes bytes with; None for no token."""
        entry: str | None = self._fast.id_to_token(token_id)
        return entry

    def to_json(self) -> str:
        """Return the tokenizer in the form of tokenizer.json, for other libraries to read."""
        text: str = self._fast.to_str()
        return text

    @functools.cached_property
    def spelled(self) -> SpelledTokens:
        """What tells a user's text that spells control tokens from control tokens; takes a second to make."""
        return SpelledTokens(self._fast)

    @property
    def origin(self) -> Path:
        """The folder or file it came from."""
        return self._origin

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint came with a chat template."""
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, if there is one."""
        return None if self._template is None else self._template.source

    def describe(self) -> dict[str, str | int | None]:
        """Return its special tokens by name, its size and its chat template, for clients that ask."""
        return {**self._named, "vocab_size": self.vocab_size, "chat_template": self.chat_template}

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads."""
        return frozenset() if self._template is None else self._template.variables

    def render_chat(
        self,
        messages: Sequence[Mapping[str, TemplateValue]],
        add_generation_prompt: bool = True,
        **variables: TemplateValue,
    ) -> str:
        """Return the text of a chat as the model was trained to see it.

        Args:
            messages: each with `role` and `content`, and whatever else the template knows (`tool_calls`, ...).
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: what this model's template knows besides (`tools`, `enable_thinking`, ...).
        """
        if self._template is None:
            raise CheckpointError(
                f"{self._origin}: has no chat template (chat_template.jinja, or 'chat_template' in "
                f"tokenizer_config.json). Give plain text instead of messages."
            )
        if not messages:
            raise RequestError("A chat needs at least one message.")
        return self._template.render(
            {
                "tools": None,
                "documents": None,
                **self._named,
                **variables,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, TemplateValue]],
        add_generation_prompt: bool = True,
        **variables: TemplateValue,
    ) -> list[int]:
        """Return the ids of a chat; the template itself writes what special tokens there are."""
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special=False)

    def detokenizer(self, skip_special: bool = True) -> "IncrementalDetokenizer":
        """Return a fresh detokenizer for one stream of ids."""
        return IncrementalDetokenizer(self, skip_special)

    def _encoding(self, text: str, add_special: bool) -> Encoding:
        if len(text) > _LONG:
            return self._fast.encode_batch_fast([text], add_special_tokens=add_special)[0]
        return self._fast.encode(text, add_special_tokens=add_special)

    def _id_of(self, name: str) -> int | None:
        token = self._named.get(name)
        if token is None:
            return None
        token_id: int | None = self._fast.token_to_id(token)
        return token_id


class IncrementalDetokenizer:
    """Turns a stream of ids into a stream of text; the pieces joined are the text of all the ids.

    Text is given out once it can no longer change: a character split over tokens waits for its last byte. Each piece
    is decoded behind the tokens of the piece before, since decoders treat the first token otherwise (they drop its
    leading space).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._before: list[int] = []
        self._waiting: list[int] = []
        self._in_byte_run = False

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids, and return the text that is now complete (perhaps none)."""
        pieces: list[str] = []
        for token_id in ids:
            if not self._waiting and (piece := self._tokenizer.piece(token_id, self._skip_special)) is not None:
                self._before.clear()
                pieces.append(piece)
                continue
            self._waiting.append(token_id)
            if not (self._skip_special and token_id in self._tokenizer.special_token_ids):
                self._in_byte_run = token_id in self._tokenizer.byte_token_ids
            text = "" if self._in_byte_run else self._new_text()
            if text and not text.endswith(_INCOMPLETE):
                pieces.append(text)
                self._before, self._waiting = self._waiting, []
        return "".join(pieces)

    def finish(self) -> str:
        """Return what is left, with U+FFFD for bytes that stayed incomplete."""
        text = self._new_text()
        self._before, self._waiting = [], []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._before)
        return self._decode(self._before + self._waiting)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _fast_tokenizer(folder: Path, settings: Mapping[str, Any]) -> FastTokenizer:
    if (path := find_file(folder, "tokenizer.json")) is not None:
        return read_tokenizer(path)
    if (ranks := find_file(folder, TIKTOKEN_FILE)) is not None:
        return tiktoken_tokenizer(ranks, settings)
    raise CheckpointError(
        f"{folder}: has no tokenizer.json and no {TIKTOKEN_FILE}. Slipstream reads fast tokenizers and Kimi's; "
        f"with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...) writes a fast one."
    )


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    path = find_file(folder, name)
    return {} if path is None else read_json(path)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token, ... as strings; files write them plain or as an object with `content`."""
    named: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = find_file(folder, "chat_template.jinja")
    if path is not None:
        return read_text(path, 4 * LONGEST_TEMPLATE)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for plain chats
        named = {str(item.get("name")): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path) -> list[int]:
    for file in ("generation_config.json", "config.json"):
        config = _optional_json(folder, file)
        text = config.get("text_config")
        value = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
        ids = value if isinstance(value, list) else [value]
        if found := [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]:
            return found
    return []
