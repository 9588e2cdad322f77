"""The memory plan: what weights take, what a step needs beside them, and how many pages the rest holds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slipstream.engine.config import EngineConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.kernels import KV_FP8
from slipstream.models.block_draft import BlockDraft
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Embedding, Linear
from slipstream.models.moe import Experts
from slipstream.models.target import Target

AnyModel = Target | Eagle3Draft | BlockDraft
DEFAULT_FRACTION = 0.85
_RUNTIME_BYTES = 3 << 30  # kernels' code, their scratch space, and what captured graphs keep beside activations
_LEAST_PAGES = 64  # fewer are no context worth having


class OutOfMemoryError(SlipstreamError):
    """The device's memory ran out, in spite of the plan."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a device's memory is shared out, in bytes, and the pages that come of it."""

    free: int
    reserve: int
    page_bytes: int
    num_pages: int
    max_context: int

    def __str__(self) -> str:
        """Say it in one line, for people."""
        return (
            f"{self.num_pages * self.page_bytes / 2**30:.2f} GiB of pages; {self.free / 2**30:.1f} GiB were free "
            f"after the weights, {self.reserve / 2**30:.1f} GiB of them kept for activations and graphs"
        )


def plan_pages(
    target: Target,
    draft: Eagle3Draft | BlockDraft | None,
    config: EngineConfig,
    extra_slots: int,
    fraction: float,
    shorten: bool = False,
) -> MemoryPlan:
    """Return the plan for a GPU whose weights are loaded: a fraction of what is free, less what a step needs.

    Never more pages than `max_requests` whole contexts can use.

    Args:
        shorten: nobody asked for this context, so where memory cannot hold it a shorter one will do.
    """
    device = target.embed_tokens.device
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(device)[0])
    reserve = activation_bytes(target, config, extra_slots + 1) + _RUNTIME_BYTES
    page_bytes = bytes_per_page([target, *([draft] if draft is not None else [])], config)
    fitting = int((free * fraction - reserve) // page_bytes)
    max_context = config.max_context
    needed = config.pages_for(max_context + extra_slots)
    if shorten and _LEAST_PAGES <= fitting < needed:
        max_context = fitting * config.page_size - extra_slots
        needed = fitting
    if fitting < needed:
        raise ConfigError(
            f"{free / 2**30:.1f} GiB are free on {device} beside the weights; of {fraction:.0%} of that, less "
            f"{reserve / 2**30:.1f} GiB for a step, {max(fitting, 0)} pages can be made, and one request of "
            f"max_context {config.max_context} needs {needed}. Lower max_context or max_batch_tokens, end other "
            "programs on this GPU, or raise the memory fraction."
        )
    return MemoryPlan(free, reserve, page_bytes, min(fitting, config.max_requests * needed), max_context)


def pages_that_fit(room: float, models: Sequence[AnyModel], config: EngineConfig, extra_slots: int) -> int:
    """Return how many pages `room` bytes hold beside the weights, and no more than the requests can use."""
    taken = sum(weight_bytes(model) for model in models)
    fitting = int((room - taken) // bytes_per_page(models, config))
    if fitting < 1:
        raise ConfigError(
            f"memory_fraction leaves {room / 2**30:.1f} GiB, and the weights alone take {taken / 2**30:.1f} GiB. "
            "Raise it."
        )
    return min(fitting, config.max_requests * config.pages_for(config.max_context + extra_slots))


def activation_bytes(target: Target, config: EngineConfig, nodes_per_request: int) -> int:
    """Return a bound on what one step holds beside weights and keys: hidden states of a full batch, and its logits."""
    spec, size = target.spec, target.embed_tokens.dtype.itemsize
    num_tokens = max(config.max_batch_tokens, config.max_requests) + config.max_requests * (nodes_per_request - 1)
    per_token = 8 * spec.hidden_size + 3 * spec.intermediate_size + 4 * spec.num_heads * spec.head_dim
    logits = config.max_requests * nodes_per_request * spec.vocab_size * (size + 4)  # and once more in float32
    return 2 * num_tokens * per_token * size + 2 * logits


def bytes_per_page(models: Sequence[AnyModel], config: EngineConfig) -> int:
    """Return what a page takes in the caches of all models."""
    dtypes = kv_dtypes(models[0], config)
    each = (model.kv_shape.bytes_per_token(dtype) for model, dtype in zip(models, dtypes, strict=False))
    return config.page_size * sum(each)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's own weights, dense and packed; a table used twice in it counts once."""
    packed = {id(part.packed): part.packed for part in model.modules() if isinstance(part, Linear | Embedding)}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    nbytes += sum(stack.nbytes for part in model.modules() if isinstance(part, Experts) for stack in part.packed or ())
    return nbytes + sum(weight.nbytes for weight in packed.values() if weight is not None)


@contextmanager
def explained_out_of_memory(doing: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"The device's memory ran out while {doing}. Give the KV cache less (a lower memory fraction, max_context "
            f"or max_requests), run smaller steps (max_batch_tokens), or end other programs on this device. "
            f"Torch says: {error}"
        ) from error


def kv_dtypes(target: AnyModel, config: EngineConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of the target's keys and values, and of the draft's.

    Where nobody asks for another it is the target's own, or float16 beside weights kept in a GGUF's blocks. Such
    weights have four to eight bits and activations eight, so eleven digits of a key are plenty (bfloat16's eight
    changed texts), and reading half the bytes is a quarter of a step at a few hundred tokens of context. A number
    beyond 65504 is kept as 65504; the embedded model's keys go to about 20.
    """
    own = torch.float16 if target.embed_tokens.packed is not None else target.embed_tokens.dtype
    asked = (config.kv_cache_dtype, config.draft_kv_cache_dtype or config.kv_cache_dtype)
    first, second = (KV_FP8 if dtype == "fp8" else own for dtype in asked)
    return first, second
