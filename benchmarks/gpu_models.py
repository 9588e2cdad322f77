"""Models and engines for the GPU benchmark: Llama-8B-shaped random weights, and the embedded model from a bundle.

Everything is made from slipstream's own modules and torch, so that it runs where nothing else is installed.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slipstream.checkpoint.spec import DraftSpec, ModelSpec, RopeSpec
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.memory import kv_dtypes
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.interface import Executor
from slipstream.executors.runner import Runner
from slipstream.kernels import Ops
from slipstream.models.context import KvCache, KvShape
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Embedding, Linear
from slipstream.models.rope import Rotary
from slipstream.models.target import Target
from slipstream.quant.formats import fp8
from slipstream.quant.gguf_blocks import dequantize
from slipstream.quant.packed import PackedWeight
from slipstream.speculation.drafter import Drafter, NoDrafter
from slipstream.speculation.eagle3_drafter import Eagle3Drafter
from slipstream.speculation.tree import TreeShape

_ROPE = RopeSpec(500000.0, 128, "llama3", 8.0, 8192, 1.0, 4.0)
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_eps=1e-5,
    rope=_ROPE,
    max_position=16384,
    tie_embeddings=False,
)
SMOLLM_135M = dataclasses.replace(
    LLAMA_8B,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope=RopeSpec(100000.0, 64),
    max_position=8192,
    tie_embeddings=True,
)
TINY = dataclasses.replace(
    LLAMA_8B,
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeSpec(10000.0, 8),
    max_position=2048,
)


@dataclass(frozen=True)
class Bundle:
    """What `gpu_bundle.py` packs for a machine without a network: specs, weights, prompts as token ids."""

    target_spec: ModelSpec
    target_weights: dict[str, torch.Tensor | PackedWeight]
    draft_spec: DraftSpec
    draft_weights: dict[str, torch.Tensor]
    draft_tokens: torch.Tensor
    captured_layers: tuple[int, ...]
    prompts: list[list[int]]
    end_tokens: tuple[int, ...]


def draft_spec(target: ModelSpec, draft_vocab_size: int) -> DraftSpec:
    """Return the usual EAGLE-3 draft of a target: one block of its own shape over a smaller vocabulary."""
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_eps")
    return DraftSpec(
        architecture="LlamaForCausalLMEagle3",
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        num_layers=1,
        rope=target.rope,
        max_position=target.max_position,
        captured_layers=target.default_captured_layers(),
        **{name: getattr(target, name) for name in shared},
    )


def random_target(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Target:
    """Return a target with random weights, made on the device."""
    return _randomised(Target, spec, dtype, device)


def random_draft(target: Target, draft_vocab_size: int) -> Eagle3Draft:
    """Return a random EAGLE-3 draft for a target, sharing its embedding."""
    table = target.embed_tokens
    draft = _randomised(Eagle3Draft, draft_spec(target.spec, draft_vocab_size), table.dtype, table.device)
    draft.share_embedding(table)
    draft.token_ids_V = torch.arange(draft_vocab_size, device=table.device)
    return draft


def pack_fp8(model: nn.Module, ops: Ops, skip: tuple[str, ...] = ("lm_head",)) -> None:
    """Turn a model's linear layers into FP8 with a scale per output channel, but for the names in `skip`."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight is not None and name not in skip:
            codes, scale = fp8.encode_per_channel(module.weight.detach(), "best")
            packed = PackedWeight("fp8_per_channel", len(codes), module.in_features, codes, {"scale": scale})
            module.pack(ops.prepare(packed))


def engine_of(target: Target, draft: Eagle3Draft | None, ops: Ops, config: EngineConfig, num_drafted: int) -> Engine:
    """Build an engine on caches filled with random keys, as a long context would have left them."""
    table = target.embed_tokens
    shape = TreeShape.chain(num_drafted or 1)
    num_pages = config.resolve_num_pages(num_drafted) + config.spare_pages(table.device.type)

    dtypes = kv_dtypes(target, config)

    def cache(kv_shape: KvShape, dtype: torch.dtype) -> KvCache:
        return filled_cache(kv_shape, num_pages, config.page_size, dtype, table.device)

    drafter: Drafter = NoDrafter(table.device)
    if draft is not None:
        layers = draft.spec.captured_layers or target.spec.default_captured_layers()
        drafter = Eagle3Drafter(draft, cache(draft.kv_shape, dtypes[1]), shape, layers, ops)
    runner = Runner(target, cache(target.kv_shape, dtypes[0]), ops, drafter.captured_layers)
    executor: Executor = EagerExecutor(runner, drafter, config.max_requests)
    if config.captures(table.device.type):
        executor = GraphExecutor(runner, drafter, config.max_requests, config.max_context)
    return Engine(executor, config, target.spec)


def filled_cache(shape: KvShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KvCache:
    """Return a cache of random keys and values: zeros would draw less power than real ones do."""
    kv = KvCache.allocate(shape, num_pages, page_size, dtype, device)
    for layer in kv.layers:
        for part, scales_SG in zip((layer.keys_SGd, layer.values_SGd), layer.scales or (None, None), strict=True):
            if scales_SG is None:
                part.normal_()
                continue
            for rows in part.split(1 << 16):
                rows.copy_((100 * torch.randn(rows.shape, device=device)).clamp(-448, 448))
            scales_SG.fill_(127 - 6)
    return kv


def read_bundle(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Bundle, Target, Eagle3Draft]:
    """Return a bundle with its target, expanded to `dtype`, and its draft."""
    bundle: Bundle = torch.load(path, weights_only=False)
    target = _hollow(Target, bundle.target_spec, device)
    modules = dict(target.named_modules())
    for name, value in bundle.target_weights.items():
        dense = dequantize(value.format, value.codes) if isinstance(value, PackedWeight) else value
        path_, _, parameter = name.rpartition(".")
        setattr(modules[path_], parameter, nn.Parameter(dense.to(device, dtype), requires_grad=False))
    if bundle.target_spec.tie_embeddings:
        target.lm_head.weight = target.embed_tokens.weight
    draft = _hollow(Eagle3Draft, bundle.draft_spec, device)
    draft.share_embedding(target.embed_tokens)
    modules = dict(draft.named_modules())
    for name, weight in bundle.draft_weights.items():
        path_, _, parameter = name.rpartition(".")
        setattr(modules[path_], parameter, nn.Parameter(weight.to(device, dtype), requires_grad=False))
    draft.token_ids_V = bundle.draft_tokens.to(device)
    left = [name for model in (target, draft) for name, p in model.named_parameters() if p.is_meta]
    assert not left, f"the bundle lacks {left}"
    return bundle, target.eval(), draft.eval()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor | PackedWeight]:
    """Return a model's parameters by name, packed ones as they are; a table used twice appears once."""
    found: dict[str, torch.Tensor | PackedWeight] = dict(model.named_parameters())
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Linear | Embedding) and module.packed is not None and id(module.packed) not in seen:
            seen.add(id(module.packed))
            found[f"{name}.weight"] = module.packed
    return found


def _hollow(kind: type, spec: ModelSpec | DraftSpec, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = kind(spec)
    for part in model.modules():
        if isinstance(part, Rotary):
            part.fill(device)
    return model


def _randomised(kind: type, spec: ModelSpec | DraftSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    model = _hollow(kind, spec, device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            values = values.normal_(std=0.02) if parameter.dim() > 1 else values.fill_(1.0)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    return model.eval()
