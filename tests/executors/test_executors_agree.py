"""Whichever executor runs them, however they arrive, requests get what each gets alone from plain eager steps."""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from mixed_work import Answer, Ask, asks, drive, one_by_one, whole_prompt

from answers import assert_same_answers
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.native import NativeExecutor
from slipstream.kernels import select
from slipstream.models.load import load_target
from slipstream.models.target import Target
from slipstream.speculation.tree import TreeShape
from tiny import DEVICE, follower_draft, stammering_target
from tiny_moe import deepseek, minimax, save

OPS = select(DEVICE)
TARGETS = ("llama", "latent", "experts")
DRAFTS = ("chain", "tree", "static tree", "n-gram", "none")
SHAPES = {
    "tree": TreeShape(depth=3, width=3, budget=7),
    "static tree": TreeShape(paths=((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1))),
}
EXECUTORS = ("eager", "captured", "native") if DEVICE.type == "cpu" else ("eager", "captured")


@functools.cache
def target_of(name: str) -> Target:
    """Return a target in BF16 that often says a token twice, which a follower's draft foresees."""
    if name == "llama":
        return stammering_target(61).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        model = deepseek() if name == "latent" else minimax()
        target = load_target(open_checkpoint(save(model, Path(folder))), torch.float32, DEVICE, ops=OPS)
    target.embed_tokens.weight.mul_(4)
    target.lm_head.weight.copy_(target.embed_tokens.weight)
    return target.bfloat16()


@functools.cache
def draft_of(target: str, draft: str):
    if draft in ("chain", *SHAPES):
        wide = {} if target == "llama" else {"hidden_size": 64, "target_hidden_size": 64}
        return follower_draft(target_of(target), **wide).bfloat16()
    return "ngram" if draft == "n-gram" else None


def engine_of(target: str, draft: str, executor: str, **config) -> Engine:
    """Return an engine whose steps are run by a given executor, as far as it takes the draft."""
    settings = {"max_context": 96, "page_size": 4, "max_requests": 6, "max_batch_tokens": 24, "num_pages": 28}
    settings["cuda_graphs"] = "on" if executor == "captured" else "off"
    built = EngineConfig(**{**settings, **config})
    shape = SHAPES.get(draft, TreeShape.chain(3))
    made = build_engine(target_of(target), draft_of(target, draft), shape, built, OPS)
    if executor == "eager":
        runs = EagerExecutor(made.executor.runner, made.executor.drafter, built.max_requests)
        return Engine(runs, built, target_of(target).spec)
    return made


@functools.cache
def work_of(target: str, count: int) -> tuple[list[Ask], list[Answer]]:
    """Return requests, and what each gets alone."""
    work = asks(count, target_of(target).spec.vocab_size, count)
    return work, one_by_one(engine_of(target, "none", "eager", prefix_cache=False, num_pages=None), work)


def check(target: str, draft: str, executor: str, count: int, **config) -> tuple[Engine, bool]:
    """Run requests and compare; return the engine, and whether a second turn found its first answer in the cache."""
    work, alone = work_of(target, count)
    engine = engine_of(target, draft, executor, **config)
    exact = OPS.row_invariant
    found = drive(engine, work, random.Random(1))
    expected = [
        answer if ask.aborted_after is None else Answer(answer.tokens[: len(got.tokens)], answer.prompt)
        for ask, answer, got in zip(work, alone, found, strict=True)
    ]
    assert_same_answers([answer.tokens for answer in found], [answer.tokens for answer in expected], exact)
    scored = [[[(0, score) for score in answer.prompt] for answer in side] for side in (found, expected)]
    assert_same_answers(*scored, exact)
    assert [a.reason for a, ask in zip(found, work, strict=True) if ask.aborted_after is None] == [
        a.reason for a, ask in zip(alone, work, strict=True) if ask.aborted_after is None
    ]
    second = [(ask.follows, answer) for ask, answer in zip(work, found, strict=True) if ask.follows is not None]
    return engine, any(got.num_cached > len(whole_prompt(work[first], work, found)) for first, got in second)


@pytest.mark.parametrize(
    ("draft", "executor"),
    [
        ("n-gram", "eager"),
        ("tree", "captured"),
        *((draft, executor) for draft in ("chain", "none") for executor in EXECUTORS),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_mixed_batch_gets_what_each_request_gets_alone(target, draft, executor):
    engine, _ = check(target, draft, executor, 17)
    assert engine.stats.cached_tokens > 0, "no prefix was shared, so nothing was shown"
    assert engine.stats.preemptions > 0, "pages never ran out, so nothing was shown"
    kinds = {"eager": EagerExecutor, "captured": GraphExecutor, "native": NativeExecutor}
    assert type(engine.executor) is kinds[executor]


def test_static_trees_run_in_captured_steps():
    engine, _ = check("llama", "static tree", "captured", 17)
    assert type(engine.executor) is GraphExecutor
    assert engine.stats.acceptance.acceptance_length > 1.2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_cached_answer_serves_its_second_turn_as_if_it_were_computed_anew(executor):
    engine, answer_was_cached = check("llama", "chain", executor, 17, num_pages=None)
    assert engine.stats.preemptions == 0
    assert answer_was_cached


@pytest.mark.exact
@pytest.mark.parametrize("num_pages", [28, None], ids=["few pages", "many pages"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_four_hundred_mixed_requests_get_what_each_gets_alone(target, draft, executor, num_pages):
    engine, answer_was_cached = check(target, draft, executor, 400, num_pages=num_pages)
    assert engine.stats.cached_tokens > 0, "no prefix was shared, so nothing was shown"
    assert (engine.stats.preemptions > 0) == (num_pages is not None)
    # Over latents an answer is computed anew where it has become part of a prompt (`engine/page_keys.py`).
    assert answer_was_cached or target == "latent"
