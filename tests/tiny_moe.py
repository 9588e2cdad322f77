"""Tiny random DeepSeek-V3 (Kimi) and MiniMax-M2 checkpoints and drafts, with real names and shapes in proportion."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.kernels import Ops, select
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.target import Target
from slipstream.quant.plan import Dialect, QuantizeOptions, plan_quantize
from slipstream.quant.quantize import quantize
from slipstream.quant.scheme import scheme_named

CPU = torch.device("cpu")
VOCAB = 101
EXPERTS_ONLY = ("*self_attn*", "*shared_experts*", "re:.*mlp\\.(gate|up|down)_proj")
"""What to leave out so that only the experts of a DeepSeek-V3 are quantized."""
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


def quantized(
    source: Path, out: Path, name: str, group_size: int | None, dialect: Dialect, exclude: tuple[str, ...]
) -> Path:
    """Quantize a folder with slipstream itself."""
    options = QuantizeOptions(scheme_named(name, group_size), dialect=dialect, exclude=exclude)
    quantize(plan_quantize(source, options), out)
    return out


def blocks(folder: Path, out: Path, keep: tuple[str, ...]) -> Path:
    """Quantize every linear layer to FP8 blocks as DeepSeek-V3 and MiniMax-M2.5 are published."""
    tensors = {}
    for name, value in tensors_of(folder).items():
        if value.dim() != 2 or any(word in name for word in keep):
            tensors[name] = value
            continue
        rows, columns = (-(-size // 128) for size in value.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: value.shape[0], : value.shape[1]] = value.float()
        scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
        tensors[name] = (value.float() / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }  # fmt: skip
    return write(out, config, tensors)


def passes(
    model: Target, tokens_T: torch.Tensor, chunks: list[int], prompt: bool, path: str | Ops = "reference"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a text in chunks over pages, on a kernel path or on given kernels; return logits and states after block 1."""
    ops = select(CPU, path) if isinstance(path, str) else path
    kv = KvCache.allocate(model.kv_shape, 12, 4, torch.float32, CPU)
    table = page_table([[11, 3, 5, 0, 7, 2, 9, 1, 4, 10]], CPU)
    logits, states = [], []
    start = 0
    for count in chunks:
        index = torch.arange(start, start + count)
        queries = QueryTokens([count], index, index, torch.full_like(index, -1), [prompt] * count)
        with torch.inference_mode():
            hidden = model(tokens_T[index], paged_context(ops, kv, table, queries), (0, 1))
            logits.append(model.logits(hidden.last_TD, ops))
        states.append(hidden.captured[1])
        start += count
    return torch.cat(logits), torch.cat(states)


WIDTH, HEADS, INNER = 64, 4, 96  # of drafts
# As lightseekorg/kimi-k2.5-eagle3 is published: whole vocabulary, as many key heads as heads, no eagle_config.
LIGHTSEEK = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 0.2 * value if value.dim() == 2 else 1 + 0.2 * value for name, value in noise.items()}


def draft_shapes(attention: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
        **{
            f"midlayer.{name}.weight": (WIDTH,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        **{f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()},
        "midlayer.mlp.gate_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
    }


BY_HEAD = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), (HEADS * 32, 2 * WIDTH)), "o_proj": (WIDTH, HEADS * 32)}
