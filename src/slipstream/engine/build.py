"""Put an engine together: caches sized by the plan, a drafter of the kind asked for."""

from collections.abc import Callable
from typing import Literal

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.runner import Runner
from slipstream.errors import ConfigError
from slipstream.kernels import Ops
from slipstream.models.context import KvCache, KvShape
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers
from slipstream.models.target import Target
from slipstream.speculation.drafter import Drafter, NgramDrafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.tree import TreeShape


def build_engine(
    target: Target,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape,
    config: EngineConfig,
    ops: Ops,
) -> Engine:
    """Allocate the caches and return an engine ready to run."""
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
    dtype, device = target.embed_tokens.dtype, target.embed_tokens.device
    extra_slots = 0 if draft is None else max(shape.num_nodes - 1, shape.scratch)
    num_pages = config.resolve_num_pages(extra_slots)

    def cache(kv_shape: KvShape) -> KvCache:
        return KvCache.allocate(kv_shape, num_pages, config.page_size, dtype, device)

    drafter = _drafter(target, draft, shape, cache, ops)
    runner = Runner(target, cache(target.kv_shape), ops, drafter.captured_layers)
    return Engine(runner, drafter, config, ops, target.spec.vocab_size)


def _drafter(
    target: Target,
    draft: Eagle3Draft | Literal["ngram"] | None,
    shape: TreeShape,
    cache: Callable[[KvShape], KvCache],
    ops: Ops,
) -> Drafter:
    device: torch.device = target.embed_tokens.device
    if draft is None:
        return NoDrafter(device)
    if draft == "ngram":
        return NgramDrafter(shape.depth, device)
    layers = captured_layers(draft.spec, target.spec)
    return Eagle3Drafter(draft, cache(draft.kv_shape), shape, layers, ops)
