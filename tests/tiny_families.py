"""Tiny random targets of every family beyond Llama's, as transformers makes and saves them."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from tiny_moe import VOCAB, randomise, save

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(name: str, **fields: object) -> Callable[[], transformers.PreTrainedConfig]:
    return lambda: getattr(transformers, name)(**{**SIZES, **fields})


def _seeing(
    name: str, vision: dict[str, object], text: dict[str, object], tied: bool = False
) -> Callable[[], transformers.PreTrainedConfig]:
    config = getattr(transformers, f"{name}Config")
    return lambda: config(text_config={**SIZES, **text}, vision_config=vision, tie_word_embeddings=tied)


SMALL_VISION: dict[str, object] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
GEMMA4: dict[str, object] = {
    "sliding_window": 7, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                           "rope_theta": 1e6}},
}  # fmt: skip
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "Qwen3-MoE": _config(
        "Qwen3MoeConfig", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "GLM-4.5": _config(
        "Glm4MoeConfig", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True,
    ),
    "GLM-4.7-Flash": _config(
        "Glm4MoeLiteConfig", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
        num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
        head_dim=8,
    ),
    "gpt-oss": _config(
        "GptOssConfig", intermediate_size=64, num_local_experts=8, num_experts_per_tok=3, sliding_window=7,
        num_hidden_layers=4,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 32, "rope_theta": 150000.0},
    ),
    "Gemma 3": _config(
        "Gemma3TextConfig", num_hidden_layers=4, sliding_window=7, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
    ),
    "Gemma 4": _seeing(
        "Gemma4", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        {**GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
        tied=True,
    ),
    "Gemma 4 MoE": _config(
        "Gemma4TextConfig", **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "Llama 4": _config(
        "Llama4TextConfig", num_hidden_layers=4, intermediate_size=32, intermediate_size_mlp=48, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=16, floor_scale=8,
        no_rope_layers=[1, 1, 0, 1], rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 32},
    ),
    "Phi-4": _config("Phi3Config", sliding_window=9),
    "Phi-4-mini": _config(
        "Phi3Config", partial_rotary_factor=0.75, original_max_position_embeddings=32, tie_word_embeddings=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                         "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]},
    ),
    "Qwen2.5-VL": _seeing(
        "Qwen2_5_VL", {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    ),
    "Qwen3-VL": _seeing(
        "Qwen3VL", SMALL_VISION, {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}},
    ),
    "Qwen3-VL-MoE": _seeing(
        "Qwen3VLMoe", SMALL_VISION, {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}, "num_experts": 8,
                                     "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    ),
}  # fmt: skip


OTHERS = {
    "Llama": _config("LlamaConfig"),
    "Qwen2": _config("Qwen2Config"),
    "Qwen3": _config("Qwen3Config"),
    # llama.cpp rounds YaRN's bounds for every model, and gpt-oss does not; here both come to the same.
    "gpt-oss, whole bounds": _config(
        "GptOssConfig", intermediate_size=64, num_local_experts=8, num_experts_per_tok=3, sliding_window=7,
        num_hidden_layers=4,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "truncate": False,
                         "beta_slow": 1.0,
                         "original_max_position_embeddings": 24, "rope_theta": 150000.0},
    ),
    # Of scores llama.cpp knows the scale that Gemma's smaller models have.
    "Gemma 3, by its head": _config(
        "Gemma3TextConfig", num_hidden_layers=4, sliding_window=7, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
    ),
    "Qwen3-VL-MoE, wide experts": _seeing(
        "Qwen3VLMoe", SMALL_VISION, {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}, "num_experts": 2,
                                     "num_experts_per_tok": 1, "moe_intermediate_size": 128, "num_hidden_layers": 1},
    ),
    "Qwen3-MoE, all experts": _config(
        "Qwen3MoeConfig", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "Phi-4, whole blocks": _config(  # of FP8, at which q, k, v and gate, up begin
        "Phi3Config", sliding_window=9, num_attention_heads=8, num_key_value_heads=8, hidden_size=128,
        intermediate_size=256, num_hidden_layers=2,
    ),
}  # fmt: skip


def tiny(name: str, vocab_size: int = VOCAB) -> transformers.PreTrainedModel:
    """Return a family's model in float32, random."""
    config = {**CONFIGS, **OTHERS}[name]()
    config.get_text_config().vocab_size = vocab_size
    seeing = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    randomise(model)
    return model


def folder_of(name: str, folder: Path, vocab_size: int = VOCAB) -> Path:
    """Write a family's checkpoint under the names its publisher uses."""
    return save(tiny(name, vocab_size), folder)


def some_tokens(count: int, seed: int = 3) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
