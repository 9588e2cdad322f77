"""Which kernels one pass of a model launches on a GPU, worked out without the GPU and without the weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.checkpoint.spec import ModelSpec
from slipstream.kernels import AttentionBatch, TreePaths
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.record import META, Recorded, recording
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.layers import Linear
from slipstream.models.rope import Rotary
from slipstream.models.target import Target
from slipstream.quant.packed import PackedWeight


@dataclass(frozen=True)
class Workload:
    """A pass: so many requests with so many query tokens each, a bound on their keys, and the type those have.

    Args:
        depth: query tokens are nodes of trees so deep; 0 is chains, and prompts.
    """

    requests: int
    nodes: int
    max_keys: int = 4096
    page_size: int = 16
    keys: torch.dtype = torch.bfloat16
    depth: int = 0


def record_pass(spec: ModelSpec, architecture: str, workload: Workload, weights: str = "dense") -> list[Recorded]:
    """Return what two blocks of a model and its head launch, in order.

    Args:
        weights: "dense" is BF16, "fp8_per_channel" what its name says; of a mixture of experts the experts are BF16.
    """
    with recording(architecture) as launches, torch.no_grad():
        ops = TritonOps(META)
        target = hollow_target(replace(spec, num_layers=min(spec.num_layers, 2)), ops, weights)
        hidden = target(torch.empty(workload.requests * workload.nodes, dtype=torch.int64, device=META),
                        meta_context(ops, target, workload))  # fmt: skip
        target.logits(hidden.last_TD, ops)
    return launches


def hollow_target(spec: ModelSpec, ops: TritonOps, weights: str = "dense") -> Target:
    """Return a target whose tensors have shapes and no numbers."""
    with META:
        target = Target(spec).to(torch.bfloat16)
    for module in target.modules():
        if isinstance(module, Rotary):
            module.fill(META)
        if weights != "dense" and isinstance(module, Linear) and module is not target.lm_head:
            module.pack(ops.prepare(hollow_weight(weights, sum(module.parts.values()), module.in_features)))
    return target


def hollow_weight(format: str, num_outputs: int, num_inputs: int) -> PackedWeight:
    """Return a packed weight of a shape, without numbers."""
    make = _PACKED[format]
    codes, scales = make(num_outputs, num_inputs)
    return PackedWeight(format, num_outputs, num_inputs, codes, scales)


def meta_context(ops: TritonOps, target: Target, workload: Workload) -> PagedContext:
    """Return the context of a pass that has shapes and bounds alone."""
    requests, num_tokens = workload.requests, workload.requests * workload.nodes
    kv = KvCache.allocate(target.kv_shape, 8, workload.page_size, workload.keys, META)
    paths = TreePaths(_empty(torch.int32, requests), _empty(torch.int32, num_tokens, workload.depth))
    batch = AttentionBatch(
        _empty(torch.int32, requests + 1),
        _empty(torch.int32, requests),
        _empty(torch.int32, requests, -(-workload.max_keys // workload.page_size)),
        _empty(torch.int64, num_tokens),
        _empty(torch.int64, num_tokens),
        workload.page_size,
        workload.nodes,
        workload.max_keys,
        paths if workload.depth else None,
    )
    return PagedContext(ops, _empty(torch.int64, num_tokens), _empty(torch.int64, num_tokens), batch, kv)


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _rows(code: torch.dtype, per_byte: int = 1) -> Callable[[int, int], tuple[Tensor, dict[str, Tensor]]]:
    return lambda n, k: (_empty(code, n, k // per_byte), {"scale": _empty(torch.float32, n)})


def _groups(scale: torch.dtype) -> Callable[[int, int], tuple[Tensor, dict[str, Tensor]]]:
    return lambda n, k: (_empty(torch.uint8, n, k // 2), {"scale": _empty(scale, n, k // 32)})


_PACKED: dict[str, Callable[[int, int], tuple[Tensor, dict[str, Tensor]]]] = {
    "fp8_per_channel": _rows(torch.float8_e4m3fn),
    "w8a8_int8": _rows(torch.int8),
    "w4a8": _rows(torch.uint8, 2),
    "int4_per_channel": _rows(torch.uint8, 2),
    "int4_group": _groups(torch.bfloat16),
    "int4_fp8": lambda n, k: (
        _empty(torch.uint8, n, k // 2),
        {"scale": _empty(torch.float32), "scale_2": _empty(torch.float32, n)},
    ),
    "mxfp4": _groups(torch.uint8),
    "mxfp4_act": _groups(torch.uint8),
}
