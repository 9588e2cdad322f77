"""What GGUF files of each family hold: which architecture they are, their tensors' names, and experts one by one."""

import re
from collections.abc import Callable
from typing import Any

from slipstream.checkpoint.fields import MOST_EXPERTS
from slipstream.checkpoint.gguf_header import GgufTensor
from slipstream.checkpoint.names import hf_name

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_EXPERTS = re.compile(r"blk\.(?P<block>\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<suffix>weight|bias)")
# What the families with experts have beside Llama's names.
_BESIDE = re.compile(r"blk\.(?P<block>\d+)\.(?P<part>ffn_gate_inp|attn_sinks|post_attention_norm)\.(?P<suffix>\w+)")
_BESIDE_NAMES = {
    "ffn_gate_inp": "mlp.gate.{suffix}",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm.{suffix}",
}


def hf_tensors(tensor: GgufTensor, kind: str) -> dict[str, GgufTensor]:
    """Return a stored tensor under its Hugging Face name, a stack of experts one by one; nothing for an unknown one."""
    if kind in ("qwen3moe", "gpt-oss"):
        match = _EXPERTS.fullmatch(tensor.name)
        if match and len(tensor.shape) > 1 and tensor.shape[0] <= MOST_EXPERTS:
            above = f"model.layers.{match['block']}.mlp.experts"
            return {
                f"{above}.{expert}.{match['part']}_proj.{match['suffix']}": GgufTensor(
                    tensor.name, tensor.shape[1:], tensor.quant_type, tensor.data[expert]
                )
                for expert in range(tensor.shape[0])
            }
        if match := _BESIDE.fullmatch(tensor.name):
            beside = _BESIDE_NAMES[match["part"]].format(suffix=match["suffix"])
            return {f"model.layers.{match['block']}.{beside}": tensor}
    name = hf_name(tensor.name)
    return {} if name is None else {name: tensor}


def family_config(kind: str, integer: Callable[[str], int]) -> dict[str, Any]:
    """Return the config.json fields that a family has beyond Llama's; `integer` reads a metadata key."""
    if kind == "qwen3moe":
        return {
            "num_experts": integer("expert_count"),
            "num_experts_per_tok": integer("expert_used_count"),
            "moe_intermediate_size": integer("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp computes no other
        }
    if kind == "gpt-oss":
        return {
            "num_local_experts": integer("expert_count"),
            "num_experts_per_tok": integer("expert_used_count"),
            "intermediate_size": integer("expert_feed_forward_length"),
            "sliding_window": integer("attention.sliding_window"),
            "attention_bias": True,
        }
    return {}
