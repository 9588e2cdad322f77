"""Our decoder's logits are transformers' own, for every family it claims, on tiny random checkpoints."""

import pytest
import torch
import transformers

from dense import dense_context
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import load_target
from tiny import OPS

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama linear rope": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "llama wide heads": transformers.LlamaConfig(**SIZES, head_dim=16),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": transformers.MistralConfig(**SIZES, sliding_window=7, attn_implementation="eager"),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").float().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    ours = load_target(open_checkpoint(tmp_path), torch.float32, torch.device("cpu"))
    tokens_T = torch.randint(0, SIZES["vocab_size"], (40,))
    with torch.inference_mode():
        expected_TV = theirs(tokens_T[None]).logits[0]
        hidden = ours(tokens_T, dense_context(ours.kv_shape, 40, page_size=8), (0, 1, 3))
        logits_TV = ours.logits(hidden.last_TD, OPS)
        states = theirs.model(tokens_T[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
    # Captured states count blocks applied: 0 is the embedding, 1 the stream after the first block.
    torch.testing.assert_close(hidden.captured[0], states[0][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden.captured[1], states[1][0], atol=1e-4, rtol=0)


@pytest.mark.embedded
def test_embedded_model_equals_transformers(embedded_folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    ours = load_target(open_checkpoint(embedded_folder), torch.float32, torch.device("cpu"), max_position=64)
    tokens_T = torch.randint(0, 49152, (24,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_TV = theirs(tokens_T[None]).logits[0]
        hidden = ours(tokens_T, dense_context(ours.kv_shape, 24, page_size=16))
        logits_TV = ours.logits(hidden.last_TD, OPS)
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
