"""Put an engine together: caches sized by the plan, a drafter of the kind asked for."""

import time
from collections.abc import Callable
from typing import Literal

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.runner import Runner
from slipstream.errors import ConfigError
from slipstream.kernels import ChainOps, Ops
from slipstream.models.context import KvCache, KvShape
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.llama import LlamaDecoder
from slipstream.models.load import captured_layers
from slipstream.speculation.controller import ChainController
from slipstream.speculation.drafter import Drafter, NgramDrafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.pace import Pace
from slipstream.speculation.tree import TreeShape

_PACED_DEPTH = 5


def build_engine(
    target: LlamaDecoder,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape | None,
    config: EngineConfig,
    ops: Ops,
) -> Engine:
    """Allocate the caches and return an engine ready to run.

    Without a shape, chains end where going on would not pay (see `paces`), or have the usual length.
    """
    paced = shape is None and paces(draft, ops)
    shape = shape or default_shape(draft, ops)
    if config.max_context > target.spec.max_position:
        raise ConfigError(
            f"max_context is {config.max_context}; the target was made for at most {target.spec.max_position} tokens."
        )
    window = target.spec.sliding_window
    if draft is not None and not shape.is_chain and window is not None and window < config.max_context:
        raise ConfigError(
            f"{shape}: the target attends to the last {window} tokens only, and how many of them a node of a tree sees "
            f"would depend on the tree; draft a chain (width 1), or set max_context to {window} at most."
        )
    dtype, device = kv_dtype(target), target.embed_tokens.device
    extra_slots = 0 if draft is None else max(shape.num_nodes - 1, shape.scratch)
    num_pages = config.resolve_num_pages(extra_slots)

    def cache(kv_shape: KvShape) -> KvCache:
        return KvCache.allocate(kv_shape, num_pages, config.page_size, dtype, device)

    pace = Pace(ChainController(), time.perf_counter) if paced else None
    drafter = _drafter(target, draft, shape, cache, ops, pace)
    runner = Runner(target, cache(target.kv_shape), ops, drafter.captured_layers)
    return Engine(runner, drafter, config, ops, target.spec.vocab_size)


def kv_dtype(target: LlamaDecoder) -> torch.dtype:
    """Return the type of keys and values: the target's own, or bfloat16 beside weights kept in a GGUF's blocks.

    Such weights have four to eight bits and activations eight, so eight of a key's digits are plenty, and reading half
    the bytes is a quarter of a step at a few hundred tokens of context.
    """
    return torch.bfloat16 if target.embed_tokens.packed is not None else target.embed_tokens.dtype


def paces(draft: Eagle3Draft | Literal["ngram"] | None, ops: Ops) -> bool:
    """Tell whether chains can be cut where they stop paying: an EAGLE-3 draft, on kernels that draft whole chains."""
    return isinstance(draft, Eagle3Draft) and isinstance(ops, ChainOps)


def default_shape(draft: Eagle3Draft | Literal["ngram"] | None, ops: Ops) -> TreeShape:
    """Return the shape nobody asked for: longer where chains are cut when they stop paying."""
    return TreeShape.chain(_PACED_DEPTH) if paces(draft, ops) else TreeShape()


def _drafter(
    target: LlamaDecoder,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape,
    cache: Callable[[KvShape], KvCache],
    ops: Ops,
    pace: Pace | None,
) -> Drafter:
    device: torch.device = target.embed_tokens.device
    if draft is None:
        return NoDrafter(device)
    if draft == "ngram":
        return NgramDrafter(shape.depth, device)
    layers = captured_layers(draft.spec, target.spec)
    return Eagle3Drafter(draft, cache(draft.kv_shape), shape, layers, ops, pace)
