"""One rank of a full-size model: its share of the shapes, and weights that are random but as large as the real ones."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import DraftSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec, RoutingSpec
from slipstream.errors import ConfigError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import RMSNorm
from slipstream.models.moe import Experts
from slipstream.models.rope import Rotary
from slipstream.models.target import Target
from slipstream.quant.packed import ExpertWeights

EXPERT_FORMATS = ("w4a8", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act", "fp8_block", "dense")
ROUTINGS = ("spread", "clustered")
_INT4_SPREAD = 4.6  # the standard deviation of uniform codes -8 to 7
_MXFP4_SPREAD = 2.8
_FP8_SPREAD = 90.0  # of a weight's FP8 codes whose largest, some five times as large, is 448


@dataclass(frozen=True)
class RankModel:
    """A model whose ranks can be measured: the whole target, the draft it is served with, its experts' format."""

    target: ModelSpec
    draft: DraftSpec
    experts: str


def _kimi() -> RankModel:
    """Return the text part of Kimi-K2.5 and lightseekorg/kimi-k2.5-eagle3, as their config.json files say."""
    yarn = 0.1 * math.log(64) + 1
    rope = RopeSpec(50000.0, 64, "yarn", 64.0, 4096)
    mla = MlaSpec(1536, 512, 128, 64, 128, 192**-0.5 * yarn * yarn)
    moe = MoeSpec(384, 2048, RoutingSpec(8, scale=2.827), shared_size=2048, dense_layers=(0,))
    target = ModelSpec(
        "KimiK25ForConditionalGeneration", 163840, 7168, 18432, 61, 64, 64, 192, 1e-5, rope, 262144, False,
        mla=mla, moe=moe, dtype="bfloat16",
    )  # fmt: skip
    draft = DraftSpec(
        "LlamaForCausalLMEagle3", 163840, 163840, 7168, 7168, 12288, 1, 64, 64, 128, 1e-6, RopeSpec(1e6, 128), 262144
    )
    return RankModel(target, draft, "w4a8")


def _minimax() -> RankModel:
    """Return MiniMax-M2.5 as its config.json says, and a draft as large as the published one's file (464 MB)."""
    moe = MoeSpec(256, 1536, RoutingSpec(8))
    target = ModelSpec(
        "MiniMaxM2ForCausalLM", 200064, 3072, 1536, 62, 48, 8, 128, 1e-6, RopeSpec(5e6, 64), 196608, False,
        qk_norm="full", moe=moe, dtype="bfloat16",
    )  # fmt: skip
    draft = DraftSpec(
        "LlamaForCausalLMEagle3", 200064, 32000, 3072, 3072, 7168, 1, 24, 8, 128, 1e-6, RopeSpec(5e6, 128), 196608
    )
    return RankModel(target, draft, "fp8_block")


def _tiny(model: RankModel) -> RankModel:
    """Return the same architecture in proportions a test can afford."""
    target, mla, moe = model.target, model.target.mla, model.target.moe
    assert moe is not None
    if mla is not None:
        mla = replace(mla, q_rank=48, kv_rank=64, nope_dim=16, rope_dim=8, value_dim=16)
    shared = 64 if moe.shared_size else 0
    moe = replace(moe, num_experts=8, intermediate_size=64, shared_size=shared, routing=replace(moe.routing, top_k=2))
    rope = replace(target.rope, rotary_dim=8)
    target = replace(
        target, vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
        num_kv_heads=4 if mla else 2, head_dim=24 if mla else 32, rope=rope, mla=mla, moe=moe,
    )  # fmt: skip
    draft = replace(
        model.draft, vocab_size=256, draft_vocab_size=256, hidden_size=128, target_hidden_size=128,
        intermediate_size=128, num_heads=4, num_kv_heads=4, head_dim=32, rope=RopeSpec(1e6, 32),
    )  # fmt: skip
    return RankModel(target, draft, model.experts)


