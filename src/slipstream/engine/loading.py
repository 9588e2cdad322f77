"""From what a user names to an engine that runs: checkpoint, draft, kernels, caches, and a summary of the choices."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from slipstream.checkpoint.embedded import GGUF_FILE, embedded_draft
from slipstream.checkpoint.hub import EMBEDDED, resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.build import build_engine, default_shape, kv_dtype, paces
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.kernels import KernelChoice, Ops, select
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Embedding, Linear
from slipstream.models.llama import LlamaDecoder
from slipstream.models.load import load_draft, load_target
from slipstream.models.packing import quantize_linears
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
        tree: None drafts chains, each cut where going on would not pay (of three tokens where that cannot be told).
        dtype: "auto" keeps a GGUF's weights (and the embedded model's) as stored where the kernels can, and takes
            float32 on a CPU and bfloat16 on a GPU for the rest; a named type expands a GGUF to it.
        max_context: None takes what the model allows, up to 4096.
        memory_fraction: share of the device's memory for weights and KV cache; it decides the number of pages,
            unless `engine` names one. None leaves that to the engine's settings.
    """

    model: str | Path = EMBEDDED
    draft: str | Path = "auto"
    tree: TreeShape | None = None
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
    ops: Ops
    name: str
    summary: tuple[str, ...]


def load(options: LoadOptions) -> Loaded:
    """Read the checkpoints and build the engine."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    path = resolve(options.model)
    ops = select(device, options.kernels)
    as_stored = options.dtype == "auto" and ops.name == "cpu"  # no other kernels read GGUF blocks fast
    if as_stored and str(options.model) == EMBEDDED:
        path = path / GGUF_FILE
    expand = path.suffix == ".gguf" and not as_stored
    target = load_target(open_checkpoint(path), dtype, device, ops=None if expand else ops)
    max_context = options.max_context or min(_DEFAULT_CONTEXT, target.spec.max_position)
    config = dataclasses.replace(options.engine, max_context=max_context)
    draft, draft_line = _draft(options, target, dtype, ops)
    shape = options.tree or default_shape(draft, ops)
    if options.memory_fraction is not None and config.num_pages is None:
        room = options.memory_fraction * _total_memory(device)
        config = dataclasses.replace(config, num_pages=_pages_that_fit(room, target, draft, shape, config))
    engine = build_engine(target, draft, options.tree, config, ops)
    num_pages = config.resolve_num_pages(max(engine.drafter.max_nodes - 1, engine.drafter.scratch))
    kv_bytes = num_pages * config.page_size * target.kv_shape.bytes_per_token(kv_dtype(target))
    summary = (
        f"model: {options.model} ({target.spec.architecture}, {_weights(target)}, computed on {device} in "
        f"{str(dtype).removeprefix('torch.')})",
        f"draft: {draft_line}",
        f"memory: {num_pages} pages of {config.page_size} tokens, {kv_bytes / 2**20:.0f} MiB of keys and values; "
        f"context {max_context}, {config.max_requests} requests at once",
        f"kernels: {ops.promise}",
    )
    return Loaded(engine, Tokenizer.load(path), target, ops, str(options.model), summary)


def read_draft(path: str | Path, target: LlamaDecoder, dtype: torch.dtype | None, ops: Ops) -> Eagle3Draft:
    """Read an EAGLE-3 draft; without a dtype, dense weights become INT8 where the CPU kernels run (exact all the same).

    A draft only guesses, so its precision costs acceptance at most, and INT8 costs next to none.
    """
    source = open_checkpoint(path)
    draft = load_draft(source, target, dtype or target.embed_tokens.dtype, target.spec.max_position, ops)
    if dtype is None and ops.name == "cpu":
        quantize_linears(draft, ops)
    return draft


def _pages_that_fit(
    room: float,
    target: LlamaDecoder,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape,
    config: EngineConfig,
) -> int:
    """Return how many pages `room` bytes hold beside the weights, and no more than the requests can use."""
    models: list[LlamaDecoder | Eagle3Draft] = [target, *([draft] if isinstance(draft, Eagle3Draft) else [])]
    page_bytes = config.page_size * sum(m.kv_shape.bytes_per_token(kv_dtype(target)) for m in models)
    weight_bytes = sum(_weight_bytes(model) for model in models)
    extra_slots = 0 if draft is None else max(shape.num_nodes - 1, shape.scratch)
    useful = config.max_requests * config.pages_for(config.max_context + extra_slots)
    fitting = int((room - weight_bytes) // page_bytes)
    if fitting < 1:
        raise ConfigError(
            f"memory_fraction leaves {room / 2**30:.1f} GiB, and the weights alone take "
            f"{weight_bytes / 2**30:.1f} GiB. Raise it."
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
    options: LoadOptions, target: LlamaDecoder, dtype: torch.dtype, ops: Ops
) -> tuple[Eagle3Draft | Literal["ngram"] | None, str]:
    """Return the draft and a line that says which it is."""
    wanted: str | Path | None = options.draft
    if wanted == "auto":
        wanted = embedded_draft() if str(options.model) == EMBEDDED else None
    if wanted is None or wanted == "none":
        return None, "none (plain decoding)"
    if wanted == "ngram":
        return "ngram", f"n-gram lookup, {TreeShape.chain((options.tree or TreeShape()).depth)}"
    draft = read_draft(wanted, target, dtype if options.dtype != "auto" else None, ops)
    shape = str(options.tree or default_shape(draft, ops))
    if options.tree is None and paces(draft, ops):
        shape += " at most, ended where going on would not pay"
    return draft, f"{Path(wanted).name} (EAGLE-3, {_weights(draft)}), {shape}"


def _weights(model: torch.nn.Module) -> str:
    return f"{_weight_bytes(model) / 1e6:.0f} MB of weights"


def _weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's own weights, dense and packed; a table used twice in it counts once."""
    packed = {id(part.packed): part.packed for part in model.modules() if isinstance(part, Linear | Embedding)}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return nbytes + sum(weight.nbytes for weight in packed.values() if weight is not None)
