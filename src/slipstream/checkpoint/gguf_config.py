"""A config.json made of a GGUF file's metadata, as if its model had been published as a folder."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from slipstream.checkpoint.captures import CONVENTION, LAYER_IDS
from slipstream.checkpoint.fields import WIDEST_HEAD
from slipstream.checkpoint.files import shown
from slipstream.checkpoint.gguf_families import ARCHITECTURES, DRAFT
from slipstream.checkpoint.gguf_header import GgufTensor
from slipstream.checkpoint.gguf_metadata import GgufMetadata

ROPE_FREQS = "rope_freqs.weight"
_SIGMOID = 2  # llama.cpp's number for it; 0 is "as the architecture has it"
_GEMMA_27B = 62  # blocks; the one size whose scores are not divided by the root of a head's width
_YARN_SCALE = 0.1  # llama.cpp keeps DeepSeek's mscale_all_dim multiplied by it


def gguf_config(data: GgufMetadata, names: Collection[str], stored: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return a file's config.json.

    Args:
        names: its tensors by their Hugging Face names.
        stored: its tensors by GGUF's.
    """
    heads = data.integer("attention.head_count")
    hidden = data.integer("embedding_length")
    head_dim = data.integer("attention.key_length", hidden // heads, maximum=WIDEST_HEAD)
    tokens = data.value("tokenizer.ggml.tokens")
    theta = data.number("rope.freq_base", 10000.0)
    rotary_dim = data.integer("rope.dimension_count", head_dim, maximum=WIDEST_HEAD)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[data.kind]],
        "model_type": data.kind,
        "vocab_size": data.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "hidden_size": hidden,
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count") - data.integer("nextn_predict_layers", 0, minimum=0),
        "num_attention_heads": heads,
        "num_key_value_heads": data.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": data.integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": data.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": data.value("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(data, stored, theta, rotary_dim),
    }
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config | _of_family(data, names, stored, config)


