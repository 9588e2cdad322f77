"""What GGUF files of each family hold: which architecture they are, their tensors' names, and experts one by one."""

import re
from collections.abc import Iterable

from slipstream.checkpoint.fields import MOST_EXPERTS
from slipstream.checkpoint.gguf_header import GgufTensor
from slipstream.checkpoint.gguf_made import KvUp, MadeTensor
from slipstream.checkpoint.names import gguf_name, hf_name

DRAFT = "eagle3"
"""llama.cpp's name for EAGLE-3 drafts."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    DRAFT: "LlamaForCausalLMEagle3",
}
PERMUTED = ("llama", "mistral", DRAFT)
"""llama.cpp rotates neighbouring pairs for these and stores q and k rows in that order; the others rotate halves, or
neighbours as their publishers do."""

_BLOCK = re.compile(r"blk\.(?P<block>\d+)\.(?P<part>[\w.]+)\.(?P<suffix>weight|bias)")
_EXPERTS = re.compile(r"ffn_(?P<part>gate|up|down|gate_up)_exps")
_ROUTED = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_DEEPSEEK = {**_ROUTED, **_SHARED, "exp_probs_b": "mlp.gate.e_score_correction_bias"}
# What a family's blocks have beside Llama's names, or instead of them.
_PARTS: dict[str, dict[str, str]] = {
    "qwen3moe": _ROUTED,
    "gpt-oss": {
        **_ROUTED,
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4moe": {**_DEEPSEEK, "post_attention_norm": "post_attention_layernorm"},
    "deepseek2": {
        **_DEEPSEEK,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    DRAFT: {"attn_norm_2": "hidden_norm"},
}
_BARE = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")  # names without a suffix
_WHOLE = {"fc.weight": "fc.weight", "enc.output_norm.weight": "input_norm.weight", "d2t": "d2t"}  # of a draft
_DRAFT_NAMES = {ours: theirs for theirs, ours in _WHOLE.items()} | {
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "lm_head.weight": "output.weight",
}


def hf_tensors(stored: Iterable[GgufTensor], kind: str) -> tuple[dict[str, MadeTensor], list[str]]:
    """Return a file's tensors under their Hugging Face names, and the names of those that no such model has."""
    found: dict[str, MadeTensor] = {}
    unknown: list[str] = []
    for tensor in stored:
        named = _hf_tensors(tensor, kind)
        found |= named
        if not named:
            unknown.append(tensor.name)
    for name in [name for name in found if name.endswith(".k_b_proj.weight")]:
        values = name.replace(".k_b_proj.", ".v_b_proj.")
        if values in found:
            keys_part, values_part = found.pop(name), found.pop(values)
            assert isinstance(keys_part, GgufTensor) and isinstance(values_part, GgufTensor), "parts are as stored"
            found[name.replace(".k_b_proj.", ".kv_b_proj.")] = KvUp(keys_part, values_part)
    return found, unknown


def gguf_draft_name(canonical: str) -> str | None:
    """Return llama.cpp's name for a tensor of a draft, or None for one it does not have."""
    return _DRAFT_NAMES.get(canonical) or gguf_name(f"model.{canonical}")


def _hf_tensors(tensor: GgufTensor, kind: str) -> dict[str, MadeTensor]:
    """Return a stored tensor under its Hugging Face name, a stack of experts one by one; nothing for an unknown one."""
    match = _BLOCK.fullmatch(tensor.name)
    if match and kind in _PARTS:
        above = f"model.layers.{match['block']}"
        stack = _EXPERTS.fullmatch(match["part"])
        if stack and "ffn_gate_inp" in _PARTS[kind]:
            return _each_expert(tensor, f"{above}.mlp.experts", stack["part"], match["suffix"])
        if (part := _PARTS[kind].get(match["part"])) is not None:
            return {f"{above}.{part}" if part in _BARE else f"{above}.{part}.{match['suffix']}": tensor}
        if match["part"].startswith("nextn."):  # multi-token prediction, which is left out
            return {f"{above}.{match['part']}.{match['suffix']}": tensor}
    if kind == DRAFT and tensor.name in _WHOLE:
        return {_WHOLE[tensor.name]: tensor}
    name = hf_name(tensor.name)
    return {} if name is None else {name: tensor}


def _each_expert(tensor: GgufTensor, above: str, part: str, suffix: str) -> dict[str, MadeTensor]:
    """Return the experts of a stack one by one; where gate and up are stacked as one, its upper rows are the gate."""
    if len(tensor.shape) < 2 or tensor.shape[0] > MOST_EXPERTS:
        return {}
    parts = ("gate", "up") if part == "gate_up" else (part,)
    rows = tensor.shape[1] // len(parts)
    return {
        f"{above}.{expert}.{name}_proj.{suffix}": GgufTensor(
            tensor.name,
            (rows, *tensor.shape[2:]),
            tensor.quant_type,
            tensor.data[expert, index * rows : (index + 1) * rows],
        )
        for expert in range(tensor.shape[0])
        for index, name in enumerate(parts)
    }
