"""Every dialect of EAGLE-3 draft gives the logits of an independent dense computation on the same tensors."""

import json

import pytest
import torch
from draft_files import BASE, DRAFT_VOCAB, HEAD_DIM, HEADS, KV_HEADS, VOCAB, WIDTH, tensors
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from dense import dense_context
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import captured_layers, load_draft
from tiny import OPS, tiny_target

TARGET = tiny_target()
T = 17


SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": WIDTH,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "transformer_layer_config": {
        **{k: v for k, v in BASE.items() if k not in ("architectures", "draft_vocab_size")},
    },
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    },
}
FC_NORM = {f"fc_norm.{i}.weight": WIDTH for i in range(3)}
AUX_NORM = {f"aux_norm_{which}.weight": WIDTH for which in ("low", "mid", "high")}
DIALECTS = {
    "SafeAILab": (
        {**BASE, "architectures": ["LlamaForCausalLM"]},
        tensors("midlayer"),
        {"layers": (2, 2, 1)},
    ),
    "SpecForge": (
        {**BASE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}},
        tensors("midlayer", 1),
        {"layers": (2, 3, 4)},
    ),
    "EAGLE-3.1": (
        {**BASE, "fc_norm": True, "norm_output": True},
        tensors("midlayer", 2, extra=FC_NORM),
        {"layers": (2, 2, 1), "fc_norm": True, "post": True},
    ),
    "old names of the feature norms": (
        {**BASE, "fc_norm": True},
        tensors("midlayer", 3, extra=AUX_NORM),
        {"layers": (2, 2, 1), "fc_norm": True},
    ),
    "speculators": (
        SPECULATORS,
        {
            **tensors("layers.0", 4, extra={"input_norm.weight": 3 * WIDTH}),
            "embed_tokens.weight": torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(5)),
        },
        {"layers": (1, 2, 4), "input_norm": True, "normed_residual": True},
    ),
    "NVIDIA": (
        {**BASE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}},
        {k: v for k, v in tensors("layers.0", 6).items() if k != "t2d"},
        {"layers": (2, 3, 4)},
    ),
    "full vocabulary, head of its own": (
        {k: v for k, v in BASE.items() if k != "draft_vocab_size"},
        tensors("midlayer", 7, vocab=VOCAB),
        {"layers": (2, 2, 1)},
    ),
    "full vocabulary, the target's head": (
        {k: v for k, v in BASE.items() if k != "draft_vocab_size"},
        {k: v for k, v in tensors("midlayer", 8, vocab=VOCAB).items() if k != "lm_head.weight"},
        {"layers": (2, 2, 1)},
    ),
}


def dense_logits(raw, flags, features_TC, tokens_T):
    """Recompute a draft pass from the raw tensors alone: no module of ours, no cache, float64."""
    names = {
        k.replace("midlayer.", "").replace("layers.0.", "").replace("aux_norm_low", "fc_norm.0")
        .replace("aux_norm_mid", "fc_norm.1").replace("aux_norm_high", "fc_norm.2"): v.double()
        for k, v in raw.items()
    }  # fmt: skip

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rope(x):
        half = HEAD_DIM // 2
        angle = torch.arange(T).double()[:, None] * 5000.0 ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    features = [f.double() for f in features_TC]
    if flags.get("fc_norm"):
        features = [rms(f, names[f"fc_norm.{i}.weight"]) for i, f in enumerate(features)]
    joined = torch.cat(features, -1)
    if flags.get("input_norm"):
        joined = rms(joined, names["input_norm.weight"])
    hidden = joined @ names["fc.weight"].T
    embedding = names.get("embed_tokens.weight", TARGET.embed_tokens.weight.double())[tokens_T]
    normed = rms(hidden, names["hidden_norm.weight"])
    z = torch.cat([rms(embedding, names["input_layernorm.weight"]), normed], -1)
    q = rope((z @ names["self_attn.q_proj.weight"].T).view(T, HEADS, HEAD_DIM))
    k = rope((z @ names["self_attn.k_proj.weight"].T).view(T, KV_HEADS, HEAD_DIM)).repeat_interleave(2, 1)
    v = (z @ names["self_attn.v_proj.weight"].T).view(T, KV_HEADS, HEAD_DIM).repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    attended = torch.einsum("hij,jhd->ihd", scores, v).reshape(T, -1) @ names["self_attn.o_proj.weight"].T
    stream = (normed if flags.get("normed_residual") else hidden) + attended
    x = rms(stream, names["post_attention_layernorm.weight"])
    gate, up = x @ names["mlp.gate_proj.weight"].T, x @ names["mlp.up_proj.weight"].T
    stream = stream + linear(silu(gate) * up, names["mlp.down_proj.weight"])
    final = rms(stream, names["norm.weight"])
    head = names.get("lm_head.weight", TARGET.lm_head.weight.double())
    return final @ head.T, final if flags.get("post") else stream


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_equal_an_independent_computation(dialect, tmp_path):
    config, raw, flags = DIALECTS[dialect]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in raw.items()}, tmp_path / "model.safetensors")
    draft = load_draft(open_checkpoint(tmp_path), TARGET, torch.float32)
    layers = captured_layers(draft.spec, TARGET.spec)
    assert layers == flags["layers"]
    tokens_T = torch.randint(0, VOCAB, (T + 1,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        states = TARGET(tokens_T[:T], dense_context(TARGET.kv_shape, T, page_size=4), layers).captured
        hidden = draft(draft.fuse(states, OPS), tokens_T[1:], dense_context(draft.kv_shape, T, page_size=4))
        logits_TV = draft.logits(hidden.normed_TD, OPS)
    expected_TV, feedback_TD = dense_logits(raw, flags, states, tokens_T[1:])
    torch.testing.assert_close(logits_TV.double(), expected_TV, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden.feedback_TD.double(), feedback_TD, atol=1e-4, rtol=0)
    if "d2t" in raw:
        assert draft.token_ids_V.tolist() == (raw["d2t"] + torch.arange(DRAFT_VOCAB)).tolist()
