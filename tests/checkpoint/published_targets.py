"""Configs of targets as their publishers have them on the Hugging Face hub, and how many parameters each has.

The fields are those of config.json that decide a shape or a number. DeepSeek-V3, MiniMax-M2 and GLM-4.7-Flash are
missing here: they are what transformers' classes are by themselves.

Compared with copies in public repositories, not with the hub: Phi-4-mini with its total (said to be of
microsoft/Phi-4-mini-instruct at cfbefac), GLM-4.5-Air's fields (a training log of transformers 4.54.1), and sizes of
gemma-4-31B, Kimi-K2 and GLM-4.7. Copies disagree on GLM-4.7's rope_theta (1e4; 1e6 for 4.6), gemma-4-31B's
max_position_embeddings (131072 or 262144) and Kimi-K2's rms_norm_eps (1e-6 or 1e-5), which decide no shape. GLM-4.7's
total has no source: it is about the published 358e9 less the layer that predicts a second token (5.5e9 by its sizes).
The other configs were not compared.
"""

import json

import transformers

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "mlp_bias": False,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
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
LLAMA4 = {
    "attention_bias": False, "attention_chunk_size": 8192, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "model_type": "llama4_text", "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "vocab_size": 202048,
}  # fmt: skip
GEMMA4 = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "vocab_size": 262144,
}  # fmt: skip
PHI_4_MINI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
PUBLISHED = {
    "Llama-3.1-8B": (
        LLAMA3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
        8.030e9,
    ),
    "Llama-3.3-70B": (
        LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
        70.55e9,
    ),
    "Mistral-Small-24B": (
        {"architectures": ["MistralForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
         "intermediate_size": 32768, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e8,
         "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072}, 23.57e9,
    ),
    "Qwen3-8B": (
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
                 "tie_word_embeddings": False}, 8.191e9,
    ),
    "Qwen3-VL-4B-Instruct, text": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True,
         "vision_config": {"depth": 24},
         "text_config": {key: value for key, value in QWEN3.items() if key != "architectures"} | {
             "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 262144,
             "num_attention_heads": 32, "num_hidden_layers": 36, "rope_theta": 5e6, "tie_word_embeddings": True,
             "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
         }, 4.022e9,
    ),
    "Qwen3-235B-A22B": (
        QWEN3_MOE | {"hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94,
                     "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94}, 235.09e9,
    ),
    "GLM-4.7": (
        GLM4_MOE | {"first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
                    "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_routed_experts": 160,
                    "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True}, 352.8e9,
    ),
    "Kimi-K2": (
        {"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
         "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
         "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384,
         "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
         "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 50000.0,
         "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 4096, "type": "yarn"},
         "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
         "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840}, 1026.4e9,
    ),
    "gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128,
                   "layer_types": ["sliding_attention", "full_attention"] * 18}, 116.83e9,
    ),
    "Phi-4-mini": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
         "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
         "rope_scaling": {"long_factor": PHI_4_MINI_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
         "vocab_size": 200064}, 3.83602176e9,
    ),
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
    "Llama-4-Scout-17B-16E, text": (
        {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"hidden_size": 1408},
         "text_config": LLAMA4 | {"attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
                                  "interleave_moe_layer_step": 1, "max_position_embeddings": 262144,
                                  "moe_layers": [*range(48)], "no_rope_layers": [1, 1, 1, 0] * 12,
                                  "num_local_experts": 16,
                                  "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                                  "use_qk_norm": True}, "tie_word_embeddings": False}, 107.77e9,
    ),
    "Llama-4-Maverick-17B-128E-Instruct, text": (
        {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"hidden_size": 1408},
         "text_config": LLAMA4 | {"interleave_moe_layer_step": 2, "max_position_embeddings": 1048576,
                                  "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False}}, 400.7e9,
    ),
    "gemma-3-27b-it, text": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
         "vision_config": {"hidden_size": 1152},
         "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                         "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                         "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024}}, 27.01e9,
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
    "gemma-4-31B-it, text": (
        {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {},
         "text_config": GEMMA4 | {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
                                  "num_key_value_heads": 16, "num_global_key_value_heads": 4,
                                  "num_hidden_layers": 60}}, 30.70e9,
    ),
    "gemma-4-26B-A4B-it, text": (
        {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {},
         "text_config": GEMMA4 | {"enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
                                  "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
                                  "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
                                  "top_k_experts": 8}}, 25.23e9,
    ),
    "gemma-4-12B-it, text": (
        {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "vision_config": {}, "audio_config": {},
         "text_config": GEMMA4 | {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
                                  "num_key_value_heads": 8, "num_global_key_value_heads": 1,
                                  "num_hidden_layers": 48}}, 11.91e9,
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


def default_config(architecture: str) -> dict:
    """Return the config that transformers' class of an architecture has by itself, as it would be saved."""
    kind = getattr(transformers, architecture).config_class
    text = {"hidden_size_per_layer_input": 0} if architecture.startswith("Gemma4For") else {}  # else it is E2B
    sees = architecture.endswith("ConditionalGeneration")
    config = kind(text_config=text) if sees and text else kind(**text)
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}
