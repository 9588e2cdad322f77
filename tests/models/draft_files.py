"""Tensors and the config of a tiny EAGLE-3 draft, as a tool would write them."""

import torch

from tiny import TARGET_SPEC

WIDTH, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, HEAD_DIM, INTER = 32, TARGET_SPEC.vocab_size, 20, 4, 2, 8, 40
BASE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def tensors(
    block: str, seed: int = 0, *, vocab: int = DRAFT_VOCAB, extra: dict | None = None
) -> dict[str, torch.Tensor]:
    """Return random tensors of a draft under a block's name (midlayer or layers.0)."""
    g = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.2

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=g)

    out = {
        "fc.weight": weight(WIDTH, 3 * WIDTH),
        "norm.weight": norm(WIDTH),
        "lm_head.weight": weight(vocab, WIDTH),
        f"{block}.input_layernorm.weight": norm(WIDTH),
        f"{block}.hidden_norm.weight": norm(WIDTH),
        f"{block}.post_attention_layernorm.weight": norm(WIDTH),
        f"{block}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * WIDTH),
        f"{block}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * WIDTH),
        f"{block}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * WIDTH),
        f"{block}.self_attn.o_proj.weight": weight(WIDTH, HEADS * HEAD_DIM),
        f"{block}.mlp.gate_proj.weight": weight(INTER, WIDTH),
        f"{block}.mlp.up_proj.weight": weight(INTER, WIDTH),
        f"{block}.mlp.down_proj.weight": weight(WIDTH, INTER),
    }
    if vocab != VOCAB:
        kept = torch.randperm(VOCAB, generator=g)[:vocab].sort().values
        out["d2t"] = kept - torch.arange(vocab)
        out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    for name in extra or {}:
        out[name] = norm(extra[name])
    return out
