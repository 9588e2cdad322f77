"""Put an engine together: caches sized by the plan, a drafter of the kind asked for."""

import time
from collections.abc import Sequence
from typing import Literal

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.memory import kv_dtypes
from slipstream.errors import ConfigError
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.distributed import LeadingExecutor, Told
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import Executor
from slipstream.executors.native import NativeExecutor
from slipstream.executors.runner import Runner
from slipstream.kernels import ChainOps, Ops
from slipstream.kernels.triton.tuning import architecture_of, has_fp8
from slipstream.models.block_draft import BlockDraft
from slipstream.models.context import KvCache
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers
from slipstream.models.target import Target
from slipstream.ranks.channel import Follower, Leader
from slipstream.speculation.block_drafter import BlockDrafter, shape_in_block, whole_block
from slipstream.speculation.borrowed import Borrowers, Lender
from slipstream.speculation.controller import ChainController
from slipstream.speculation.copying import Copier
from slipstream.speculation.drafter import CopyDrafter, Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Beside, Eagle3Drafter, most_nodes
from slipstream.speculation.pace import Pace
from slipstream.speculation.tree import TreeShape

AnyDraft = Eagle3Draft | BlockDraft | Literal["ngram"] | None
_PACED_DEPTH, _PACED_COPIES = 5, 16
_MENU = (*(TreeShape.chain(length) for length in (3, 7)), TreeShape(depth=5, width=4, budget=15))
"""What captured steps choose among where nobody asked for a shape; rows that run eagerly are drafted the first."""


def build_engine(
    target: Target,
    draft: AnyDraft,
    shape: TreeShape | None,
    config: EngineConfig,
    ops: Ops,
    leader: Leader | None = None,
) -> Engine:
    """Allocate the caches and return an engine ready to run.

    Args:
        shape: None lets each step draft what pays (see `draft_shapes`).
        leader: the way to the other ranks, where the target is split; they are told how many pages to allocate.
    """
    copied = copied_nodes(target, draft, shape, config, ops)
    shapes = draft_shapes(target, draft, shape, config, ops)
    paced = shape is None and len(shapes) == 1 and paces(draft, ops)
    if config.max_context > target.spec.max_position:
        raise ConfigError(
            f"max_context is {config.max_context}; the target was made for at most {target.spec.max_position} tokens."
        )
    _check_kv(target, config, ops)
    num_pages = config.resolve_num_pages(extra_slots(draft, shapes, copied))
    caches = _Caches(target, config, num_pages + config.spare_pages(target.embed_tokens.device.type))
    pace = Pace(ChainController(), time.perf_counter) if paced else None
    copier = Copier.on(ops, copied, config.earlier_tokens) if copied else None
    beside = Beside(borrowers_of(target, draft, config, ops), copier, shapes)
    drafter = _drafter(target, draft, shapes[0], caches, ops, pace, beside)
    runner = Runner(target, caches.of_target(), ops, drafter.captured_layers)
    if leader is None:
        return Engine(_executor(runner, drafter, config), config, target.spec)
    leader.send(num_pages)
    split = isinstance(draft, Eagle3Draft) and draft.ranks.size > 1
    executor = LeadingExecutor(runner, drafter, config.max_requests, Told(leader, split), leader)
    return Engine(executor, config, target.spec)


def build_other_rank(
    target: Target, draft: Eagle3Draft | None, shape: TreeShape, config: EngineConfig, ops: Ops, channel: Follower
) -> EagerExecutor:
    """Allocate what a rank other than the first holds, with as many pages as the first decided on.

    Args:
        draft: this rank's part of the draft, if it is split.
    """
    assert config.num_pages is not None, "the first rank said how many"
    caches = _Caches(target, config, config.num_pages)
    drafter = _drafter(target, draft, shape, caches, ops)
    runner = Runner(target, caches.of_target(), ops, drafter.captured_layers)
    return EagerExecutor(runner, drafter, config.max_requests, Told(channel, draft is not None))


def _executor(runner: Runner, drafter: Drafter, config: EngineConfig) -> Executor:
    """Return what runs steps fastest on this device."""
    if config.captures(runner.device.type) and GraphExecutor.supports(runner, drafter):
        return GraphExecutor(runner, drafter, config.max_requests, config.max_context)
    if NativeExecutor.supports(runner, drafter):
        return NativeExecutor(runner, drafter, config.max_requests)
    return EagerExecutor(runner, drafter, config.max_requests)


def paces(draft: AnyDraft, ops: Ops) -> bool:
    """Tell whether chains can be cut where they stop paying: an EAGLE-3 draft, on kernels that draft whole chains."""
    return isinstance(draft, Eagle3Draft) and draft.ranks.size == 1 and isinstance(ops, ChainOps)


