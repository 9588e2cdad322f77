"""Targets as they are published load onto meta tensors, and their tensors add up to the sizes their cards name.

The fields are those of each model's config.json on the Hugging Face hub that decide a shape or a number.
"""

import math
from pathlib import Path

import pytest
import torch

from slipstream.checkpoint.config import model_spec
from slipstream.models.accounting import places
from slipstream.models.target import Target

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e6, "topk_group": 1,
    "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
PUBLISHED = {
    "gpt-oss-20b": (
        GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32,
                   "layer_types": ["sliding_attention", "full_attention"] * 12}, 20.91e9,
    ),
    "Qwen3-30B-A3B": (
        QWEN3_MOE | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                     "num_attention_heads": 32, "num_hidden_layers": 48}, 30.53e9,
    ),
    "GLM-4.5-Air": (
        GLM4_MOE | {"first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
                    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46,
                    "routed_scaling_factor": 1.0, "use_qk_norm": False}, 106.85e9,
    ),
    "Llama-4-Scout-17B-16E-Instruct, text": (
        {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"hidden_size": 1408},
         "text_config": {"attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu",
                         "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
                         "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "no_rope_layers": [],
                         "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
                         "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5,
                         "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                         "rope_theta": 500000.0, "tie_word_embeddings": False, "use_qk_norm": True,
                         "vocab_size": 202048}}, 107.77e9,
    ),
    "gemma-3-1b-it": (
        {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
         "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
         "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
         "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
         "sliding_window_pattern": 6, "vocab_size": 262144}, 0.9999e9,
    ),
    "gemma-3-4b-it, text": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 1152},
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}}, 3.880e9,
    ),
    "Phi-4": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920,
         "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40,
         "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
         "vocab_size": 100352}, 14.66e9,
    ),
    "Qwen2.5-VL-7B-Instruct, text": (
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_act": "silu", "hidden_size": 3584,
         "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
         "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
         "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
         "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
         "vision_config": {"depth": 32}}, 7.616e9,
    ),
    "Qwen3-VL-30B-A3B-Instruct, text": (
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "tie_word_embeddings": False,
         "vision_config": {"depth": 27},
         "text_config": {key: value for key, value in QWEN3_MOE.items() if key != "architectures"} | {
             "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262144,
             "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48, "rope_theta": 5e6,
             "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
         }, 30.53e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_its_tensors_add_up(name):
    config, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = Target(model_spec(config, Path(name)), max_position=8)
    stored = {name: place.shape for name, place in places(model).items()}
    if model.spec.tie_embeddings:
        stored.pop("lm_head.weight")
    assert sum(math.prod(shape) for shape in stored.values()) == pytest.approx(parameters, rel=2e-3)


def test_gemma_turns_positions_by_two_bases_and_stretches_one_of_them():
    spec = model_spec(PUBLISHED["gemma-3-4b-it, text"][0], Path("gemma"))
    windowed, whole = spec.block(0), spec.block(5)
    assert (windowed.window, windowed.rope.theta, windowed.rope.scaling) == (1024, 1e4, "none")
    assert (whole.window, whole.rope.theta, whole.rope.factor) == (None, 1e6, 8.0)
    assert spec.tie_embeddings and spec.embedding_scale == 2560**0.5 and spec.attention_scale == 256**-0.5
