"""A draft is exchanged between two steps: no answer changes, however bad the draft that takes over."""

import pytest
import torch

from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts import AS_STARTED, DraftShelf, ReadDraft
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.run.output import add_draft
from tiny import (
    DEVICE,
    OPS,
    VOCAB,
    engine_of,
    follower_draft,
    knowing_half,
    run,
    stammering_target,
    tiny_draft,
    tiny_target,
)

CAPTURED = (4, 4, 4)
CONFIG = EngineConfig(max_context=128, page_size=4, max_requests=64, max_batch_tokens=256)
KERNELS = ["reference", "cpu"] if DEVICE.type == "cpu" else ["auto"]


def poisoned(target, seed):
    """Return a draft of the follower's shape that learned nothing."""
    return tiny_draft(target, seed, captured_layers=CAPTURED)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "shape",
    [TreeShape.chain(3), pytest.param(TreeShape(depth=3, width=2, budget=6), marks=pytest.mark.long)],
    ids=str,
)
def test_fifty_exchanges_under_64_streams_change_no_token(kernels, shape):
    ops = CpuOps(2) if kernels == "cpu" else OPS
    target = tiny_target()
    prompts = [[i % VOCAB, 4, 9, *range(i % 5)] for i in range(64)]
    params = [SamplingParams(max_tokens=36, temperature=i % 3 / 2, ignore_eos=True) for i in range(64)]
    plain = run(build_engine(target, None, None, CONFIG, ops), prompts, params, list(range(64)))
    engine = build_engine(target, follower_draft(target), shape, CONFIG, ops)
    shelf = DraftShelf(engine)
    others = [ReadDraft(f"draft {i}", poisoned(target, i) if i % 2 else follower_draft(target)) for i in range(5)]
    ids = [engine.add(*asked) for asked in zip(prompts, params, range(64), strict=True)]
    answers = {i: [] for i in ids}
    exchanges = 0
    while engine.has_work:
        if exchanges < 50:
            shelf.go_back() if exchanges % 7 == 6 else shelf.use(others[exchanges % 5])
            exchanges += 1
        for emission in engine.step():
            answers[emission.request_id] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    assert [answers[i] for i in ids] == plain
    assert exchanges > (15 if kernels == "reference" else 5), "there was time for many"
    served = shelf.served()
    assert sum(one.passes for one in served) == engine.stats.acceptance.decoding_passes
    assert sum(one.tokens for one in served) == engine.stats.acceptance.emitted - engine.stats.acceptance.prompt_passes


def test_a_better_draft_drafts_better_from_the_next_step_on_and_the_old_one_can_return():
    target = stammering_target(VOCAB)
    engine = engine_of(target, poisoned(target, 3))
    shelf = DraftShelf(engine)
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * 4
    prompts = [[i, 1, 2] for i in range(4)]
    run(engine, prompts, params, [0] * 4)
    shelf.use(ReadDraft("better", follower_draft(target)))
    run(engine, prompts, params, [0] * 4)
    shelf.go_back()
    run(engine, prompts, params, [0] * 4)
    assert (shelf.name, shelf.name_before) == (AS_STARTED, "better")
    first, better = shelf.served()
    assert better.acceptance_length > 1.2 * first.acceptance_length
    assert first.passes + better.passes == engine.stats.acceptance.decoding_passes


def test_a_draft_with_another_vocabulary_of_the_same_size_may_take_over():
    target = tiny_target()
    plain = run(engine_of(target), [[5, 6]], [SamplingParams(max_tokens=40)], [1])
    half, other = knowing_half(follower_draft(target)), knowing_half(follower_draft(target))
    other.token_ids_V = torch.arange(len(half.token_ids_V))
    other.lm_head.weight.copy_(target.lm_head.weight[: len(half.token_ids_V)])
    engine = engine_of(target, half)
    shelf = DraftShelf(engine)
    request = engine.add([5, 6], SamplingParams(max_tokens=40), 1)
    answer: list[int] = []
    for number in range(100):
        if number == 2:
            shelf.use(ReadDraft("other", other))
        for emission in engine.step():
            assert emission.request_id == request
            answer += [token.token_id for token in emission.tokens]
        if not engine.has_work:
            break
    assert [answer] == plain


def test_what_cannot_take_over_is_refused_by_name(tmp_path):
    target = tiny_target()
    draft = follower_draft(target)
    shelf = DraftShelf(engine_of(target, draft))
    with pytest.raises(ConfigError, match="none was exchanged yet"):
        shelf.go_back()
    shelf.use(shelf.read(save(draft, tmp_path / "like")))
    assert shelf.name == str(tmp_path / "like")
    with pytest.raises(ConfigError, match="differs from the draft in use in captured_layers"):
        shelf.read(save(tiny_draft(target), tmp_path / "other"))
    with pytest.raises(ConfigError, match="differs from the draft in use in draft_vocab_size"):
        shelf.read(save(knowing_half(draft), tmp_path / "half"))
    with pytest.raises(ConfigError, match="What drafts here is"):
        DraftShelf(engine_of(target, "ngram")).read(tmp_path / "like")


def save(draft, folder):
    with CheckpointWriter(folder, 1 << 30) as writer:
        add_draft(writer, draft, "sglang", "tiny")
    return folder
