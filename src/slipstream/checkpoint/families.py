"""The families of targets: what a config.json leaves to the code of its architecture, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Experts = Literal["deepseek", "minimax", "qwen3", "qwen3_vl", "gpt_oss", "llama4", "gemma4"]


@dataclass(frozen=True)
class Family:
    """What all models of one architecture share and their config.json does not say.

    Args:
        model_type: transformers' name of the family.
        head_dim: the width of a head where the config has none; None divides the model's width by its heads.
        kv_heads: whether a config may leave out its number of key heads, which is then that of its heads.
        qkv_bias: whether queries, keys and values have biases: never, always, or as `attention_bias` says.
        output_bias: whether the projection after attention follows `attention_bias`.
        qk_norm: whether queries and keys are normed: never, each head, all heads as one, or as `use_qk_norm` says.
        window: how the config says over how many keys its attention goes; "layers" is block by block, "chunks" is
            Llama 4's way.
        full_every: where `layer_types` is absent, every so many blocks one sees all keys, the others a window.
        sinks: whether attention has a learned score for no key.
        local_theta: the base of rotary positions in blocks with a window, where it is another than in the others.
        full_rope: how blocks that see all keys turn positions where the config does not say.
        dense_size: the field that holds the width of dense feed-forward parts.
        gemma: whether embeddings are scaled, norms lie around blocks and GELU gates; in the third version norms are
            stored less one and the scale of attention is a field, in the fourth blocks that see all keys have heads
            of their own and every block scales its output.
        tied: whether the head is the table of embeddings where the config does not say.
        defaults: further fields that published configs leave out, being those of transformers' class.
        experts: whose fields describe the experts; None for a dense model.
        latent: whether attention is over latents (MLA).
        partial_rotary: the share of a head that is rotated where the config does not say.
        theta: the base of rotary positions where the config has none.
        sees: whether the model has a vision tower beside its text part, which alone is run.
        joined: what the checkpoint stores as one tensor (`checkpoint/joined.py`): layers that share an input, or all
            experts of a block.
        interleaved: whether gate and up of stacked experts take turns, row by row.
    """

    model_type: str
    head_dim: int | None = None
    kv_heads: bool = False
    qkv_bias: Literal["never", "always", "flag"] = "flag"
    output_bias: bool = True
    qk_norm: Literal["never", "head", "full", "flag"] = "never"
    window: Literal["none", "mistral", "qwen", "flag", "given", "layers", "chunks"] = "none"
    full_every: int = 1
    sinks: bool = False
    local_theta: float | None = None
    full_rope: Mapping[str, str | float] = field(default_factory=dict)
    dense_size: str = "intermediate_size"
    gemma: Literal[3, 4] | None = None
    tied: bool = False
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    experts: Experts | None = None
    latent: bool = False
    partial_rotary: float = 1.0
    theta: float = 10000.0
    sees: bool = False
    joined: Literal["layers", "experts"] | None = None
    interleaved: bool = False


_GEMMA3 = Family(
    "gemma3_text", head_dim=256, qk_norm="head", window="layers", full_every=6, theta=1e6, local_theta=1e4, gemma=3,
    tied=True,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
              "max_position_embeddings": 131072},
)  # fmt: skip
_GEMMA4 = Family(
    "gemma4_text", head_dim=256, qk_norm="head", window="layers", full_every=6, theta=1e6, local_theta=1e4, gemma=4,
    tied=True, full_rope={"rope_type": "proportional", "partial_rotary_factor": 0.25}, experts="gemma4",
    joined="experts",
    defaults={"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512,
              "max_position_embeddings": 131072},
)  # fmt: skip
_GEMMA4_UNIFIED = replace(
    _GEMMA4, model_type="gemma4_unified_text",
    defaults={**_GEMMA4.defaults, "sliding_window": 1024, "max_position_embeddings": 262144},
)  # fmt: skip
_LLAMA4 = Family(
    "llama4_text", head_dim=128, window="chunks", dense_size="intermediate_size_mlp", experts="llama4", theta=5e5,
    joined="experts",
)  # fmt: skip
_KIMI = Family("kimi_k25", experts="deepseek", latent=True, sees=True)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", kv_heads=True),  # SmolLM2 calls itself a Llama, too
    "MistralForCausalLM": Family("mistral", window="mistral"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias="always", output_bias=False, window="qwen"),
    "Qwen3ForCausalLM": Family("qwen3", head_dim=128, qk_norm="head", window="qwen"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm="head", window="flag", experts="qwen3"),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl", qkv_bias="always", output_bias=False, window="qwen", theta=1e6, sees=True
    ),
    "Qwen3VLForConditionalGeneration": Family("qwen3_vl", head_dim=128, qk_norm="head", theta=5e5, sees=True),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "qwen3_vl_moe", head_dim=128, qk_norm="head", experts="qwen3_vl", theta=5e5, sees=True, joined="experts"
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        head_dim=64,
        window="layers",
        full_every=2,
        sinks=True,
        experts="gpt_oss",
        theta=150000.0,
        joined="experts",
        interleaved=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, model_type="gemma3", sees=True),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, model_type="gemma4", sees=True),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA4_UNIFIED, model_type="gemma4_unified", sees=True),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, model_type="llama4", sees=True),
    "Phi3ForCausalLM": Family(
        "phi3", kv_heads=True, qkv_bias="never", output_bias=False, window="given", joined="layers"
    ),
    "Glm4MoeForCausalLM": Family("glm4_moe", output_bias=False, qk_norm="flag", experts="deepseek", partial_rotary=0.5),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", experts="deepseek", latent=True),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", experts="deepseek", latent=True),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,  # transformers' own spelling
    "MiniMaxM2ForCausalLM": Family("minimax_m2", qk_norm="full", experts="minimax"),
}
"""Targets by the architecture their config.json names."""
