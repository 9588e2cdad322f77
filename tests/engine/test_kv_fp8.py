"""Keys and values in FP8 are a setting of their own: with it, any draft gives the tokens of plain decoding with it."""

import random

import pytest
import torch
from arrivals import drive

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.spec import RopeSpec
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.memory import bytes_per_page
from slipstream.errors import ConfigError
from slipstream.kernels import select
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache, KvShape
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import engine_of, follower_draft, tiny_draft, tiny_target
from tiny_families import folder_of

TARGET = tiny_target()
FP8 = {"kv_cache_dtype": "fp8"}
CPU = torch.device("cpu")


def plain(item, **options):
    return drive(engine_of(TARGET, prefix_cache=False, page_size=16, **options), [item], random.Random(0))[0]


@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape(3, 2, 6)], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_preempted_and_cached_requests_read_the_codes_they_would_have_written(shape, cuda_graphs):
    order = random.Random(4)
    shared = [order.randrange(61) for _ in range(24)]
    work = [
        ([*shared, *(order.randrange(61) for _ in range(9))], SamplingParams(max_tokens=30, temperature=0.8), seed)
        for seed in range(6)
    ]
    engine = engine_of(
        TARGET, follower_draft(TARGET), shape, max_context=80, page_size=4, num_pages=44, max_batch_tokens=16,
        cuda_graphs=cuda_graphs, **FP8,
    )  # fmt: skip
    assert drive(engine, work, order) == [plain(item, **FP8) for item in work]
    assert engine.stats.preemptions
    assert engine.stats.cached_tokens


def test_rounds_on_a_cpu_run_in_fp8_and_give_their_own_plain_decodings_tokens():
    ops = CpuOps(2)
    work = [([7, 8, 9, 10, 11], SamplingParams(max_tokens=40, temperature=t), seed) for seed, t in ((1, 0.0), (2, 0.9))]
    texts = []
    for draft in (None, follower_draft(TARGET), tiny_draft(TARGET)):
        for config in (EngineConfig(max_context=128, **FP8), EngineConfig(max_context=128, max_batch_tokens=3, **FP8)):
            engine = build_engine(TARGET, draft, TreeShape.chain(3), config, ops)
            texts.append(drive(engine, work, random.Random(0)))
            assert engine.executor._able, "the C++ rounds read this cache"
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("family", ["GLM-4.7-Flash", "gpt-oss"])
def test_families_with_latents_sinks_and_experts_are_exact_too(family, tmp_path):
    target = load_target(open_checkpoint(folder_of(family, tmp_path)), torch.float32, CPU)
    work = [([5, 6, 7, 8], SamplingParams(max_tokens=20), 0), ([9, 4, 3], SamplingParams(max_tokens=12), 1)]
    expected = [drive(engine_of(target, None, **FP8), [item], random.Random(0))[0] for item in work]
    drafted = engine_of(target, "ngram", TreeShape.chain(3), max_batch_tokens=5, page_size=4, **FP8)
    assert drive(drafted, work, random.Random(1)) == expected


def test_target_and_draft_are_chosen_apart_and_memory_is_counted():
    draft = follower_draft(TARGET)
    engine = engine_of(TARGET, draft, kv_cache_dtype="auto", draft_kv_cache_dtype="fp8")
    assert engine.executor.runner.kv.layers[0].scales is None
    assert engine.drafter.kv.layers[0].scales is not None
    half, whole = (
        bytes_per_page([TARGET, draft], EngineConfig(kv_cache_dtype=dtype)) for dtype in ("fp8", "auto")
    )  # the tiny target computes in float32
    assert 3 * half < whole
    work = [([1, 2, 3], SamplingParams(max_tokens=30), 0)]
    assert drive(engine, work, random.Random(0)) == [plain(work[0])]
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp4'; it is auto or fp8"):
        EngineConfig(kv_cache_dtype="fp4")


def test_a_cache_of_latents_keeps_one_code_for_keys_and_values():
    layer = KvCache.allocate(KvShape(((1, 40),), 32), 2, 4, torch.float8_e4m3fn, CPU).layers[0]
    latents = torch.randn(3, 1, 40)
    select(CPU, "reference").write_kv(layer, latents, latents[..., :32], torch.tensor([1, 4, 6]))
    assert torch.equal(layer.values_SGd.view(torch.uint8), layer.keys_SGd.view(torch.uint8)[..., :32])


def test_a_bf16_target_and_its_draft_keep_half_the_bytes():
    shape = {"head_dim": 64, "rope": RopeSpec(theta=10000.0, rotary_dim=64)}
    target = tiny_target(**shape).to(torch.bfloat16)
    draft = tiny_draft(target).to(torch.bfloat16)
    taken = []
    for dtype in ("auto", "fp8"):
        engine = engine_of(target, draft, kv_cache_dtype=dtype, draft_kv_cache_dtype=dtype)
        layers = [*engine.executor.runner.kv.layers, *engine.drafter.kv.layers]
        tensors = [part for one in layers for part in (one.keys_SGd, one.values_SGd, *(one.scales or ()))]
        taken.append(sum(part.nbytes for part in tensors) / layers[0].keys_SGd.shape[0])
        config = EngineConfig(page_size=1, kv_cache_dtype=dtype, draft_kv_cache_dtype=dtype)
        assert taken[-1] == bytes_per_page([target, draft], config)
    assert 0.5 < taken[1] / taken[0] < 0.51  # a code for two bytes, and a scale for each head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_within_the_formats_error_of_those_over_keys_as_computed(dtype):
    order, target = random.Random(3), tiny_target().to(dtype)
    prompt = [order.randrange(61) for _ in range(90)]
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        engine = engine_of(target, kv_cache_dtype=kv_cache_dtype, max_context=128)
        engine.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), 0)
        (emission,) = [one for _ in range(9) for one in engine.step() if one.prompt_logprobs is not None]
        found.append(torch.tensor([one.logprob for one in emission.prompt_logprobs[1:]]))
    exact, short = found
    # Keys and values are off by a sixteenth at most each.
    assert 0 < (short - exact).abs().mean() < exact.std() * 2 / 16


def test_a_gpu_without_instructions_for_fp8_is_refused_when_the_engine_is_built():
    pytest.importorskip("triton")
    from slipstream.kernels.triton.ops import TritonOps
    from slipstream.kernels.triton.record import META, recording
    from slipstream.models.fused.survey import hollow_target

    with recording("sm_80"):
        ops = TritonOps(META)
        target = hollow_target(TARGET.spec, ops)
        with pytest.raises(ConfigError, match="sm_80 has no instructions for FP8"):
            build_engine(target, None, TreeShape.chain(3), EngineConfig(max_context=64, **FP8), ops)
