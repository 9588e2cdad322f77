"""On every family a draft changes no token: chains, trees, n-grams, whoever runs the steps; greedy and by top-p.

Prompts come in chunks and begin alike, pages are too few for all, and windows and chunks of attention end inside trees.
"""

import dataclasses
import functools
import random

import pytest
import torch
from arrivals import drive

from oracle import OracleDrafter
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.spec import DraftSpec, RopeSpec
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.executors.cuda_graph.executor import GraphExecutor
from slipstream.executors.eager import EagerExecutor
from slipstream.executors.native import NativeExecutor
from slipstream.executors.runner import Runner
from slipstream.kernels import select
from slipstream.models.context import KvCache
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import randomise
from tiny_families import CONFIGS, folder_of, some_tokens
from tiny_moe import VOCAB

CPU = torch.device("cpu")
OPS = select(CPU)
DRAFT = DraftSpec(
    architecture="LlamaForCausalLMEagle3", vocab_size=VOCAB, draft_vocab_size=VOCAB, hidden_size=64,
    target_hidden_size=64, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, rms_eps=1e-6,
    rope=RopeSpec(theta=1e6, rotary_dim=16), max_position=256, captured_layers=(1, 2, 3),
)  # fmt: skip
CHAIN, TREE = TreeShape.chain(3), TreeShape(depth=3, width=3, budget=8)
# 26 and 29 tokens of prompt and 12 of answer: beyond every window of 7 or 9, and across the end of a chunk of 16 at 32.
SHARED, TOKENS = some_tokens(21).tolist(), 12
WORK = [
    (SHARED + some_tokens(5 + 3 * (seed % 2), seed).tolist(), SamplingParams(max_tokens=TOKENS, **settings), seed)
    for seed, settings in enumerate(
        ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 0.0})
    )
]
# Chunks of a prompt, and pages for two of the three requests that run: the newest is preempted.
TIGHT = EngineConfig(max_context=48, page_size=4, max_requests=3, max_batch_tokens=16, num_pages=16)


@functools.cache
def alone(target) -> list[list[int]]:
    """Return what each request gets by itself, without a draft, from an engine that caches nothing."""
    config = dataclasses.replace(TIGHT, prefix_cache=False, max_batch_tokens=64)
    return [drive(build_engine(target, None, CHAIN, config, OPS), [item], random.Random(0))[0] for item in WORK]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request, tmp_path_factory):
    folder = folder_of(request.param, tmp_path_factory.mktemp("target"))
    return load_target(open_checkpoint(folder), torch.float32, CPU, ops=OPS)


def checked(engine: Engine, target) -> Engine:
    assert drive(engine, WORK, random.Random(1)) == alone(target)
    assert engine.stats.preemptions > 0, "pages never ran out, so nothing was shown"
    assert engine.stats.cached_tokens > 0, "no prefix was shared, so nothing was shown"
    return engine


@pytest.mark.parametrize(
    ("drafts", "shape", "executor"),
    [
        (None, CHAIN, NativeExecutor),
        ("ngram", CHAIN, NativeExecutor),
        ("EAGLE-3", CHAIN, NativeExecutor),
        ("EAGLE-3", TREE, NativeExecutor),
        ("EAGLE-3", CHAIN, GraphExecutor),
        ("EAGLE-3", TREE, GraphExecutor),
    ],
    ids=["none", "n-gram", "chain", "tree", "captured chain", "captured tree"],
)
def test_tokens_are_those_of_plain_decoding(target, drafts, shape, executor):
    draft = drafts
    if drafts == "EAGLE-3":
        draft = Eagle3Draft(dataclasses.replace(DRAFT, vocab_size=target.spec.vocab_size))
        randomise(draft, 3, 0.3)
        draft.share_embedding(target.embed_tokens)
    config = dataclasses.replace(TIGHT, cuda_graphs="on" if executor is GraphExecutor else "off")
    engine = checked(build_engine(target, draft, shape, config, OPS), target)
    assert not OPS.row_invariant or type(engine.executor) is executor


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_accepted_branches_are_kept_and_moved_right(target, page_size):
    """Trees that hold the answer among wrong branches, on pages of any size."""
    texts = [(*prompt, *answer) for (prompt, _, _), answer in zip(WORK, alone(target), strict=True)]
    config = dataclasses.replace(TIGHT, page_size=page_size, num_pages=64 // page_size)
    kv = KvCache.allocate(target.kv_shape, config.resolve_num_pages(7), page_size, torch.float32, CPU)
    oracle = OracleDrafter(texts, 8, 0.95, 0, CPU)
    executor = EagerExecutor(Runner(target, kv, OPS, ()), oracle, config.max_requests)
    engine = checked(Engine(executor, config, target.spec), target)
    assert engine.stats.acceptance.acceptance_length > 1.3, "nothing was accepted, so nothing was shown"
