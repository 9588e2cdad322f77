"""Tiny GGUF files of every family llama.cpp has, written as its converter writes them, from transformers' folders.

Names are those of the `gguf` package's own map, not of ours.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from gguf.quants import quantize

from tiny_families import folder_of
from tiny_moe import VOCAB, deepseek, save, tensors_of

Quant = gguf.GGMLQuantizationType
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: folder_of("Llama", path),
    "qwen2": lambda path: folder_of("Qwen2", path),
    "qwen3": lambda path: folder_of("Qwen3", path),
    "qwen3moe": lambda path: folder_of("Qwen3-MoE, all experts", path),
    "gpt-oss": lambda path: folder_of("gpt-oss, whole bounds", path),
    "gemma3": lambda path: folder_of("Gemma 3, by its head", path),
    "glm4moe": lambda path: folder_of("GLM-4.5", path),
    "deepseek2": lambda path: save(deepseek(n_group=2, topk_group=1, num_experts_per_tok=3), path),
    "deepseek2, GLM-4.7-Flash": lambda path: folder_of("GLM-4.7-Flash", path),
}
"""A folder of each kind, which llama.cpp computes as its publisher does; what follows a comma tells two of one kind."""
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+\.(\w+)\.weight")


def write_gguf(path: Path, kind: str, folder: Path, experts: Quant | None = None, rest: Quant | None = None) -> Path:
    """Write a folder as a GGUF; matrices of experts, and the rest of them, in a block format if one is named."""
    kind = kind.partition(",")[0]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, kind)
    _add_metadata(writer, kind, config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for theirs, tensor in _converted(kind, config, tensors_of(folder)).items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        block = experts if "_exps" in name else rest
        if block is None or tensor.dim() < 2 or name.endswith(".bias") or "ffn_gate_inp" in name:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        else:
            writer.add_tensor(name, quantize(tensor.float().contiguous().numpy(), block), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, kind: str, config: dict) -> None:
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCAB)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if kind == "deepseek2":
        rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        writer.add_rope_dimension_count(rotary)
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if kind == "glm4moe":
        writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 0.5)))
    if full["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if kind == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config["layer_types"]])
    if kind in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if (count := config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts")))) is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    inner = config["intermediate_size"] if kind == "gpt-oss" else config["moe_intermediate_size"]
    writer.add_expert_feed_forward_length(inner)
    if kind in ("glm4moe", "deepseek2"):
        writer.add_expert_shared_count(config["n_shared_experts"])
        dense = config.get("mlp_layer_types", []).count("dense")  # as GLM-4.7-Flash's config has it
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", dense))
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _converted(kind: str, config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a folder's tensors as llama.cpp's converter changes them, still under their own names."""
    converted: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[2]}.weight", []).append(tensor)
        elif kind == "gpt-oss" and ".experts." in name:
            converted |= _gpt_oss_experts(name, tensor)
        elif name.endswith(".kv_b_proj.weight"):
            by_head = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1])
            keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            converted[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
            converted[name.replace("kv_b_proj", "v_b_proj")] = values
        elif kind == "llama" and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
            converted[name] = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        elif name.endswith("e_score_correction_bias"):
            converted[name.replace("_bias", ".bias")] = tensor
        elif name.endswith(".sinks"):
            converted[f"{name}.weight"] = tensor
        else:
            converted[name] = tensor + 1 if kind == "gemma3" and name.endswith("norm.weight") else tensor
    return converted | {name: torch.stack(parts) for name, parts in stacks.items()}


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a stack of gpt-oss's: gate and up, which take turns, one by one; outputs first."""
    module, _, part = name.rpartition(".")
    suffix = "bias" if part.endswith("_bias") else "weight"
    rows = tensor if suffix == "bias" else tensor.transpose(1, 2)
    if part.startswith("down"):
        return {f"{module}.down_proj.{suffix}": rows}
    return {f"{module}.gate_proj.{suffix}": rows[:, 0::2], f"{module}.up_proj.{suffix}": rows[:, 1::2]}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
