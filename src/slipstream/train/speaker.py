"""A target that can be talked to: its tokenizer, and an engine that is opened when texts are first asked for."""

import gc
from collections.abc import Callable

import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.memory import bytes_per_page
from slipstream.kernels import select
from slipstream.models.target import Target
from slipstream.train.errors import DataError
from slipstream.train.frame import ChatTokenizer
from slipstream.train.generate import Generator, GeneratorConfig
from slipstream.train.split import SplitTarget

OpenEngine = Callable[[EngineConfig], Engine]

CPU_ROWS = 64
"""Texts at once on a CPU: the fastest number of 8, 16, 32 and 64 (docs/log.md)."""
GPU_ROWS = 512
_KV_SHARE = 0.5


class Speaker:
    """A target, whole or the first rank's part of it; `digest` is that of its weights, which a corpus remembers.

    Args:
        open_engine: makes an engine over the target's weights; by default one that shares the model's.
    """

    def __init__(
        self,
        model: Target | SplitTarget,
        tokenizer: ChatTokenizer,
        digest: str = "",
        open_engine: OpenEngine | None = None,
    ) -> None:
        self.model, self.tokenizer, self.digest = model, tokenizer, digest
        self._open_engine = open_engine or self._share
        self._engine: Engine | None = None
        self._config: GeneratorConfig | None = None

    def generator(self, config: GeneratorConfig, stop_loops: bool | None = None) -> Generator:
        """Return what writes texts; the engine stays open for the next caller with the same settings."""
        eos = self.tokenizer.eos_token_ids
        if not eos:
            raise DataError("The target names no end token (eos_token_id), so its answers would never end.")
        if max(eos) >= self.model.spec.vocab_size:
            raise DataError(
                f"The end token {max(eos)} lies outside the target's vocabulary: the tokenizer is another's."
            )
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
        max_batch_tokens=max(config.prefill_tokens, rows),
    )


def _pages(config: GeneratorConfig) -> int:
    return EngineConfig().pages_for(config.max_length)
