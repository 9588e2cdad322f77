"""Builders of tiny random targets and drafts."""

import copy
import dataclasses
import os

import torch
from torch import nn

from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec, ModelSpec, RopeSpec
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.kernels import select
from slipstream.models.accounting import places
from slipstream.models.block_draft import BlockDraft
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

VOCAB = 61
DEVICE = torch.device(os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu"))
"""Where tiny models live: engine tests can be run on a GPU, with its kernels and graphs."""
OPS = select(DEVICE, "reference" if DEVICE.type == "cpu" else "auto")

TARGET_SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=8),
    max_position=256,
    tie_embeddings=False,
)

DRAFT_SPEC = DraftSpec(
    architecture="LlamaForCausalLMEagle3",
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=8),
    max_position=256,
    captured_layers=(1, 2, 4),
)

BLOCK_SPEC = BlockDraftSpec(
    architecture="DFlashDraftModel",
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=8),
    max_position=256,
    block_size=8,
    mask_token_id=7,
    captured_layers=(2, 4),
    windows=(None, None),
    causal=(False, False),
)


def randomise(module: nn.Module, seed: int, scale: float) -> None:
    """Fill every parameter from a seed; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * scale if parameter.dim() > 1 else 1 + 0.1 * noise)


def tiny_target(seed: int = 0, **changes: object) -> Target:
    """Return a random target whose next token depends on its context (weights large enough to matter)."""
    model = Target(dataclasses.replace(TARGET_SPEC, **changes))
    randomise(model, seed, 0.3)
    return model.eval().to(DEVICE)


def stammering_target(vocab_size: int) -> Target:
    """Return a target that often says a token twice or more, which a follower's draft foresees."""
    model = tiny_target(1, vocab_size=vocab_size)
    model.lm_head.weight.copy_(model.embed_tokens.weight)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.mul_(0.2)
        layer.mlp.down_proj.weight.mul_(0.2)
    return model


def tiny_draft(target: Target, seed: int = 1, **changes: object) -> Eagle3Draft:
    """Return a random draft for a target, sharing its embedding."""
    draft = Eagle3Draft(dataclasses.replace(DRAFT_SPEC, **changes))
    randomise(draft, seed, 0.3)
    draft.to(DEVICE)
    draft.share_embedding(target.embed_tokens)
    return draft.eval()


def follower_draft(target: Target, **changes: object) -> Eagle3Draft:
    """Return a draft that guesses well: its own block does nothing, and its head is the target's on the last state."""
    vocab = target.spec.vocab_size
    draft = tiny_draft(target, captured_layers=(4, 4, 4), vocab_size=vocab, draft_vocab_size=vocab, **changes)
    width = target.spec.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, :width].copy_(torch.eye(width))
    for layer in draft.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    draft.norm.weight.copy_(target.norm.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft


def block_draft(target: Target, seed: int = 2, **changes: object) -> BlockDraft:
    """Return a random DFlash draft that speaks the target's vocabulary with its table and head."""
    vocab = target.spec.vocab_size
    draft = BlockDraft(dataclasses.replace(BLOCK_SPEC, vocab_size=vocab, draft_vocab_size=vocab, **changes))
    randomise(draft, seed, 0.3)
    draft.to(DEVICE)
    draft.embed_tokens, draft.lm_head = target.embed_tokens, target.lm_head
    return draft.eval()


def stored_tensors(draft: nn.Module) -> dict[str, torch.Tensor]:
    """Return a draft's tensors as a checkpoint names them."""
    return {
        name: getattr(place.module, place.parameter).narrow(0, place.start, place.shape[0])
        for name, place in places(draft).items()
    }


def recalling_draft(target: Target) -> BlockDraft:
    """Return a DFlash draft that guesses what the target thought of the last tokens: its own states, averaged."""
    draft = block_draft(target, num_layers=1, num_kv_heads=4, captured_layers=(4,), windows=(None,), causal=(False,))
    own, eye = draft.layers[0].self_attn, torch.eye(target.spec.hidden_size)
    draft.fc.weight.copy_(eye)
    draft.hidden_norm.weight.copy_(target.norm.weight)
    own.q_proj.weight.zero_()
    own.kv_proj.weight[len(eye) :].copy_(eye)
    own.o_proj.weight.copy_(8 * eye)
    draft.layers[0].mlp.down_proj.weight.zero_()
    draft.norm.weight.fill_(1)
    return draft


def knowing_half(draft: Eagle3Draft) -> Eagle3Draft:
    """Return a copy of a draft that knows the even tokens only."""
    half = copy.deepcopy(draft)
    half.spec = dataclasses.replace(draft.spec, draft_vocab_size=len(draft.token_ids_V[::2]))
    half.token_ids_V = draft.token_ids_V[::2].clone()
    half.lm_head = Linear(draft.spec.hidden_size, {"lm_head": len(half.token_ids_V)})
    half.lm_head.weight = nn.Parameter(draft.lm_head.weight[::2].clone(), requires_grad=False)
    return half.eval()


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
    """Answer prompts together, checking the engine's invariants after every step."""
    ids = [engine.add(prompt, p, seed) for prompt, p, seed in zip(prompts, params, seeds, strict=True)]
    answers: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for emission in engine.step():
            answers[emission.request_id] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    return [answers[i] for i in ids]


def engine_of(target, draft=None, shape=None, **config) -> Engine:
    """Return an engine with a small cache."""
    defaults = {"max_context": 128, "page_size": 4, "max_requests": 8, "max_batch_tokens": 64}
    return build_engine(target, draft, shape or TreeShape.chain(3), EngineConfig(**{**defaults, **config}), OPS)
