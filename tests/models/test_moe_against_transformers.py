"""DeepSeek-V3, Kimi-K2.5 and MiniMax-M2 give transformers' logits, in both forms of latent attention."""

import json
import logging

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels import select
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.load import load_target
from tiny_moe import DEEPSEEK, VOCAB, as_kimi, deepseek, minimax, save, tensors_of, write

CPU = torch.device("cpu")
T = 40
MODELS = {
    "kimi's shape": deepseek,
    "groups of experts": lambda: deepseek(n_group=4, topk_group=2, first_k_dense_replace=2, routed_scaling_factor=2.5),
    "queries without a latent": lambda: deepseek(q_lora_rank=None),
    "no yarn, weights not normalised": lambda: deepseek(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, norm_topk_prob=False
    ),
    "yarn with other magnitudes": lambda: deepseek(
        rope_parameters={**DEEPSEEK["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "rotary halves apart": lambda: deepseek(rope_interleave=False),
    "two shared experts, narrow values": lambda: deepseek(n_shared_experts=2, v_head_dim=12),
    "minimax": minimax,
    "minimax, whole heads rotated": lambda: minimax(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}


def passes(model, tokens_T, chunks, prompt, path="reference"):
    """Run a text in chunks over pages, on a kernel path or on given kernels; return logits and states after block 1."""
    ops = select(CPU, path) if isinstance(path, str) else path
    kv = KvCache.allocate(model.kv_shape, 12, 4, torch.float32, CPU)
    table = page_table([[11, 3, 5, 0, 7, 2, 9, 1, 4, 10]], CPU)
    logits, states = [], []
    start = 0
    for count in chunks:
        index = torch.arange(start, start + count)
        queries = QueryTokens([count], index, index, torch.full_like(index, -1), [prompt] * count)
        with torch.inference_mode():
            hidden = model(tokens_T[index], paged_context(ops, kv, table, queries), (0, 1))
            logits.append(model.logits(hidden.last_TD, ops))
        states.append(hidden.captured[1])
        start += count
    return torch.cat(logits), torch.cat(states)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_absorbed_and_expanded(name, tmp_path):
    theirs = MODELS[name]()
    ours = load_target(open_checkpoint(save(theirs, tmp_path)), torch.float32, CPU)
    tokens_T = torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected_TV = theirs(tokens_T[None]).logits[0]
        states = theirs.model(tokens_T[None], output_hidden_states=True).hidden_states
    assert expected_TV.std() > 0.1, "logits that say nothing prove nothing"
    for prompt in (True, False):
        for chunks in ([T], [7, 20, 1, 12]):
            logits_TV, first_TD = passes(ours, tokens_T, chunks, prompt)
            torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
            torch.testing.assert_close(first_TD, states[1][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [deepseek, minimax])
def test_the_cpu_kernels_agree_and_keep_their_promise_about_bits(make, tmp_path):
    ours = load_target(open_checkpoint(save(make(), tmp_path)), torch.float32, CPU)
    tokens_T = torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(3))
    expected, _ = passes(ours, tokens_T, [T], prompt=False)
    for prompt in (True, False):
        whole, _ = passes(ours, tokens_T, [T], prompt, "auto")
        chunked, _ = passes(ours, tokens_T, [7, 20, 1, 12], prompt, "auto")
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        if select(CPU).row_invariant:
            assert torch.equal(whole, chunked)


def test_the_published_names_are_those_that_load(tmp_path):
    """Guards this file's own premise: transformers must have written the publishers' names, not its own."""
    names = tensors_of(save(minimax(), tmp_path / "minimax")).keys()
    assert {
        "model.layers.0.block_sparse_moe.experts.15.w1.weight",
        "model.layers.0.block_sparse_moe.e_score_correction_bias",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.self_attn.q_norm.weight",
    } <= names
    names = tensors_of(save(deepseek(), tmp_path / "deepseek")).keys()
    assert {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.11.gate_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
    } <= names


def test_kimis_text_part_loads_under_its_own_names_and_the_rest_is_left_out_with_a_notice(tmp_path, caplog):
    plain = save(deepseek(), tmp_path / "deepseek")
    folder = as_kimi(plain, tmp_path / "kimi")
    expected = load_target(open_checkpoint(plain), torch.float32, CPU)
    with caplog.at_level(logging.WARNING):
        kimi = load_target(open_checkpoint(folder), torch.float32, CPU)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, kimi.get_parameter(name)), name
    assert kimi.spec.mla == expected.spec.mla and kimi.spec.moe == expected.spec.moe
    assert kimi.spec.rope == expected.spec.rope and kimi.spec.eos_token_ids == (2,)
    notices = [record.getMessage() for record in caplog.records if "vision tower" in record.getMessage()]
    assert len(notices) == 1 and "3 tensors" in notices[0]


def test_blocks_for_several_tokens_are_left_out_with_a_notice(tmp_path, caplog):
    folder = save(deepseek(), tmp_path / "without")
    extra = {f"model.layers.4.{name}": torch.zeros(2, 2) for name in ("eh_proj.weight", "enorm.weight")}
    config = json.loads((folder / "config.json").read_text())
    folder = write(tmp_path / "with", config, {**tensors_of(folder), **extra})
    with caplog.at_level(logging.WARNING):
        load_target(open_checkpoint(folder), torch.float32, CPU)
    assert any("multi-token prediction" in record.getMessage() for record in caplog.records)
