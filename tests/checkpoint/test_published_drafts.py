"""Drafts as they are published for every family load onto meta tensors, have just the tensors of their tools, and fit.

Fields are those of SpecForge's configs (a6b6b02), which its drafts are published with, and of the config.json of Red
Hat's and Nebius's drafts on the Hugging Face hub.
"""

from pathlib import Path

import pytest
import torch
from published_targets import PUBLISHED

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.known_targets import targets_of
from slipstream.checkpoint.names import canonical_draft_name
from slipstream.models.accounting import places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers, check_pair

IDS = "eagle_aux_hidden_state_layer_ids"
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
             "num_hidden_layers": 1, "draft_vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
QWEN3 = SPECFORGE | {
    "attention_bias": False, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 12288,
    "max_position_embeddings": 2048, "max_window_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 151936,
}  # fmt: skip
SPECULATORS = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": True}
# Of each draft: its target, its config, the blocks applied before each captured state, norms of what was captured.
DRAFTS = {
    "SpecForge, gpt-oss-20b": ("gpt-oss-20b", SPECFORGE | {
        "eagle_config": {IDS: [1, 11, 21]}, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 17280,
        "max_position_embeddings": 4096, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
    }, (2, 12, 22), ()),
    "Red Hat, gpt-oss-20b": ("gpt-oss-20b", SPECULATORS | {
        "draft_vocab_size": 64000, "norm_before_fc": True,
        "transformer_layer_config": {
            "model_type": "llama", "hidden_size": 2880, "num_hidden_layers": 1, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 131072},
    }, (2, 12, 21), ("input_norm",)),
    "Nebius, gpt-oss-20b": ("gpt-oss-20b", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "truncated_vocab_size": 64000, "draft_vocab_size": 64000, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 11520, "vocab_size": 201088,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "max_position_embeddings": 131072,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
    }, (2, 12, 21), ()),
    "SpecForge, Qwen3-30B-A3B": ("Qwen3-30B-A3B", QWEN3, (2, 24, 45), ()),
    "SpecForge, Qwen3-30B-A3B, EAGLE-3.1": (
        "Qwen3-30B-A3B", QWEN3 | {"fc_norm": True, "norm_output": True}, (2, 24, 45),
        ("fc_norm.0", "fc_norm.1", "fc_norm.2"),
    ),
    "SpecForge, Llama-4-Scout": ("Llama-4-Scout-17B-16E-Instruct, text", SPECFORGE | {
        "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 2048, "num_attention_heads": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 202048,
    }, (2, 24, 45), ()),
    "SpecForge, Phi-4": ("Phi-4", SPECFORGE | {
        "attention_bias": False, "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384,
        "num_attention_heads": 40, "num_key_value_heads": 10, "rms_norm_eps": 1e-5, "rope_theta": 250000.0,
        "vocab_size": 100352,
    }, (2, 20, 37), ()),
    "SpecForge, gemma-3-1b": ("gemma-3-1b-it", SPECFORGE | {
        "attention_bias": False, "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "use_sliding_window": False,
        "vocab_size": 262144, "target_model_type": "gemma3_text",
    }, (2, 13, 23), ()),
    "SpecForge, Qwen2.5-VL-7B": ("Qwen2.5-VL-7B-Instruct, text", SPECFORGE | {
        "attention_bias": False, "head_dim": 128, "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 8192, "max_window_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000,
        "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 152064, "target_model_type": "qwen2_5_vl",
    }, (2, 14, 25), ()),
    "Red Hat, gemma-4-31B": ("gemma-4-31B-it, text", SPECULATORS | {
        "draft_vocab_size": 32000, IDS: [2, 30, 57], "norm_before_fc": False, "target_hidden_size": None,
        "transformer_layer_config": {
            "attention_bias": False, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5376,
            "intermediate_size": 21504, "max_position_embeddings": 262144, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
            "vocab_size": 262144},
    }, (2, 30, 57), ()),
}  # fmt: skip


def _stored(config: dict, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that SpecForge, Red Hat's speculators and Nebius write, by our names, with their shapes."""
    block = config.get("transformer_layer_config", config)
    width, inner = block["hidden_size"], block["intermediate_size"]
    heads, head = block["num_attention_heads"], block.get("head_dim", block["hidden_size"] // 40)
    q, kv = heads * head, block["num_key_value_heads"] * head
    first = "layers.0." if "transformer_layer_config" in config else "midlayer."
    shapes = {
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (config["draft_vocab_size"], width),
        **{
            f"{first}{name}.weight": (width,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        f"{first}self_attn.q_proj.weight": (q, 2 * width),
        f"{first}self_attn.k_proj.weight": (kv, 2 * width),
        f"{first}self_attn.v_proj.weight": (kv, 2 * width),
        f"{first}self_attn.o_proj.weight": (width, q),
        f"{first}mlp.gate_proj.weight": (inner, width),
        f"{first}mlp.up_proj.weight": (inner, width),
        f"{first}mlp.down_proj.weight": (width, inner),
        **{f"{norm}.weight": ((3 if norm == "input_norm" else 1) * width,) for norm in norms},
    }
    return {canonical_draft_name(name): shape for name, shape in shapes.items()}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_published_draft_has_its_tool_s_tensors_and_fits_its_target(name):
    published, config, captured, norms = DRAFTS[name]
    target = model_spec(PUBLISHED[published][0], Path(published))
    spec = draft_spec(config, Path(name), target.num_layers)
    check_pair(spec, target, name)
    assert captured_layers(spec, target) == captured
    assert spec.sliding_window is None
    with torch.device("meta"):
        draft = Eagle3Draft(spec, max_position=8)
    wanted = {path: place.shape for path, place in places(draft).items()}
    assert wanted.pop("embed_tokens.weight") == (target.vocab_size, target.hidden_size)  # the target's, if left out
    assert wanted == _stored(config, norms)
    assert targets_of(spec), "inspect names what a draft may be for"
