"""Tiny random DeepSeek-V3 (Kimi) and MiniMax-M2 checkpoints, with the real names and shapes in proportion."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 101
YARN = {
    "rope_type": "yarn", "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "routed_scaling_factor": 2.827,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": YARN,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MINIMAX = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 4,
    "num_local_experts": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter and the routers' biases, which transformers leaves at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=generator)
        if "e_score_correction_bias" in name:
            value.copy_(0.2 * noise)
        else:
            value.copy_(1 + 0.15 * noise if value.dim() == 1 else 0.15 * noise)


def deepseek(**changes: object) -> transformers.PreTrainedModel:
    """Return transformers' DeepSeek-V3 in float32, random."""
    config = transformers.DeepseekV3Config(**{**DEEPSEEK, **changes}, attn_implementation="eager")
    return _model(config)


def minimax(**changes: object) -> transformers.PreTrainedModel:
    """Return transformers' MiniMax-M2 in float32, random."""
    config = transformers.MiniMaxM2Config(**{**MINIMAX, **changes}, attn_implementation="eager")
    return _model(config)


def _model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomise(model)
    return model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Write a checkpoint under the names its publisher uses."""
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def as_kimi(source: Path, folder: Path) -> Path:
    """Rewrite a DeepSeek-V3 folder as Kimi-K2.5 is published: nested config, prefix, a vision tower beside."""
    text = json.loads((source / "config.json").read_text())
    text |= {
        "model_type": "kimi_k2",
        "rope_scaling": {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")},
    }
    text |= {"rope_theta": YARN["rope_theta"]}
    text.pop("rope_parameters")
    quantization = text.pop("quantization_config", None)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": text.pop("bos_token_id", 1),
        "eos_token_id": text.pop("eos_token_id", 2),
        "media_placeholder_token_id": 77,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {**text, **({"quantization_config": quantization} if quantization else {})},
        "vision_config": {"model_type": "kimi_k25_vision"},
    }
    tensors = {f"language_model.{name}": value for name, value in tensors_of(source).items()}
    tensors |= {
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.zeros(6, 2),
        "vision_tower.patch_embed.proj.weight": torch.zeros(2, 3, 4, 4),
        "mm_projector.linear_1.weight": torch.zeros(4, 4),
    }
    return write(folder, config, tensors)