def rank_of(name: str, num_ranks: int, tiny: bool = False) -> RankModel:
    """Return the shapes of one of `num_ranks` tensor-parallel ranks.

    Heads, vocabulary and the inner widths of feed-forward parts and experts are divided; the squeezed projections of
    latent attention, the router and the norms are on every rank.
    """
    if name not in MODELS:
        raise ConfigError(f"There is no rank mode for model {name!r}; there is for {', '.join(MODELS)}.")
    if num_ranks < 1:
        raise ConfigError(f"--tp {num_ranks}: at least one rank is needed.")
    whole = _tiny(MODELS[name]) if tiny else MODELS[name]
    target, draft, moe = whole.target, whole.draft, whole.target.moe
    assert moe is not None
    shares = {
        "attention heads": target.num_heads,
        "key heads": target.num_kv_heads,
        "vocabulary": target.vocab_size,
        "feed-forward width": target.intermediate_size,
        "expert width": moe.intermediate_size // 32,  # blocks of 32 columns stay whole
        "draft heads": draft.num_heads,
    }
    for what, size in shares.items():
        if size % num_ranks:
            raise ConfigError(f"--tp {num_ranks}: {name} has {what} {size}, which {num_ranks} ranks cannot share.")
    moe = replace(moe, intermediate_size=moe.intermediate_size // num_ranks, shared_size=moe.shared_size // num_ranks)
    target = replace(
        target,
        vocab_size=target.vocab_size // num_ranks,
        intermediate_size=target.intermediate_size // num_ranks,
        num_heads=target.num_heads // num_ranks,
        num_kv_heads=target.num_kv_heads // num_ranks,
        moe=moe,
    )
    draft = replace(
        draft,
        vocab_size=draft.vocab_size // num_ranks,
        draft_vocab_size=draft.draft_vocab_size // num_ranks,
        intermediate_size=draft.intermediate_size // num_ranks,
        num_heads=draft.num_heads // num_ranks,
        num_kv_heads=draft.num_kv_heads // num_ranks,
    )
    return RankModel(target, draft, whole.experts)


def build_target(
    spec: ModelSpec, expert_format: str, max_position: int, device: torch.device, routing: str = "spread"
) -> Target:
    """Return the rank's target with random weights, made on the device: experts packed, the rest in bfloat16.

    Args:
        routing: "spread" or "clustered" (see `random_experts`).
    """
    if routing not in ROUTINGS:
        raise ConfigError(f"--routing {routing}: random weights can be {' or '.join(ROUTINGS)}.")
    if expert_format not in EXPERT_FORMATS:
        raise ConfigError(f"--format {expert_format}: experts can be {', '.join(EXPERT_FORMATS)}.")
    with torch.device("meta"):
        target = Target(spec, max_position)
    for module in target.modules():
        if isinstance(module, Experts):
            width, inner, number = module.width, module.intermediate, module.held.size
            module.pack(
                random_experts(expert_format, (number, 2 * inner, width), device, routing),
                random_experts(expert_format, (number, width, inner), device, routing),
            )
    _fill(target, device)
    return target


def build_draft(spec: DraftSpec, max_position: int, device: torch.device) -> Eagle3Draft:
    """Return the rank's draft with random weights in bfloat16, made on the device."""
    with torch.device("meta"):
        draft = Eagle3Draft(spec, max_position)
    draft.token_ids_V = torch.arange(spec.draft_vocab_size, device=device)
    _fill(draft, device)
    return draft


def _fill(model: nn.Module, device: torch.device) -> None:
    """Give every parameter its memory and values of a size that keeps the stream finite."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fill(device)
        for name, parameter in module.named_parameters(recurse=False):
            dtype = torch.float32 if name == "e_score_correction_bias" else torch.bfloat16
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            if isinstance(module, RMSNorm):
                values.fill_(1.0)
            elif parameter.ndim == 1:
                values.zero_()
            else:
                values.normal_(0.0, parameter.shape[-1] ** -0.5)
            setattr(module, name, nn.Parameter(values, requires_grad=False))


def random_experts(
    name: str, shape: tuple[int, int, int], device: torch.device, routing: str = "spread"
) -> ExpertWeights:
    """Return experts of random codes; scales make their numbers as large as a random weight's usually are.

    INT4 codes are -7 to 7 (zero twice as often), so that their mean is zero as a trained weight's is. All sixteen
    codes have a mean of -1/2, which pushes every row the same way: layer after layer rows grow alike, and choose the
    same experts. That is "clustered"; with "spread" a pass hits about as many as independent choices would.
    """
    num_experts, num_outputs, num_inputs = shape
    size = num_inputs**-0.5

    def experts(codes: Tensor, *scale_shape: int, dtype: torch.dtype, value: float) -> ExpertWeights:
        scale = torch.full((num_experts, num_outputs, *scale_shape), value, dtype=dtype, device=device)
        return ExpertWeights(name, num_outputs, num_inputs, codes, {"scale": scale})

    if name in ("dense", "fp8_block"):
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 1.0 if name != "dense" else size)
        if name == "dense":
            return ExpertWeights(name, num_outputs, num_inputs, weight)
        return experts(weight.to(torch.float8_e4m3fn), -(-num_inputs // 128), dtype=torch.float32, value=size)
    nibbles = torch.empty(num_experts, num_outputs, num_inputs // 2, dtype=torch.uint8, device=device).random_(0, 256)
    if routing == "spread" and not name.startswith("mxfp4"):  # whose codes are symmetric
        nibbles = torch.where(nibbles & 0x0F == 0x08, nibbles & 0xF0, nibbles)
        nibbles = torch.where(nibbles & 0xF0 == 0x80, nibbles & 0x0F, nibbles)
    if name == "w4a8":
        return experts(nibbles, dtype=torch.float32, value=size / _INT4_SPREAD)
    if name == "int4_fp8":
        weights = experts(nibbles, dtype=torch.float32, value=size / _FP8_SPREAD)
        scale_2 = torch.full_like(weights.scales["scale"], _FP8_SPREAD / _INT4_SPREAD)
        return replace(weights, scales={**weights.scales, "scale_2": scale_2})
    if name == "int4_group":
        return experts(nibbles, num_inputs // 32, dtype=torch.bfloat16, value=size / _INT4_SPREAD)
    exponent = 127 + round(math.log2(size / _MXFP4_SPREAD))
    return experts(nibbles, num_inputs // 32, dtype=torch.uint8, value=exponent)


MODELS = {"kimi-k2.5": _kimi(), "minimax-m2.5": _minimax()}
"""Models whose ranks can be measured, by the name the command line takes."""
