"""Drafts as they are published for every family load onto meta tensors, have just the tensors of their tools, and fit.

Fields are those of the configs that drafts are trained with and published under, by repository and commit:
SpecForge (sgl-project/SpecForge a6b6b02, others where a line says so), SafeAILab (SafeAILab/EAGLE 9666a81,
eagle/traineagle3), AngelSlim (Tencent/AngelSlim 1c786f2 and 46b1b38, speculative/train/configs), Thoughtworks
(tails-mpt/SpecForge 239a287, bc2d650 and 6124a48); and of the config.json of Red Hat's and Nebius's drafts on the
Hugging Face hub.
"""

from pathlib import Path

import pytest
import torch
from published_targets import PUBLISHED, default_config

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.known_targets import KNOWN_TARGETS, targets_of
from slipstream.checkpoint.names import canonical_draft_name
from slipstream.errors import DraftMismatchError
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
LLAMA3 = {
    "draft_vocab_size": 32000, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN3_8B = QWEN3 | {
    "hidden_size": 4096, "max_position_embeddings": 40960, "max_window_layers": 36, "num_key_value_heads": 8,
    "use_sliding_window": False,
}  # fmt: skip
ANGELSLIM = {"architectures": ["Eagle3LlamaForCausalLM"]}
MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
SPECULATORS = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": True}
# Of each draft: its target, its config, the blocks applied before each captured state, norms of what was captured.
DRAFTS = {
    "SafeAILab, Llama-3.1-8B": ("Llama-3.1-8B", LLAMA3 | {"architectures": ["LlamaForCausalLM"]}, (2, 16, 29), ()),
    "SpecForge, Llama-3.1-8B": ("Llama-3.1-8B", SPECFORGE | LLAMA3, (2, 16, 29), ()),
    "SpecForge, Llama-3.3-70B": ("Llama-3.3-70B", SPECFORGE | LLAMA3 | {
        "head_dim": 128, "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 4096,
        "num_attention_heads": 64, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 4096, "rope_type": "llama3"},
    }, (2, 40, 77), ()),
    "SpecForge, Mistral-Small-24B": ("Mistral-Small-24B", SPECFORGE | {  # 7347fcc
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e8,
        "sliding_window": None, "vocab_size": 131072,
    }, (2, 20, 37), ()),
    "SpecForge, Qwen3-8B": ("Qwen3-8B", QWEN3_8B, (2, 18, 33), ()),
    "AngelSlim, Qwen3-8B": ("Qwen3-8B", QWEN3_8B | ANGELSLIM, (2, 18, 33), ()),
    "AngelSlim, Qwen3-VL-4B": ("Qwen3-VL-4B-Instruct, text", QWEN3_8B | ANGELSLIM | {
        "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 262144, "modal_type": "VLM",
        "rope_scaling": MROPE | {"type": "default", "rope_type": "default"}, "rope_theta": 5000000,
        "tie_word_embeddings": True,
    }, (2, 18, 33), ()),
    "SpecForge, Qwen3-VL-30B-A3B": ("Qwen3-VL-30B-A3B-Instruct, text", QWEN3 | {  # 5b2789f
        "intermediate_size": 6144, "max_position_embeddings": 262144, "max_window_layers": None,
        "rope_scaling": MROPE, "rope_theta": 5000000, "target_model_type": "qwen3_vl_moe",
        "use_sliding_window": False,
    }, (2, 24, 45), ()),
    "SpecForge, Qwen3-235B-A22B": ("Qwen3-235B-A22B", QWEN3 | {
        "eagle_config": {IDS: [1, 46, 90], "use_aux_hidden_state": True}, "hidden_size": 4096,
        "intermediate_size": 24576, "max_position_embeddings": 40960, "num_attention_heads": 64,
    }, (2, 47, 91), ()),
    "Thoughtworks, GLM-4.7": ("GLM-4.7", SPECFORGE | {
        IDS: [2, 46, 89], "attention_bias": False, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 16384,
        "max_position_embeddings": 4096, "num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1e6, "target_hidden_size": 5120, "vocab_size": 151552,
    }, (2, 46, 89), ()),
    "Thoughtworks, GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", SPECFORGE | {
        "attention_bias": False, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000, "vocab_size": 154880,
    }, (2, 23, 44), ()),
    "SpecForge, DeepSeek-V3": ("DeepseekV3ForCausalLM", SPECFORGE | {
        "eagle_config": {IDS: [1, 29, 57], "use_aux_hidden_state": True}, "hidden_size": 7168,
        "intermediate_size": 40960, "max_position_embeddings": 163840, "num_attention_heads": 56,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 129280,
    }, (2, 30, 58), ()),
    "SpecForge, Kimi-K2": ("Kimi-K2", SPECFORGE | {  # 03ebe2c
        "eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}, "attention_bias": False, "head_dim": 128,
        "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 131072, "max_window_layers": 48,
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 163840,
    }, (2, 30, 58), ()),
    "Thoughtworks, MiniMax-M2": ("MiniMaxM2ForCausalLM", SPECFORGE | {
        "eagle_config": {IDS: [1, 30, 58], "use_aux_hidden_state": True}, "attention_bias": False, "head_dim": 128,
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 196608, "num_attention_heads": 24,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
        "target_hidden_size": 3072, "vocab_size": 200064,
    }, (2, 31, 59), ()),
    "SpecForge, gpt-oss-120b": ("gpt-oss-120b", SPECFORGE | {
        "eagle_config": {IDS: [1, 17, 33]}, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 17280,
        "max_position_embeddings": 4096, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
    }, (2, 18, 34), ()),
    "SpecForge, gemma-3-27b": ("gemma-3-27b-it, text", SPECFORGE | {  # 078d71c
        "eagle_config": {IDS: [1, 29, 61]}, "additional_fc": False, "attention_bias": False,
        "draft_vocab_size": 262208, "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
        "reuse_target_lm_head": True, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "target_model_type": "gemma3_text", "use_sliding_window": False, "vocab_size": 262208,
    }, (2, 30, 62), ()),
    "SpecForge, gemma-4-26B-A4B": ("gemma-4-26B-A4B-it, text", SPECFORGE | {  # 078d71c
        "eagle_config": {IDS: [5, 17, 29]}, "attention_bias": False, "draft_vocab_size": 262144, "head_dim": 128,
        "hidden_size": 2816, "intermediate_size": 2112, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": None, "target_model_type": "gemma4_text", "use_sliding_window": False, "vocab_size": 262144,
    }, (6, 18, 30), ()),
    "SpecForge, Phi-4-mini": ("Phi-4-mini", SPECFORGE | {  # 169f907
        "attention_bias": False, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "model_type": "phi3", "num_attention_heads": 24, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": 200064,
    }, (2, 16, 29), ()),
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
    """Return the tensors that these tools write, by our names, with their shapes."""
    block = config.get("transformer_layer_config", config)
    width, inner = block["hidden_size"], block["intermediate_size"]
    heads, head = (
        block["num_attention_heads"],
        block.get("head_dim", block["hidden_size"] // block["num_attention_heads"]),
    )
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
    target_config = PUBLISHED[published][0] if published in PUBLISHED else default_config(published)
    target = model_spec(target_config, Path(published))
    spec = draft_spec(config, Path(name), target.num_layers)
    check_pair(spec, target, name)
    assert captured_layers(spec, target) == captured
    assert spec.sliding_window is None
    with torch.device("meta"):
        draft = Eagle3Draft(spec, max_position=8)
    wanted = {path: place.shape for path, place in places(draft).items()}
    assert wanted.pop("embed_tokens.weight") == (target.vocab_size, target.hidden_size)  # the target's, if left out
    assert wanted == _stored(config, norms)
    sizes = (target.hidden_size, target.vocab_size, target.num_layers)
    names = {known.name for known in KNOWN_TARGETS if known[1:] == sizes}
    assert names & set(targets_of(spec)), "inspect names what a draft may be for"


def test_a_draft_of_another_target_is_refused_with_the_targets_it_may_be_for():
    draft = draft_spec(DRAFTS["SpecForge, Qwen3-8B"][1], Path("draft"), None)
    target = model_spec(PUBLISHED["Llama-3.1-8B"][0], Path("target"))
    with pytest.raises(DraftMismatchError, match=r"vocabulary size is 151936, the target's is 128256.*Qwen3-8B"):
        check_pair(draft, target, "draft")
