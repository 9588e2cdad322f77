"""DFlash drafts: a block is filled in one pass over the target's features, and the text stays plain decoding's."""

import dataclasses
import random

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.executors.eager import EagerExecutor
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import (
    DEVICE,
    OPS,
    VOCAB,
    block_draft,
    engine_of,
    recalling_draft,
    run,
    stammering_target,
    stored_tensors,
    tiny_target,
)

CHAIN, TREE = TreeShape.chain(5), TreeShape(depth=4, width=3, budget=9)
CONFIG = EngineConfig(max_context=128, page_size=4, max_requests=8, max_batch_tokens=64)
WINDOWED = {"windows": (None, 6), "causal": (False, True)}
on_a_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with sums in another order")


def work():
    order = random.Random(5)
    prompts = [[order.randrange(VOCAB) for _ in range(order.randrange(3, 30))] for _ in range(5)]
    sampling = [SamplingParams(max_tokens=20, temperature=0.9 * (i % 2), top_p=0.9) for i in range(5)]
    return prompts, sampling, [11 * i for i in range(5)]


def proposals(engine, prompts, params):
    """Return every tree that is drafted beside the tokens known then."""
    proposed, propose = [], engine.executor.drafter.propose

    def recorded(views):
        trees = propose(views)
        proposed.extend(zip([list(view.tokens) for view in views], trees.unpack(), strict=True))
        return trees

    engine.executor.drafter.propose = recorded
    run(engine, prompts, [params] * len(prompts), [0] * len(prompts))
    return proposed


@on_a_cpu
@pytest.mark.parametrize(
    ("changes", "max_batch_tokens", "kernels"),
    [
        ({}, 64, "reference"),
        ({}, 5, "cpu"),
        (WINDOWED, 64, "reference"),
        (WINDOWED, 64, "cpu"),
        ({"causal": (True, True), "attention_bias": True}, 7, "reference"),
    ],
    ids=["both ways", "prompts in chunks", "a window", "a window in C++", "causal, biases"],
)
def test_a_chain_is_what_the_published_formula_foretells(changes, max_batch_tokens, kernels):
    target = tiny_target()
    draft = block_draft(target, **changes)
    config = dataclasses.replace(CONFIG, max_batch_tokens=max_batch_tokens)
    engine = build_engine(target, draft, CHAIN, config, CpuOps(2) if kernels == "cpu" else OPS)
    proposed = proposals(engine, work()[0][:2], SamplingParams(max_tokens=14, temperature=0.0))
    assert len([tree for _, tree in proposed if len(tree.tokens) == 6]) > 12
    for tokens, tree in proposed:
        assert tree.tokens[1:] == filled_block(target, draft, tokens, 5)[: len(tree.tokens) - 1]


@torch.no_grad()
def filled_block(target, draft, tokens, depth):
    """Fill a block as the authors' code does, written out: one dense pass over the target's states and the block."""
    spec, weight = draft.spec, stored_tensors(draft)
    committed, size = len(tokens) - 1, 1 + depth
    states = dense_states(target, tokens[:-1], spec.captured_layers)
    context = normed(states @ weight["fc.weight"].T, weight["hidden_norm.weight"])
    ids = torch.tensor([tokens[-1], *[spec.mask_token_id] * depth])
    hidden = target.embed_tokens.weight[ids]
    key_at, query_at = torch.arange(committed + size), torch.arange(committed, committed + size)
    for index in range(spec.num_layers):

        def project(x, part, index=index):
            name = f"layers.{index}.self_attn.{part}"
            return x @ weight[f"{name}.weight"].T + weight.get(f"{name}.bias", 0)

        def norm(x, name, index=index):
            return normed(x, weight[f"layers.{index}.{name}.weight"])

        x = norm(hidden, "input_layernorm")
        both = torch.cat([context, x])
        q = turned(norm(heads(project(x, "q_proj")), "self_attn.q_norm"), query_at)
        k = turned(norm(heads(project(both, "k_proj")), "self_attn.k_norm"), key_at)
        v = heads(project(both, "v_proj"))
        repeats = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * spec.head_dim**-0.5
        distance = query_at[:, None] - key_at
        hidden_keys = (distance < 0) & spec.causal[index]
        hidden_keys |= distance >= (spec.windows[index] or len(key_at) + 1)
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)).flatten(1)
        hidden = hidden + project(out, "o_proj")
        x, mlp = norm(hidden, "post_attention_layernorm"), f"layers.{index}.mlp"
        gate = torch.nn.functional.silu(x @ weight[f"{mlp}.gate_proj.weight"].T) * (
            x @ weight[f"{mlp}.up_proj.weight"].T
        )
        hidden = hidden + gate @ weight[f"{mlp}.down_proj.weight"].T
    logits = normed(hidden, weight["norm.weight"]) @ target.lm_head.weight.T
    return logits[1:].argmax(-1).tolist()


def dense_states(target, tokens, layers):
    """Return the target's captured states at every position, side by side."""
    from slipstream.kernels.training.ops import TrainOps
    from slipstream.kernels.training.seen import Seen
    from slipstream.train.draft.packing import PackedContext

    count = len(tokens)
    context = PackedContext(TrainOps(DEVICE), torch.arange(count)[None], Seen(torch.zeros(1, count, dtype=torch.int64)))
    return torch.cat(target(torch.tensor([tokens]), context, layers).captured, -1)[0]


def normed(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def heads(x):
    return x.unflatten(-1, (-1, 8))


def turned(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@pytest.mark.parametrize("shape", [CHAIN, TREE, TreeShape.chain(1)], ids=["chain", "tree", "one token"])
@pytest.mark.parametrize("kernels", ["reference", "cpu"] if DEVICE.type == "cpu" else ["auto"])
def test_text_is_plain_decodings_and_some_guesses_are_kept(shape, kernels):
    target = stammering_target(VOCAB)
    ops = CpuOps(2) if kernels == "cpu" else OPS
    expected = run(build_engine(target, None, None, CONFIG, ops), *work())
    engine = build_engine(target, recalling_draft(target), shape, CONFIG, ops)
    assert type(engine.executor) is EagerExecutor
    assert run(engine, *work()) == expected
    assert engine.stats.acceptance.acceptance_length > 1.1


def test_a_tree_s_levels_hold_the_best_tokens_of_their_places():
    target = tiny_target()
    draft = block_draft(target)
    shapes = TreeShape.chain(3), TreeShape(depth=3, width=2)
    asked = [[1, 2, 3, 4]], SamplingParams(max_tokens=4, temperature=0.0)
    chains, trees = (
        next(tree for _, tree in proposals(engine_of(target, draft, shape), *asked) if len(tree.tokens) > 1)
        for shape in shapes
    )
    by_depth = [{trees.tokens[n] for n, d in enumerate(trees.depths) if d == depth} for depth in (1, 2, 3)]
    assert all(len(found) == 2 for found in by_depth), "a place's guesses do not depend on those before it"
    assert all(token in found for token, found in zip(chains.tokens[1:], by_depth, strict=True))


def test_a_shape_deeper_than_a_block_is_refused_at_the_start_and_later():
    target = tiny_target()
    with pytest.raises(ConfigError, match=r"blocks of 8 tokens.*--depth 7 or less"):
        engine_of(target, block_draft(target), TreeShape.chain(8))
    engine = engine_of(target, block_draft(target))
    with pytest.raises(ConfigError, match="--depth 7 or less"):
        engine.set_tree(TreeShape(depth=9, width=2, budget=9))
    engine.set_tree(TreeShape(depth=7, width=1, budget=2))
    assert engine.drafter.shape == TreeShape.chain(2)