def draft_shapes(
    target: Target,
    draft: AnyDraft,
    asked: TreeShape | None,
    config: EngineConfig,
    ops: Ops,
) -> tuple[TreeShape, ...]:
    """Return what rows are drafted: what was asked for, or what captured steps choose among.

    Elsewhere it is one chain: longer where it is cut when it stops paying.
    """
    if isinstance(draft, BlockDraft):
        size = draft.spec.block_size
        return (whole_block(size) if asked is None else shape_in_block(asked, size),)
    if asked is not None:
        return (asked,)
    if isinstance(draft, Eagle3Draft):
        alone = target.ranks.size == 1 and draft.ranks.size == 1
        if alone and config.captures(target.embed_tokens.device.type):
            return _MENU
        if paces(draft, ops):
            return (TreeShape.chain(_PACED_DEPTH),)
    return (TreeShape(),)


def copied_nodes(
    target: Target,
    draft: AnyDraft,
    asked: TreeShape | None,
    config: EngineConfig,
    ops: Ops,
) -> int:
    """Return how many nodes may be copied beside a draft's, where both models are whole and steps drafted on the host.

    Args:
        asked: the shape somebody asked for; None if nobody did.
    """
    device = target.embed_tokens.device.type
    if draft == "ngram":
        return (asked or TreeShape()).depth
    if not isinstance(draft, Eagle3Draft) or target.ranks.size > 1 or draft.ranks.size > 1:
        return 0
    if not config.drafts_on_host(device):
        return 0
    if config.copied_tokens is not None:
        return config.copied_tokens
    return _PACED_COPIES if asked is None and paces(draft, ops) else 0


def extra_slots(draft: AnyDraft, shapes: Sequence[TreeShape], copied: int) -> int:
    """Return how many slots past a request's last token a step may need."""
    if draft is None or draft == "ngram":
        return 0 if draft is None else copied
    return max(max(most_nodes(shape, copied) - 1, shape.scratch) for shape in shapes)


def _drafter(
    target: Target,
    draft: AnyDraft,
    shape: TreeShape,
    caches: "_Caches",
    ops: Ops,
    pace: Pace | None = None,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
) -> Drafter:
    device: torch.device = target.embed_tokens.device
    if draft is None:
        return NoDrafter(device)
    if draft == "ngram":
        return CopyDrafter(beside.copier or Copier.on(ops, shape.depth), device)
    if isinstance(draft, BlockDraft):
        return BlockDrafter(draft, caches.of_draft(draft), shape, ops)
    layers = captured_layers(draft.spec, target.spec)
    return Eagle3Drafter(draft, caches.of_draft(draft), shape, layers, ops, pace, beside)


class _Caches:
    """Allocates keys and values of the target and of the draft, of as many pages."""

    def __init__(self, target: Target, config: EngineConfig, num_pages: int) -> None:
        self._target, self._paging = target, (num_pages, config.page_size)
        self._dtypes = kv_dtypes(target, config)

    def of_target(self) -> KvCache:
        """Return the target's."""
        return KvCache.allocate(self._target.kv_shape, *self._paging, self._dtypes[0], self._target.embed_tokens.device)

    def of_draft(self, draft: Eagle3Draft | BlockDraft) -> KvCache:
        """Return the draft's."""
        return KvCache.allocate(draft.kv_shape, *self._paging, self._dtypes[1], self._target.embed_tokens.device)


def _check_kv(target: Target, config: EngineConfig, ops: Ops) -> None:
    """Refuse FP8 keys and latents where kernels cannot read them."""
    if "fp8" not in (config.kv_cache_dtype, config.draft_kv_cache_dtype) or ops.name != "triton":
        return
    architecture = architecture_of(target.embed_tokens.device)
    if not has_fp8(architecture):
        raise ConfigError(f"kv_cache_dtype is 'fp8', and {architecture} has no instructions for FP8: leave it out.")
    if config.kv_cache_dtype == "fp8" and target.spec.mla is not None:
        raise ConfigError(
            "kv_cache_dtype is 'fp8', and the GPU kernels read this target's latents in the type it computes in: leave "
            "it out. A latent takes a fraction of what keys and values would."
        )


def borrowers_of(
    target: Target,
    draft: AnyDraft,
    config: EngineConfig,
    ops: Ops,
    like: Borrowers | None = None,
) -> Borrowers | None:
    """Return what lets requests borrow tokens the draft does not know, where both models are whole and on a CPU.

    Args:
        like: that of the draft before, which this one was trained on from.
    """
    if not isinstance(draft, Eagle3Draft) or target.ranks.size > 1 or draft.ranks.size > 1:
        return None
    if config.borrowed_tokens == 0 or not config.drafts_on_host(target.embed_tokens.device.type):
        return None
    with torch.inference_mode():
        lender = Lender.fit(draft, target, ops, None if like is None else like.lender)
    return None if lender is None else Borrowers(lender, config.borrowed_tokens)