def _of_family(
    data: GgufMetadata, names: Collection[str], stored: Mapping[str, GgufTensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that a family has beyond Llama's."""
    if data.kind == "mistral":
        return {"sliding_window": data.integer("attention.sliding_window", 0, minimum=0) or None}
    if data.kind == "qwen3moe":
        return {
            "num_experts": data.integer("expert_count"),
            "num_experts_per_tok": data.integer("expert_used_count"),
            "moe_intermediate_size": data.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp computes no other
        }
    if data.kind == "gpt-oss":
        return {
            "num_local_experts": data.integer("expert_count"),
            "num_experts_per_tok": data.integer("expert_used_count"),
            "intermediate_size": data.integer("expert_feed_forward_length"),
            "sliding_window": data.integer("attention.sliding_window"),
            "attention_bias": True,
        }
    if data.kind == "gemma3":
        return _gemma3(data, config)
    if data.kind == "glm4moe":
        own = {
            "use_qk_norm": any(name.endswith(".q_norm.weight") for name in names),
            "attention_bias": any(name.endswith(".q_proj.bias") for name in names),
        }
        return own | _experts(data, "sigmoid")
    if data.kind == "deepseek2":
        return _latents(data) | _experts(data, "softmax")
    return _draft(data, stored, config) if data.kind == DRAFT else {}


def _gemma3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    blocks, theta = config["num_hidden_layers"], data.number("rope.freq_base_swa", 10000.0)
    per_head = config["hidden_size"] // config["num_attention_heads"]
    window = data.integer("attention.sliding_window", 0, minimum=0)
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if blocks == _GEMMA_27B else config["head_dim"],
        "rope_local_base_freq": theta,
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(data, blocks, 6) if window else ["full_attention"] * blocks,
    }
    if cap := data.number("final_logit_softcapping", 0.0):
        own["final_logit_softcapping"] = cap
    return own


def _layer_types(data: GgufMetadata, blocks: int, every: int) -> list[str]:
    """Return the kind of each block: a list of those with a window, or every so many without."""
    key = "attention.sliding_window_pattern"
    if isinstance(data.value(f"{data.kind}.{key}"), list):
        windowed = [bool(flag) for flag in data.integers(key)]
    else:
        every = data.integer(key, every)
        windowed = [bool((index + 1) % every) for index in range(blocks)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _experts(data: GgufMetadata, unsaid: str) -> dict[str, Any]:
    """Return DeepSeek's and GLM's experts; `unsaid` is the scoring that a file has which names none."""
    gating = data.integer("expert_gating_func", 0, minimum=0)
    if gating != _SIGMOID and not (gating == 0 and unsaid == "sigmoid"):
        raise data.error(
            f"its experts are chosen by llama.cpp's gating function {gating} (softmax is DeepSeek-V2's); slipstream "
            f"reads {data.kind} files whose experts are chosen by sigmoid ({_SIGMOID}), as DeepSeek-V3's are."
        )
    return {
        "n_routed_experts": data.integer("expert_count"),
        "num_experts_per_tok": data.integer("expert_used_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "n_shared_experts": data.integer("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": data.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        "n_group": data.integer("expert_group_count", 0, minimum=0) or 1,
        "topk_group": data.integer("expert_group_used_count", 0, minimum=0) or 1,
    }


def _latents(data: GgufMetadata) -> dict[str, Any]:
    """Return DeepSeek's latent attention; older files have the width of a head where newer have a latent's."""
    rope_dim = data.integer("rope.dimension_count", maximum=WIDEST_HEAD)
    split = "_mla" if data.has("attention.key_length_mla") else ""
    head_dim = data.integer(f"attention.key_length{split}", minimum=rope_dim + 1, maximum=WIDEST_HEAD)
    return {
        "q_lora_rank": data.integer("attention.q_lora_rank") if data.has("attention.q_lora_rank") else None,
        "kv_lora_rank": data.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": data.integer(f"attention.value_length{split}"),
        "head_dim": head_dim,
        "num_key_value_heads": data.integer("attention.head_count"),
        "partial_rotary_factor": None,
    }


def _draft(data: GgufMetadata, stored: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of llama.cpp's EAGLE-3 drafts, which count the blocks applied before a capture."""
    vocab = stored["d2t"].shape[0] if "d2t" in stored and stored["d2t"].shape else config["vocab_size"]
    return {
        "model_type": "llama",
        "draft_vocab_size": vocab,
        "target_hidden_size": data.integer("target_hidden_size"),
        "norm_before_residual": data.flag("norm_before_residual", False),
        "norm_before_fc": data.flag("norm_before_fc", False),
        LAYER_IDS: data.integers("target_layers"),
        CONVENTION: "blocks_applied",
    }


def _rope_scaling(
    data: GgufMetadata, stored: Mapping[str, GgufTensor], theta: float, rotary_dim: int
) -> dict[str, Any] | None:
    kind = data.value(f"{data.kind}.rope.scaling.type") or "none"
    if kind == "linear":
        return {"rope_type": kind, "factor": data.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(data)
    if kind != "none":
        raise data.error(f"rope scaling {shown(kind)} is not read from GGUF.")
    divisors = stored.get(ROPE_FREQS)
    return None if divisors is None else _llama3(data, divisors.data.astype(np.float64), theta, rotary_dim)


def _yarn(data: GgufMetadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": data.number("rope.scaling.factor"),
        "original_max_position_embeddings": data.integer("rope.scaling.original_context_length"),
        "beta_fast": data.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": data.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": data.kind != "gpt-oss",
    }
    if data.kind == "deepseek2" and (all_dim := data.number("rope.scaling.yarn_log_multiplier", 0.0)):
        scaling["mscale"] = scaling["mscale_all_dim"] = round(all_dim / _YARN_SCALE, 6)
    return scaling


def _llama3(data: GgufMetadata, factors: np.ndarray[Any, Any], theta: float, rotary_dim: int) -> dict[str, Any]:
    """Recover Llama 3's rope scaling, of which GGUF keeps only the resulting divisors."""
    low, high, original = 1.0, 4.0, 8192
    if not factors.size or not np.isfinite(factors).all():
        raise data.error(f"{ROPE_FREQS} is empty or holds NaN; the file is damaged.")
    factor = round(float(factors.max()), 4)
    expected = llama3_divisors(theta, rotary_dim, factor, low, high, original)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise data.error(
            f"the divisors in {ROPE_FREQS} are not those of Llama 3's rope scaling, the only kind slipstream "
            f"recognises. Use the original Hugging Face folder."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, Any]:
    """Return what Llama 3's scaling divides each rotary frequency by."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    divisors: np.ndarray[Any, Any] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
