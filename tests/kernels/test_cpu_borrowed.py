"""Chains and rounds with borrowed tokens in one call draft what is drafted level by level."""

import pytest
import torch
from cpu_samples import packed_weight

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.errors import KernelError
from slipstream.kernels import Borrowed, ChainStart, Cut, Growth, step_ops
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.reference.trees import kept_candidates
from slipstream.models.context import KvCache
from slipstream.models.packing import quantize_linears
from slipstream.quant.scheme import dequantize
from slipstream.speculation.drafter import DraftView
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.levels import Levels, LevelsStart, growth_rows
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, knowing_half, stammering_target, tiny_draft, tiny_target

CPU = torch.device("cpu")
VOCAB = 220
TARGET = stammering_target(VOCAB)


class PartByPart(CpuOps):
    """The same kernels, but no round in one call."""

    def run_rounds(self, models, start, depth, cut):
        return None


class LevelByLevel(PartByPart):
    """The same kernels, but no chain in one call either."""

    def draft_chain(self, draft, kv, start, depth, cut):
        return None


def story(draft, ops, temperature, **config):
    """Return every step's tokens and which of them were drafted, and what was counted; a request comes late."""
    settings = EngineConfig(max_context=96, page_size=4, **config)
    engine = build_engine(TARGET, draft, TreeShape.chain(4), settings, ops)
    params = SamplingParams(max_tokens=28, temperature=temperature)
    for seed, prompt in enumerate(([3, 1, 4, 1, 5], [8, 2, 6], [5] * 11, list(range(1, 41)))):
        engine.add(prompt, params, seed, speculate=seed != 2)
    steps = []
    while engine.has_work:
        if len(steps) == 5:
            engine.add([8, 8, 1], SamplingParams(max_tokens=9, logprobs=1, temperature=temperature), 3)
        step = engine.step()
        steps.append([(e.request_id, [(t.token_id, t.draft_position) for t in e.tokens]) for e in step])
    return steps, engine.stats.acceptance.emitted, engine.stats.acceptance.passes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
def test_a_round_a_chain_and_levels_draft_alike_with_borrowed_tokens(cpu_ops, feedback, quantized, temperature):
    draft = knowing_half(follower_draft(TARGET, feedback=feedback))
    if quantized:
        quantize_linears(draft, cpu_ops)
    told = story(draft, CpuOps(2, cpu_ops.isa), temperature)
    assert told == story(draft, PartByPart(1, cpu_ops.isa), temperature)
    assert told == story(draft, LevelByLevel(2, cpu_ops.isa), temperature)
    unborrowed = story(draft, CpuOps(2, cpu_ops.isa), temperature, borrowed_tokens=0)
    assert told != unborrowed and told[1] == unborrowed[1]


def borrowed_of(draft, count, capacity, generator):
    tokens = torch.randperm(VOCAB // 2, generator=generator)[:capacity] * 2 + 1
    width = draft.spec.hidden_size
    return Borrowed(tokens, torch.randn(capacity, width, generator=generator) / 4, 0.5, count)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [32, 37])
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, None, 70, 3], [70, 64, 65, 0]], ids=str)
def test_a_chain_scores_borrowed_tokens_among_all(cpu_ops, counts, width, temperature, generator):
    target = tiny_target(vocab_size=VOCAB, hidden_size=width)
    sizes = {"hidden_size": width, "target_hidden_size": width}
    draft = knowing_half(tiny_draft(target, vocab_size=VOCAB, draft_vocab_size=VOCAB, **sizes))
    requests, depth = len(counts), 3
    borrowed = [None if count is None else borrowed_of(draft, count, 70, generator) for count in counts]
    hidden_RD = torch.randn(requests, width, generator=generator)
    pages, lengths = [[2 * row, 2 * row + 1] for row in range(requests)], range(2, 2 + requests)
    reference = ReferenceOps(CPU)
    logits_RV = draft.foretell(hidden_RD, reference)

    def cache():
        return KvCache.allocate(draft.kv_shape, 2 * requests, 4, torch.float32, CPU)

    start = ChainStart(
        torch.tensor(pages, dtype=torch.int32),
        4,
        torch.tensor(lengths),
        torch.full((requests,), temperature),
        torch.arange(requests) + 3,
        hidden_RD,
        logits_RV,
        borrowed,
    )
    scores_RK, tokens_RK = cpu_ops.draft_chain(draft, cache(), start, depth, Cut())
    views = [
        DraftView(row, [0] * (length + 1), pages[row], temperature, row + 3, 9) for row, length in enumerate(lengths)
    ]
    held = [own if own is not None and own.count else None for own in borrowed]
    rows, start = growth_rows(views, hidden_RD.device), LevelsStart(hidden_RD, logits_RV, held)
    levels = Levels(draft, cache(), reference, rows, start)
    growth = Growth.start(plan_of(TreeShape.chain(depth), CPU), rows, 4)
    expected = kept_candidates(growth, *grow(growth, levels, step_ops(reference)))
    assert torch.equal(tokens_RK, expected.tokens_RC)
    torch.testing.assert_close(scores_RK, expected.scores_RC, rtol=1e-4, atol=1e-4)
    assert bool((tokens_RK % 2).any()) == any(counts)


def test_a_borrowed_token_without_an_embedding_is_refused(fast_ops, generator):
    draft = knowing_half(tiny_draft(TARGET, vocab_size=VOCAB, draft_vocab_size=VOCAB))
    kv = KvCache.allocate(draft.kv_shape, 1, 4, torch.float32, CPU)
    own, zero = borrowed_of(draft, 2, 4, generator), torch.tensor([0])
    logits = torch.zeros(1, len(draft.token_ids_V))
    start = ChainStart(
        torch.zeros(1, 1, dtype=torch.int32), 4, zero, torch.zeros(1), zero, torch.zeros(1, 32), logits, [own]
    )
    assert fast_ops.draft_chain(draft, kv, start, 1, Cut()) is not None
    own.tokens_B[1] = VOCAB
    with pytest.raises(KernelError, match="outside"):
        fast_ops.draft_chain(draft, kv, start, 1, Cut())


@pytest.mark.parametrize("format", ["w8a8_int8", "w4a8"])
@pytest.mark.parametrize("shape", [(5, 34), (50, 96)])
def test_rows_of_a_weight_with_a_scale_per_row_are_read_from_its_panels(cpu_ops, format, shape, generator):
    weight = packed_weight(format, *shape, generator)
    ids = torch.tensor([[4, 0], [1, 4]])
    rows = cpu_ops.packed_rows(cpu_ops.prepare(weight), ids)
    torch.testing.assert_close(rows, dequantize(weight)[ids])
