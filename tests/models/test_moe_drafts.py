"""Drafts published for Kimi-K2.5 and MiniMax-M2.5 find their target, and no other."""

import dataclasses
import json

import pytest
import torch
from draft_files import BASE, tensors
from torch.nn.functional import silu

from dense import dense_context
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError, DraftMismatchError
from slipstream.models.load import captured_layers, load_draft, load_target
from tiny import OPS
from tiny_moe import (
    BY_HEAD,
    HEADS,
    LIGHTSEEK,
    VOCAB,
    WIDTH,
    as_kimi,
    deepseek,
    draft_shapes,
    minimax,
    save,
    tensors_of,
    weights,
    write,
)

CPU = torch.device("cpu")
MLA = {
    **{key: value for key, value in LIGHTSEEK.items() if key not in ("head_dim", "draft_vocab_size")},
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 384,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}


LATENT = {
    "q_a_proj": (24, 2 * WIDTH),
    "q_a_layernorm": (24,),
    "q_b_proj": (HEADS * 12, 24),
    "kv_a_proj_with_mqa": (20, 2 * WIDTH),
    "kv_a_layernorm": (16,),
    "kv_b_proj": (HEADS * 16, 16),
    "o_proj": (WIDTH, HEADS * 8),
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    source = as_kimi(save(deepseek(), folder / "deepseek"), folder / "kimi")
    return load_target(open_checkpoint(source), torch.float32, CPU)


def test_kimis_published_draft_loads_with_the_default_layers(kimi, tmp_path):
    folder = write(tmp_path / "draft", LIGHTSEEK, weights(draft_shapes(BY_HEAD)))
    draft = load_draft(open_checkpoint(folder), kimi, torch.float32)
    assert captured_layers(draft.spec, kimi.spec) == (2, 2, 1)
    assert draft.spec.captured_layers is None
    assert draft.embed_tokens is kimi.embed_tokens
    assert draft.token_ids_V.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(("layers", "expected"), [(61, (2, 30, 58)), (62, (2, 31, 59))], ids=["Kimi", "MiniMax"])
def test_default_layers_at_full_depth_are_those_the_engines_capture(kimi, layers, expected):
    assert dataclasses.replace(kimi.spec, num_layers=layers).default_captured_layers() == expected


def test_a_draft_with_latent_attention_gives_the_logits_of_an_independent_computation(kimi, tmp_path):
    raw = weights(draft_shapes(LATENT), seed=4)
    draft = load_draft(open_checkpoint(write(tmp_path / "draft", MLA, raw)), kimi, torch.float32)
    assert draft.spec.captured_layers == (2, 3, 4)
    generator = torch.Generator().manual_seed(8)
    features = tuple(torch.randn(17, WIDTH, generator=generator) for _ in range(3))
    tokens_T = torch.randint(0, VOCAB, (17,), generator=generator)
    ctx = dense_context(draft.kv_shape, 17, page_size=4)
    with torch.inference_mode():
        got = draft.logits(draft(draft.fuse(features, OPS), tokens_T, ctx).normed_TD, OPS)
    expected = dense_mla_logits(raw, features, kimi.embed_tokens.weight[tokens_T])
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


def dense_mla_logits(raw, features, embedding):
    """Recompute an MLA draft's pass in float64 from its raw tensors, keys and values by head, pairs interleaved."""
    w = {name.removesuffix(".weight").removeprefix("midlayer."): value.double() for name, value in raw.items()}
    count = len(embedding)

    def rms(x, weight, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def rope(x):  # [T, heads, 4]: pairs (0, 1) and (2, 3)
        angle = torch.arange(count).double()[:, None] * 1e6 ** (-torch.arange(2).double() / 2)
        turned = torch.view_as_complex(x.reshape(count, -1, 2, 2).contiguous()) * torch.exp(1j * angle)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    hidden = torch.cat(features, -1).double() @ w["fc"].T
    x = torch.cat([rms(embedding.double(), w["input_layernorm"], 1e-6), rms(hidden, w["hidden_norm"], 1e-6)], -1)
    q = rms(x @ w["self_attn.q_a_proj"].T, w["self_attn.q_a_layernorm"], 1e-6) @ w["self_attn.q_b_proj"].T
    q = q.view(count, HEADS, 12)
    latent = x @ w["self_attn.kv_a_proj_with_mqa"].T
    kv = rms(latent[:, :16], w["self_attn.kv_a_layernorm"], 1e-6) @ w["self_attn.kv_b_proj"].T
    kv = kv.view(count, HEADS, 16)
    k = torch.cat([kv[..., :8], rope(latent[:, None, 16:]).expand(-1, HEADS, -1)], -1)
    q = torch.cat([q[..., :8], rope(q[..., 8:])], -1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * 12**-0.5
    scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", scores, kv[..., 8:]).reshape(count, -1)
    stream = hidden + out @ w["self_attn.o_proj"].T
    y = rms(stream, w["post_attention_layernorm"], 1e-6)
    stream = stream + (silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms(stream, w["norm"], 1e-6) @ w["lm_head"].T


def test_a_minimax_draft_on_kimi_is_refused_with_both_values(kimi, tmp_path):
    config = {**BASE, "architectures": ["Eagle3MiniMaxM2ForCausalLM"], "vocab_size": VOCAB}
    folder = write(tmp_path / "draft", config, tensors("midlayer"))
    with pytest.raises(DraftMismatchError, match="hidden size of its target is 32, the target's is 64"):
        load_draft(open_checkpoint(folder), kimi, torch.float32)


def test_a_kimi_draft_on_minimax_is_refused_by_its_vocabulary(tmp_path):
    target = load_target(open_checkpoint(save(minimax(vocab_size=90), tmp_path / "target")), torch.float32, CPU)
    folder = write(tmp_path / "draft", LIGHTSEEK, weights(draft_shapes(BY_HEAD)))
    with pytest.raises(DraftMismatchError, match="vocabulary size is 101, the target's is 90"):
        load_draft(open_checkpoint(folder), target, torch.float32)


def test_a_missing_shard_of_a_target_is_named(tmp_path):
    folder = save(minimax(), tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = sorted(set(index["weight_map"].values()))[1]
    (folder / lost).unlink()
    with pytest.raises(CheckpointError, match=rf"{lost}, absent from the folder"):
        open_checkpoint(folder)


def test_a_missing_expert_is_named(tmp_path):
    folder = save(deepseek(), tmp_path / "whole")
    kept = {k: v for k, v in tensors_of(folder).items() if "experts.3.up_proj" not in k}
    folder = write(tmp_path / "part", json.loads((folder / "config.json").read_text()), kept)
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight \[32, 64\]"):
        load_target(open_checkpoint(folder), torch.float32, CPU)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (deepseek, {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        (deepseek, {"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        (deepseek, {"attention_bias": True}, "latent attention without biases"),
        (deepseek, {"num_experts_per_tok": 13}, "'num_experts_per_tok' is 13"),
        (deepseek, {"n_group": 5}, "'n_group' is 5"),
        (deepseek, {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        (minimax, {"attn_type_list": [1, 0, 1, 1]}, "'attn_type_list'"),
        (minimax, {"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head'"),
        (minimax, {"shared_intermediate_size": 64}, "without a shared expert"),
        (minimax, {"rotary_dim": 4}, "disagrees with partial_rotary_factor"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(make, changes, message, tmp_path):
    folder = save(make(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_target(open_checkpoint(folder), torch.float32, CPU)
