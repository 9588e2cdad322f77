"""Drafting a chain in one call proposes what drafting it level by level proposes, and steps keep to one pool."""

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.errors import KernelError
from slipstream.kernels import ChainStart, Cut
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache
from slipstream.models.packing import quantize_linears
from slipstream.speculation.drafter import NoDrafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, follower_draft, tiny_draft, tiny_target

TARGET = tiny_target()
DRAFTS = {
    "follower": lambda: follower_draft(TARGET),
    "fed after the norm": lambda: tiny_draft(TARGET, seed=9, residual="normed", feedback="post_norm"),
    "two blocks": lambda: tiny_draft(TARGET, seed=3, num_layers=2),
    "small vocabulary": lambda: tiny_draft(TARGET, seed=4, draft_vocab_size=17),
}


class PartByPart(CpuOps):
    """The same kernels, but no round in one call."""

    def run_rounds(self, models, start, depth, cut):
        return None


class LevelByLevel(PartByPart):
    """The same kernels, but no chain in one call either."""

    def draft_chain(self, draft, kv, start, depth, cut):
        return None


def emissions(draft, ops, temperature: float) -> list[list[tuple[int, list[tuple[int, int]]]]]:
    """Return, step by step, each request's tokens and which of them were drafted."""
    engine = build_engine(TARGET, draft, TreeShape.chain(4), EngineConfig(max_context=96, page_size=4), ops)
    for seed, prompt in enumerate(([3, 1, 4, 1, 5], [9, 2, 6], [5] * 11)):
        engine.add(prompt, SamplingParams(max_tokens=20, temperature=temperature), seed)
    steps = []
    while engine.has_work:
        step = engine.step()
        steps.append([(e.request_id, [(t.token_id, t.draft_position) for t in e.tokens]) for e in step])
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_chain_in_one_call_is_the_chain_drafted_level_by_level(cpu_ops, name, quantized, temperature):
    draft = DRAFTS[name]()
    if name == "small vocabulary":
        draft.token_ids_V = draft.token_ids_V * 3 + 2
    if quantized:
        quantize_linears(draft, cpu_ops)
    steps = emissions(draft, PartByPart(2, cpu_ops.isa), temperature)
    assert steps == emissions(draft, LevelByLevel(1, cpu_ops.isa), temperature)
    if name == "follower" and not quantized:
        assert any(position > 1 for step in steps for _, tokens in step for _, position in tokens)


def test_a_chain_that_would_leave_its_pages_is_refused(fast_ops):
    draft = tiny_draft(TARGET)
    kv = KvCache.allocate(draft.kv_shape, 2, 4, torch.float32, torch.device("cpu"))
    start = ChainStart(
        torch.zeros(1, 1, dtype=torch.int32),
        4,
        torch.tensor([3]),
        torch.zeros(1),
        torch.tensor([0]),
        torch.zeros(1, 32),
        torch.zeros(1, VOCAB),
    )
    assert fast_ops.draft_chain(draft, kv, start, 2, Cut()) is not None
    with pytest.raises(KernelError, match="outside its pages"):
        fast_ops.draft_chain(draft, kv, start, 3, Cut())


def test_a_level_is_drafted_only_where_the_chains_before_it_are_likely_enough_together(fast_ops):
    draft = tiny_draft(TARGET)
    kv = KvCache.allocate(draft.kv_shape, 4, 4, torch.float32, torch.device("cpu"))
    pages = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int64)
    start = ChainStart(pages, 4, zeros, torch.zeros(2), zeros, torch.randn(2, 32), torch.randn(2, VOCAB))
    scores_RK, _ = fast_ops.draft_chain(draft, kv, start, 4, Cut())
    assert scores_RK.isfinite().all()
    by_level = scores_RK.exp().sum(0).tolist()  # falling: what a chain is worth only shrinks
    for level, worth in enumerate(by_level[:3]):
        cut_RK, _ = fast_ops.draft_chain(draft, kv, start, 4, Cut(need=worth * 1.001))
        assert torch.equal(cut_RK[:, : level + 1], scores_RK[:, : level + 1])
        assert cut_RK[:, level + 1 :].eq(-torch.inf).all()
    floor = float(scores_RK[:, 0].max()) + 1e-3
    assert fast_ops.draft_chain(draft, kv, start, 4, Cut(floor))[0][:, 1:].eq(-torch.inf).all()


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_below_the_floor_ends_and_the_others_go_on_as_if_it_had_not(cpu_ops, name, temperature):
    draft, requests, depth = DRAFTS[name](), 5, 4
    generator = torch.Generator().manual_seed(7)
    pages = torch.arange(10, dtype=torch.int32).view(requests, 2)
    lengths, seeds = torch.arange(requests), torch.arange(requests) + 3
    hidden = torch.randn(requests, 32, generator=generator)
    logits = torch.randn(requests, len(draft.token_ids_V), generator=generator)

    def drafted(cut):
        kv = KvCache.allocate(draft.kv_shape, 10, 4, torch.float32, torch.device("cpu"))
        start = ChainStart(pages, 4, lengths, torch.full((requests,), temperature), seeds, hidden, logits)
        return cpu_ops.draft_chain(draft, kv, start, depth, cut)

    scores_RK, tokens_RK = drafted(Cut())
    for floor in scores_RK.flatten().tolist():
        cut_RK, cut_tokens_RK = drafted(Cut(floor))
        below_RK = scores_RK < floor
        ended_RK = below_RK.cumsum(1) > below_RK.int()  # behind the first that is below
        assert cut_RK[ended_RK].eq(-torch.inf).all()
        assert torch.equal(cut_RK[~ended_RK], scores_RK[~ended_RK])
        assert torch.equal(cut_tokens_RK[~ended_RK], tokens_RK[~ended_RK])


def test_a_draft_that_names_tokens_without_embeddings_is_refused(fast_ops):
    draft = tiny_draft(TARGET)
    draft.token_ids_V = draft.token_ids_V + 1
    kv = KvCache.allocate(draft.kv_shape, 2, 4, torch.float32, torch.device("cpu"))
    zero = torch.tensor([0])
    start = ChainStart(torch.zeros(1, 2, dtype=torch.int32), 4, zero, torch.zeros(1), zero, *torch.zeros(2, 1, 32))
    with pytest.raises(KernelError, match="outside 0 to 60"):
        fast_ops.draft_chain(draft, kv, start, 2, Cut())


def test_torch_keeps_to_one_thread_within_a_step_and_has_its_own_back_after_it(fast_ops, monkeypatch):
    seen = []
    propose = NoDrafter.propose
    monkeypatch.setattr(NoDrafter, "max_nodes", 2)
    monkeypatch.setattr(
        NoDrafter, "propose", lambda self, views: seen.append(torch.get_num_threads()) or propose(self, views)
    )
    engine = build_engine(TARGET, None, TreeShape(), EngineConfig(max_context=96), fast_ops)
    engine.add([1, 2, 3], SamplingParams(max_tokens=4), 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        while engine.has_work:
            engine.step()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen and set(seen) == {1}
