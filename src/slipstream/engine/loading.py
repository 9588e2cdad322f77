"""From what a user names to an engine that runs: checkpoint, draft, kernels, caches, and a summary of the choices."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.draft_config import is_dflash
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import EMBEDDED, is_embedded, resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.build import (
    AnyDraft,
    build_engine,
    build_other_rank,
    copied_nodes,
    draft_shapes,
    extra_slots,
    paces,
)
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import named_device
from slipstream.engine.engine import Engine
from slipstream.engine.memory import (
    DEFAULT_FRACTION,
    AnyModel,
    explained_out_of_memory,
    kv_dtypes,
    pages_that_fit,
    plan_pages,
    weight_bytes,
)
from slipstream.engine.read_draft import read_any_draft
from slipstream.errors import ConfigError
from slipstream.executors.distributed import follow
from slipstream.kernels import KernelChoice, Ops, select
from slipstream.models.block_draft import BlockDraft
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import load_target
from slipstream.models.split import check_draft_split, check_target_split
from slipstream.models.target import Target
from slipstream.models.topology import Topology
from slipstream.ranks.channel import Follower, Leader
from slipstream.ranks.hosts import Hosts
from slipstream.ranks.launch import Seat, leave, run_other, take_seat
from slipstream.speculation.tree import TreeShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_DEFAULTS = (4096, 32, 512)
_GPU_DEFAULTS = (1 << 20, 64, 8192)
"""Where nobody says: the longest context (a model's own may be shorter), requests at once, tokens of a step."""
_USUAL_POSITIONS = 1 << 17
"""Rotary tables are this long at most (tens of MB) unless a longer context is asked for: configs may say any."""
_ROOM_FOR_DRAFTS = 256  # slots beside a context that fills all pages, for the nodes of a tree
_DRAFTED_POSITIONS = 1024  # drafted tokens may lie past the context's end before they are dropped


@dataclass(frozen=True)
class LoadOptions:
    """What to run, and how.

    Args:
        model: a folder, a .gguf file, a hub id, or "embedded" ("auto" means the same).
        draft: a draft's folder or hub id, "ngram", "none", or "auto" (the draft that ships for the embedded model,
            and none for any other; "embedded" means the same).
        draft_window: how many of the last tokens the draft attends to; None: as it was trained.
        tree: None drafts as far as pays by what it takes and what is kept (three tokens where that cannot be told).
        dtype: "auto" keeps a GGUF's weights (and the embedded model's) as stored where the kernels can, and takes
            float32 on a CPU and bfloat16 on a GPU for the rest; a named type expands a GGUF to it.
        tiles: tile shapes of the experts' products in place of the shipped ones, by name (`stage2.block_k`); no answer
            depends on them.
        max_context: None takes what the model allows: up to 4096 on a CPU, and what memory holds on a GPU; with a
            memory fraction, up to what fits in it (and 131072), as the servers do whose launch lines name one.
        max_requests: requests that run at once; None takes 32 on a CPU and 64 on a GPU.
        max_batch_tokens: query tokens of one step; None takes 512 on a CPU and 8192 on a GPU.
        memory_fraction: share of the device's memory for weights and KV cache; it decides the number of pages,
            unless `engine` names one. None takes 85% of what is free on a GPU once the weights are there, less what
            a step needs, and leaves it to the engine's settings on a CPU.
        topology: over how many processes the model is split.
        hosts: which of several machines this is, where the processes are on more than one.
    """

    model: str | Path = EMBEDDED
    draft: str | Path = "auto"
    tree: TreeShape | None = None
    device: str = "auto"
    dtype: str = "auto"
    kernels: KernelChoice = "auto"
    tiles: Mapping[str, int] = field(default_factory=dict)
    max_context: int | None = None
    max_requests: int | None = None
    max_batch_tokens: int | None = None
    memory_fraction: float | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    topology: Topology = field(default_factory=Topology)
    hosts: Hosts = field(default_factory=Hosts)
    draft_window: int | None = None

    def __post_init__(self) -> None:
        if is_embedded(self.model):
            object.__setattr__(self, "model", EMBEDDED)
        if str(self.draft) == EMBEDDED:
            object.__setattr__(self, "draft", "auto")
        for name in ("max_context", "max_requests", "max_batch_tokens", "draft_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it lies above 0 and is at most 1.")


@dataclass(frozen=True)
class Loaded:
    """An engine, its tokenizer, and what was chosen: one line each, for people."""

    engine: Engine
    tokenizer: Tokenizer
    target: Target
    ops: Ops
    name: str
    summary: tuple[str, ...]
    seat: Seat

    def close(self) -> None:
        """End the other ranks, if there are any."""
        leave(self.seat)


def load(options: LoadOptions) -> Loaded:
    """Read the checkpoints, build the engine and make it ready.

    Where the model is split, the other ranks are started here, or joined if torchrun started them. In a process that
    is another rank (torchrun's, or another host's) this never returns: it serves the first rank until that is done,
    then exits.
    """
    device = named_device(options.device)
    _check_split(options, device)
    seat = take_seat(options.topology, device, _follow, options, options.hosts)
    if isinstance(seat.channel, Follower):
        run_other(seat, _follow, options)
        raise SystemExit(0)
    try:
        return _lead(options, seat)
    except BaseException:
        leave(seat)
        raise


def _check_split(options: LoadOptions, device: torch.device) -> None:
    """Refuse what cannot be split before a rank is started: here it is a sentence, there the end of a group."""
    if options.topology == Topology():
        return
    ops = select(device, options.kernels, options.tiles)
    path, kept_for = _target_path(options, ops)
    source = open_checkpoint(path)
    check_target_split(source, options.topology, kept_for)
    draft = _draft_path(options)
    if draft is not None and draft != "ngram":
        spec, draft_source = model_spec(source.config, source.folder), open_checkpoint(draft)
        if is_dflash(draft_source.config):
            raise ConfigError(
                f"{draft}: is a DFlash draft, which runs beside a target on one device, and this one is to be split. "
                "Leave the split out, or give an EAGLE-3 draft."
            )
        check_draft_split(draft_source, spec, options.topology, ops)


def _target_path(options: LoadOptions, ops: Ops) -> tuple[Path, Ops | None]:
    """Return what the target is read from, and the kernels its packed weights are kept for (None: expanded)."""
    path = resolve(options.model)
    as_stored = options.dtype == "auto" and ops.name == "cpu"  # no other kernels read GGUF blocks fast
    return path, None if path.suffix == ".gguf" and not as_stored else ops


def _draft_path(options: LoadOptions) -> str | Path | None:
    """Return the draft to read, "ngram", or None."""
    if options.draft == "auto":
        return embedded_draft() if str(options.model) == EMBEDDED else None
    return None if options.draft == "none" else options.draft


@dataclass(frozen=True)
class _Parts:
    """What one rank read."""

    path: Path
    dtype: torch.dtype
    ops: Ops
    target: Target
    draft: AnyDraft
    draft_line: str
    config: EngineConfig
    memory_line: str
    tokenizer: Tokenizer | None  # the first rank's


def _read(options: LoadOptions, seat: Seat) -> _Parts:
    """Read this rank's part of the target, and the draft if this rank has any of it."""
    device = seat.device
    dtype = _dtype(options.dtype, device)
    ops = select(device, options.kernels, options.tiles)
    path, kept_for = _target_path(options, ops)
    source = open_checkpoint(path)
    allowed = model_spec(source.config, source.folder).max_position
    # A missing tokenizer is found before hundreds of gigabytes are read.
    tokenizer = Tokenizer.load(path) if seat.ranks.rank == 0 else None
    usual_context, usual_requests, usual_tokens = _GPU_DEFAULTS if device.type == "cuda" else _CPU_DEFAULTS
    if options.memory_fraction is not None:
        usual_context = _USUAL_POSITIONS
    max_context = options.max_context or min(usual_context, allowed)
    positions = min(allowed, max(_USUAL_POSITIONS, max_context + _DRAFTED_POSITIONS))
    target = load_target(source, dtype, device, positions, kept_for, seat.ranks, max_context)
    config = dataclasses.replace(
        options.engine,
        max_context=max_context,
        max_requests=options.max_requests or usual_requests,
        max_batch_tokens=options.max_batch_tokens or usual_tokens,
    )
    has_draft = seat.ranks.rank == 0 or options.topology.draft_tp > 1
    draft, draft_line = _draft(options, target, dtype, ops) if has_draft else (None, "on the first rank")
    copied = copied_nodes(target, draft, options.tree, config, ops)
    shapes = draft_shapes(target, draft, options.tree, config, ops)
    slots = extra_slots(draft, shapes, copied)
    if isinstance(draft, BlockDraft):
        draft_line += f", {shapes[0]}, in eager steps: no captured steps or rounds in C++ run this kind of draft"
    if isinstance(draft, Eagle3Draft):
        draft_line += f", {_drafted(shapes, paced=options.tree is None and paces(draft, ops))}"
    if copied and draft != "ngram":
        draft_line += f", and up to {copied} nodes copied from the text"
    config, memory_line = _with_pages(options, target, draft, config, slots)
    return _Parts(path, dtype, ops, target, draft, draft_line, config, memory_line, tokenizer)


def _follow(options: LoadOptions, seat: Seat) -> None:
    """Be a rank other than the first: read, say how many pages fit, and run what the first announces."""
    channel = seat.channel
    assert isinstance(channel, Follower)
    parts = _read(options, seat)
    channel.answer(parts.config.num_pages)
    num_pages = channel.receive()
    if num_pages is None:  # the first rank could not go on
        return
    assert isinstance(num_pages, int)
    draft = parts.draft if isinstance(parts.draft, Eagle3Draft) else None
    shape = draft_shapes(parts.target, draft, options.tree, parts.config, parts.ops)[0]
    config = dataclasses.replace(parts.config, num_pages=num_pages)
    follow(channel, build_other_rank(parts.target, draft, shape, config, parts.ops, channel))


def _lead(options: LoadOptions, seat: Seat) -> Loaded:
    """Be the first rank, or the only one."""
    with explained_out_of_memory("the models were loaded"):
        parts = _read(options, seat)
        leader = seat.channel if isinstance(seat.channel, Leader) else None
        fitting = [] if leader is None else [count for count in leader.collect() if count is not None]
        config = parts.config
        if fitting and config.num_pages is not None:
            config = _context_within(options, dataclasses.replace(config, num_pages=min(config.num_pages, *fitting)))
        engine = build_engine(parts.target, parts.draft, options.tree, config, parts.ops, leader)
        assert parts.tokenizer is not None, "this is the first rank"
        return Loaded(
            engine,
            parts.tokenizer,
            parts.target,
            parts.ops,
            str(options.model),
            _summary(options, seat, dataclasses.replace(parts, config=config), engine),
            seat,
        )


def _summary(options: LoadOptions, seat: Seat, parts: _Parts, engine: Engine) -> tuple[str, ...]:
    config, target, dtype = parts.config, parts.target, parts.dtype
    num_pages = config.resolve_num_pages(max(engine.drafter.max_nodes - 1, engine.drafter.scratch))
    kv_type = kv_dtypes(target, config)[0]
    kv_bytes = num_pages * config.page_size * target.kv_shape.bytes_per_token(kv_type)
    lines = [
        f"model: {options.model} ({target.spec.architecture}, {_weights(target)}, computed on {seat.device} in "
        f"{str(dtype).removeprefix('torch.')})",
        f"draft: {parts.draft_line}",
        f"memory: {num_pages} pages of {config.page_size} tokens, {kv_bytes / 2**20:.0f} MiB of keys and values "
        f"({str(kv_type).removeprefix('torch.')}); "
        f"context {config.max_context}, {config.max_requests} requests at once{parts.memory_line}",
        f"kernels: {parts.ops.promise}",
        *_warm_up(engine),
    ]
    if seat.ranks.size > 1:
        draft = "split as well" if options.topology.draft_tp > 1 else "whole, on the first"
        lines.append(f"ranks: {options.topology}; weights and memory above are the first rank's; the draft is {draft}")
    return tuple(lines)


def _with_pages(
    options: LoadOptions,
    target: Target,
    draft: AnyDraft,
    config: EngineConfig,
    slots: int,
) -> tuple[EngineConfig, str]:
    """Return the settings with their number of pages, where memory decides it, and a line on how it did."""
    if config.num_pages is not None:
        return config, ""
    device = target.embed_tokens.device
    model = None if draft == "ngram" else draft
    if options.memory_fraction is not None:
        sharing = target.ranks.size // options.hosts.nnodes if device.type == "cpu" else 1  # a host's have one memory
        room = options.memory_fraction * _total_memory(device) / sharing
        models: list[AnyModel] = [target, *([model] if model is not None else [])]
        num_pages = pages_that_fit(room, models, config, slots)
        return _context_within(options, dataclasses.replace(config, num_pages=num_pages)), ""
    if device.type != "cuda":
        return config, ""
    plan = plan_pages(target, model, config, slots, DEFAULT_FRACTION, shorten=options.max_context is None)
    return dataclasses.replace(config, num_pages=plan.num_pages, max_context=plan.max_context), f" ({plan})"


def _context_within(options: LoadOptions, config: EngineConfig) -> EngineConfig:
    """Return settings whose context fits in their pages, where nobody asked for a longer one."""
    assert config.num_pages is not None, "called once memory has decided"
    if options.max_context is not None:
        return config
    room = config.num_pages * config.page_size - _ROOM_FOR_DRAFTS
    return dataclasses.replace(config, max_context=max(1, min(config.max_context, room)))


def _warm_up(engine: Engine) -> tuple[str, ...]:
    """Make decoding ready and return lines on what that took, if it took anything."""
    return tuple(engine.warm_up())


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it is auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def _draft(options: LoadOptions, target: Target, dtype: torch.dtype, ops: Ops) -> tuple[AnyDraft, str]:
    """Return the draft and a line that says which it is."""
    wanted = _draft_path(options)
    if wanted is None:
        return None, "none (plain decoding)"
    if wanted == "ngram":
        return "ngram", f"n-gram lookup, {TreeShape.chain((options.tree or TreeShape()).depth)}"
    draft_dtype = dtype if options.dtype != "auto" else None
    draft = read_any_draft(wanted, target, draft_dtype, ops, split=options.topology.draft_tp > 1)
    if isinstance(draft, BlockDraft):
        _check_alone(options)
        return draft, f"{Path(wanted).name} (DFlash, blocks of {draft.spec.block_size}, {_weights(draft)})"
    if options.draft_window is not None:
        if draft.spec.mla is not None:
            raise ConfigError("draft_window is given, and this draft attends over latents, which have no window.")
        draft.see_last(options.draft_window)
    return draft, f"{Path(wanted).name} (EAGLE-3, {_weights(draft)})"


def _check_alone(options: LoadOptions) -> None:
    """Refuse what is asked of a DFlash draft and is not done with it."""
    if options.draft_window is not None:
        raise ConfigError("draft_window is given, and a DFlash draft sees as far as its own config.json says.")
    if options.engine.copied_tokens:
        raise ConfigError("copied_tokens is given, and nothing is copied from the text beside a DFlash draft.")


def _drafted(shapes: Sequence[TreeShape], *, paced: bool) -> str:
    """Say what a draft drafts."""
    if len(shapes) > 1:
        return "as far as pays: " + ", ".join(map(str, shapes)) + ", or nothing"
    return f"{shapes[0]}{' at most, ended where going on would not pay' if paced else ''}"


def _weights(model: torch.nn.Module) -> str:
    return f"{weight_bytes(model) / 1e6:.0f} MB of weights"
