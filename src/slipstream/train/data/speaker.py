"""A target that can be talked to: its tokenizer, and an engine that is opened when texts are first asked for."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.memory import bytes_per_page
from slipstream.errors import DataError
from slipstream.kernels import select
from slipstream.models.target import Target
from slipstream.train.data.generate import Generator, GeneratorConfig, TextWriter
from slipstream.train.data.servers import RemoteGenerator, Servers
from slipstream.train.draft.target import SplitTarget

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


OpenEngine = Callable[[EngineConfig], Engine]

CPU_ROWS = 64
"""Texts at once on a CPU: the fastest number of 8, 16, 32 and 64 (docs/log/draft.md)."""
GPU_ROWS = 512
_KV_SHARE = 0.5
_PREFILL_TOKENS = 2048  # of one step, or the longest prompt's
_PREFILL_SHARE = 8.0  # nobody waits for a token: prompts may take most of a step


class Speaker:
    """A target, whole or the first rank's part of it; `digest` is that of its weights, which a corpus remembers.

    Args:
        open_engine: makes an engine over the target's weights; by default one that shares the model's.
        servers: write the texts, instead of an engine here.
    """

    def __init__(
        self,
        model: Target | SplitTarget,
        tokenizer: ChatTokenizer,
        digest: str = "",
        open_engine: OpenEngine | None = None,
        servers: Servers | None = None,
    ) -> None:
        self.model, self.tokenizer, self.digest, self.servers = model, tokenizer, digest, servers
        self._open_engine = open_engine or self._share
        self._engine: Engine | None = None
        self._config: GeneratorConfig | None = None

    def generator(self, config: GeneratorConfig, stop_loops: bool | None = None) -> TextWriter:
        """Return what writes texts; the engine stays open for the next caller with the same settings."""
        eos = self.tokenizer.eos_token_ids
        if not eos:
            raise DataError("The target names no end token (eos_token_id), so its answers would never end.")
        if max(eos) >= self.model.spec.vocab_size:
            raise DataError(
                f"The end token {max(eos)} lies outside the target's vocabulary: the tokenizer is another's."
            )
        if self.servers is not None:
            return RemoteGenerator(self.servers, eos, config.rows, self.model.spec.vocab_size)
        if self._engine is None or self._config != config:
            self.close()
            self._engine, self._config = self._open_engine(engine_config(config, self.rows(config))), config
        return Generator(self._engine, eos, config.stop_loops if stop_loops is None else stop_loops)

    def close(self) -> None:
        """Give the engine's memory back; the next text opens another."""
        self._engine = None
        gc.collect()
        if self.model.embed_tokens.device.type == "cuda":
            torch.cuda.empty_cache()

    def rows(self, config: GeneratorConfig) -> int:
        """Return how many texts are written at once: as the settings say, or as many as suit the device."""
        if self.servers is not None:
            return self.servers.at_once(config.rows)
        if config.rows is not None:
            return config.rows
        device = self.model.embed_tokens.device
        if device.type != "cuda" or isinstance(self.model, SplitTarget):
            return CPU_ROWS
        one = bytes_per_page([self.model], EngineConfig()) * _pages(config)
        free = int(torch.cuda.mem_get_info(device)[0])
        return max(1, min(GPU_ROWS, int(_KV_SHARE * free) // one))

    def _share(self, config: EngineConfig) -> Engine:
        assert isinstance(self.model, Target), "a split target brings its engine"
        return build_engine(self.model, None, None, config, select(self.model.embed_tokens.device))


def engine_config(config: GeneratorConfig, rows: int) -> EngineConfig:
    """Return the settings of an engine that writes so many texts at once."""
    return EngineConfig(
        max_context=config.max_length,
        num_pages=rows * _pages(config),
        max_requests=rows,
        max_batch_tokens=max(_PREFILL_TOKENS, rows, config.max_length),
        prefill_share=_PREFILL_SHARE,
    )


def _pages(config: GeneratorConfig) -> int:
    return EngineConfig().pages_for(config.max_length)
