"""From what a user names to an engine that runs: checkpoint, draft, kernels, caches, and a summary of the choices."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import EMBEDDED, resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.kernels import KernelChoice, select
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.llama import LlamaDecoder
from slipstream.models.load import load_draft, load_target
from slipstream.speculation.tree import TreeShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class LoadOptions:
    """What to run, and how.

    Args:
        model: a folder, a .gguf file, a hub id, or "embedded".
        draft: a draft's folder or hub id, "ngram", "none", or "auto" (the draft that ships for the embedded model,
            and none for any other).
        dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
        max_context: None takes what the model allows, up to 4096.
        memory_fraction: share of the device's memory for weights and KV cache; it decides the number of pages,
            unless `engine` names one. None leaves that to the engine's settings.
    """

    model: str | Path = EMBEDDED
    draft: str | Path = "auto"
    tree: TreeShape = field(default_factory=TreeShape)
    device: str = "auto"
    dtype: str = "auto"
    kernels: KernelChoice = "auto"
    max_context: int | None = None
    memory_fraction: float | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class Loaded:
    """An engine, its tokenizer, and what was chosen: one line each, for people."""

    engine: Engine
    tokenizer: Tokenizer
    target: LlamaDecoder
    name: str
    summary: tuple[str, ...]


def load(options: LoadOptions) -> Loaded:
    """Read the checkpoints and build the engine."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    path = resolve(options.model)
    source = open_checkpoint(path)
    ops = select(device, options.kernels)
    target = load_target(source, dtype, device)
    max_context = options.max_context or min(_DEFAULT_CONTEXT, target.spec.max_position)
    config = dataclasses.replace(options.engine, max_context=max_context)
    draft, draft_line = _draft(options, target, dtype)
    if options.memory_fraction is not None and config.num_pages is None:
        room = options.memory_fraction * _total_memory(device)
        config = dataclasses.replace(config, num_pages=_pages_that_fit(room, target, draft, options.tree, config))
    engine = build_engine(target, draft, options.tree, config, ops)
    num_pages = config.resolve_num_pages(max(engine.drafter.max_nodes - 1, engine.drafter.scratch))
    kv_bytes = num_pages * config.page_size * target.kv_shape.bytes_per_token(dtype)
    summary = (
        f"model: {options.model} ({target.spec.architecture}, {_parameters(target)}M parameters, "
        f"{str(dtype).removeprefix('torch.')} on {device})",
        f"draft: {draft_line}",
        f"memory: {num_pages} pages of {config.page_size} tokens, {kv_bytes / 2**20:.0f} MiB of keys and values; "
        f"context {max_context}, {config.max_requests} requests at once",
        f"kernels: {ops.promise}",
    )
    return Loaded(engine, Tokenizer.load(path), target, str(options.model), summary)


def _pages_that_fit(
    room: float,
    target: LlamaDecoder,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape,
    config: EngineConfig,
) -> int:
    """Return how many pages `room` bytes hold beside the weights, and no more than the requests can use."""
    models = [target, *([draft] if isinstance(draft, Eagle3Draft) else [])]
    dtype = target.embed_tokens.weight.dtype
    page_bytes = config.page_size * sum(model.kv_shape.bytes_per_token(dtype) for model in models)
    weights = {p.data_ptr(): p.numel() * p.itemsize for model in models for p in model.parameters()}
    extra_slots = 0 if draft is None else max(shape.num_nodes - 1, shape.scratch)
    useful = config.max_requests * config.pages_for(config.max_context + extra_slots)
    fitting = int((room - sum(weights.values())) // page_bytes)
    if fitting < 1:
        raise ConfigError(
            f"memory_fraction leaves {room / 2**30:.1f} GiB, and the weights alone take "
            f"{sum(weights.values()) / 2**30:.1f} GiB. Raise it."
        )
    return min(fitting, useful)


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name}, but torch sees no GPU here; run `slipstream doctor`.")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; it is auto, cpu or cuda[:N].")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it is auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def _draft(
    options: LoadOptions, target: LlamaDecoder, dtype: torch.dtype
) -> tuple[Eagle3Draft | Literal["ngram"] | None, str]:
    """Return the draft and a line that says which it is."""
    wanted: str | Path | None = options.draft
    if wanted == "auto":
        wanted = embedded_draft() if str(options.model) == EMBEDDED else None
    if wanted is None or wanted == "none":
        return None, "none (plain decoding)"
    if wanted == "ngram":
        return "ngram", f"n-gram lookup, {TreeShape.chain(options.tree.depth)}"
    draft = load_draft(open_checkpoint(wanted), target, dtype, target.spec.max_position)
    return draft, f"{Path(wanted).name} (EAGLE-3, {_parameters(draft)}M parameters), {options.tree}"


def _parameters(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}"
