"""On every family a draft changes no token: chains, trees, n-grams; greedy and by top-p; windows crossed on the way."""

import dataclasses
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
from slipstream.executors.eager import EagerExecutor
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
ALIKE = ("GLM-4.7-Flash", "Qwen2.5-VL", "Qwen3-VL")  # their blocks are DeepSeek's, Qwen2's and Qwen3's
CHAIN, TREE = TreeShape.chain(3), TreeShape(depth=3, width=3, budget=8)
WORK = [
    (some_tokens(18, seed).tolist(), SamplingParams(max_tokens=8, temperature=temperature, top_p=top_p), seed)
    for seed, temperature, top_p in ((0, 0.0, 1.0), (1, 1.0, 0.9))
]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ALIKE])
def test_tokens_are_those_of_plain_decoding(name, tmp_path):
    target = load_target(open_checkpoint(folder_of(name, tmp_path)), torch.float32, CPU, ops=OPS)
    draft = Eagle3Draft(dataclasses.replace(DRAFT, vocab_size=target.spec.vocab_size))
    randomise(draft, 3, 0.3)
    draft.share_embedding(target.embed_tokens)
    config = EngineConfig(max_context=96, page_size=4, max_requests=2, max_batch_tokens=16)  # chunks, preemption
    plain = [drive(build_engine(target, None, CHAIN, config, OPS), [item], random.Random(0))[0] for item in WORK]
    for drafter, shape in (("ngram", CHAIN), (draft, CHAIN), (draft, TREE)):
        drafted = drive(build_engine(target, drafter, shape, config, OPS), WORK, random.Random(1))
        assert drafted == plain, shape
    texts = [(*prompt, *answer) for (prompt, _, _), answer in zip(WORK, plain, strict=True)]
    kv = KvCache.allocate(target.kv_shape, config.resolve_num_pages(7), 4, torch.float32, CPU)
    oracle = OracleDrafter(texts, 8, 0.95, 0, CPU)
    executor = EagerExecutor(Runner(target, kv, OPS, ()), oracle, config.max_requests)
    engine = Engine(executor, config, target.spec)
    assert drive(engine, WORK, random.Random(2)) == plain
    assert engine.stats.acceptance.acceptance_length > 1.3, "nothing was accepted, so nothing was shown"
