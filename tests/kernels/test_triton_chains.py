import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_samples import PAGE_SIZE, assert_same, copied, rows_of
from triton_samples import numbers, triton_ops

from interpreted import DEVICE
from slipstream.executors.cuda_graph.state import Loaded, StepModels
from slipstream.executors.cuda_graph.step import StepKind
from slipstream.executors.cuda_graph.tree_step import make_step
from slipstream.kernels import ChainOutcome, ChainPlaces, RowSampling, step_ops
from slipstream.kernels.reference.bookkeeping import TorchBookkeeping
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton import speculative
from slipstream.models.context import KvCache
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from step_parts import buffers_of, run_step
from tiny import tiny_draft, tiny_target

OPS = triton_ops()
TORCH = TorchBookkeeping(ReferenceOps(DEVICE))
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))


@given(SIZES)
@settings(max_examples=25, deadline=None)
def test_chains_are_placed_as_torch_places_them(sizes):
    num_rows, num_nodes, seed = sizes
    rows = rows_of(num_rows, num_nodes, torch.Generator().manual_seed(seed))
    places, expected = (ChainPlaces.allocate(num_rows, num_nodes, DEVICE) for _ in range(2))
    same_rows = copied(rows)
    TORCH.place_chains(same_rows, expected, PAGE_SIZE)
    OPS.place_chains(rows, places, PAGE_SIZE)
    assert_same(places, expected)
    assert_same(rows, same_rows)
    assert torch.equal(places.slots_RN % PAGE_SIZE, places.index_RN % PAGE_SIZE)


@given(SIZES, st.booleans())
@settings(max_examples=40, deadline=None)
def test_chains_are_accepted_as_torch_accepts_them(sizes, simulated):
    num_rows, num_nodes, seed = sizes
    generator = torch.Generator().manual_seed(seed)
    rows = rows_of(num_rows, num_nodes, generator)
    # Two tokens, so that chains agree for a while.
    chain, chosen = (torch.randint(0, 2, (num_rows, num_nodes), generator=generator).to(DEVICE) for _ in range(2))
    rates = torch.rand(num_nodes - 1, generator=generator).sort(descending=True).values
    thresholds = (rates.double() * 2**32).long().to(DEVICE) if simulated else torch.full_like(chain[0, 1:], -1)
    outcome, expected = (ChainOutcome.allocate(num_rows, num_nodes, DEVICE) for _ in range(2))
    same_rows = copied(rows)
    TORCH.accept_chains(same_rows, chain, chosen, thresholds, expected)
    OPS.accept_chains(rows, chain, chosen, thresholds, outcome)
    assert_same(outcome, expected)
    assert_same(rows, same_rows)


def test_a_chain_is_kept_up_to_the_first_token_the_target_would_not_say():
    rows = rows_of(3, 4, torch.Generator().manual_seed(1))
    rows.committed_R.fill_(5), rows.active_R.fill_(1), rows.drafts_until_R.copy_(torch.tensor([99, 99, 5]))
    chain = torch.tensor([[7, 1, 2, 3], [7, 1, 9, 3], [7, 1, 2, 3]], device=DEVICE)
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], device=DEVICE)
    outcome = ChainOutcome.allocate(3, 4, DEVICE)
    OPS.accept_chains(rows, chain, chosen, torch.full_like(chosen[0, 1:], -1), outcome)
    assert outcome.out_RE.tolist() == [[4, 1, 2, 3, 4], [2, 1, 2, 3, 4], [1, 1, 2, 3, 4]]
    assert rows.root_R.tolist() == [4, 2, 1]
    assert rows.committed_R.tolist() == [9, 7, 6]
    assert outcome.last_R.tolist() == [3, 5, 8]
    assert outcome.last_index_R.tolist() == [8, 6, 5] and outcome.last_keys_R.tolist() == [9, 7, 6]


@pytest.mark.parametrize("warm", [0.0, 0.7])
def test_the_token_proposed_is_that_of_the_best_entry(warm, generator):
    logits = numbers(3, 5000, generator=generator)
    ids = torch.randperm(20000, generator=generator)[:5000].sort().values.to(DEVICE)
    position = torch.tensor([3, 5, 8], device=DEVICE)
    sampling = RowSampling(torch.full((3,), warm, device=DEVICE), position + 11, position)
    chain = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    token = OPS.propose(logits, ids, sampling, chain[:, 2])
    assert torch.equal(token, TORCH.propose(logits, ids, sampling, torch.empty_like(token)))
    assert torch.equal(chain[:, 2], token) and not chain[:, [0, 1, 3]].any()


@pytest.mark.parametrize("warm", [0.0, 0.7])
def test_a_program_that_takes_several_blocks_finds_what_one_for_each_finds(warm, generator, monkeypatch):
    logits = numbers(6, 20000, generator=generator, dtype=torch.bfloat16).clamp(max=2.0)  # the best come many times
    logits[1] = float("-inf")
    logits[2, 1:] = float("-inf")
    logits[3, :9000] = float("nan")
    logits[4] = float("nan")
    logits[5, 8192:] = 3.0
    rows = torch.arange(6, device=DEVICE)
    sampling = RowSampling(torch.full((6,), warm, device=DEVICE), rows + 11, rows)
    monkeypatch.setattr(speculative, "_MANY_BLOCKS", 1)
    ids = torch.randperm(50000, generator=generator)[:20000].sort().values.to(DEVICE)
    several = OPS.propose(logits, ids, sampling, torch.empty_like(rows))
    monkeypatch.undo()
    assert torch.equal(OPS.propose(logits, ids, sampling, torch.empty_like(rows)), several)


def test_a_backend_without_such_kernels_leaves_them_to_torch():
    assert isinstance(step_ops(ReferenceOps(DEVICE)), TorchBookkeeping)
    assert step_ops(OPS) is OPS


class WithoutChains:
    """The Triton kernels, with a step's bookkeeping left to torch."""

    def __getattr__(self, name):
        if name in ("place_chains", "propose", "accept_chains", "expand_level", "rerank_trees", "accept_trees"):
            raise AttributeError(name)
        return getattr(OPS, name)


@pytest.mark.parametrize(
    ("num_drafted", "simulated", "tree"),
    [(0, (), None), (2, (0.9, 0.5), None), (4, (0.9,) * 4, TreeShape(depth=2, width=2, budget=4))],
)
def test_steps_come_to_the_same_whoever_keeps_their_books(num_drafted, simulated, tree):
    target = tiny_target(num_layers=1).to(DEVICE)
    draft = tiny_draft(target, feedback="post_norm").to(DEVICE)
    outs, states = [], []
    for ops in (OPS, WithoutChains()):
        kv, draft_kv = (KvCache.allocate(m.kv_shape, 12, PAGE_SIZE, torch.float32, DEVICE) for m in (target, draft))
        models = StepModels(ops, target, kv, (0, 1, 1), draft, draft_kv)
        buffers = buffers_of(models, 2, 6, num_drafted + 1, simulated)
        buffers.state.load(0, Loaded(3, 0, -5, 100, 0, 0.8), range(5, 11))
        buffers.sampling.load(0, SamplingParams(temperature=0.8), -5, (1, 2), (), ())
        step = make_step(models, buffers, StepKind(2, num_drafted, 24, tree=tree))
        emitted = []
        for _ in range(2):
            run_step(step)
            emitted.append(step.out_RE.clone())
        outs.append(torch.stack(emitted))
        states.append(buffers.state)
    assert torch.equal(*outs)
    assert (outs[0][:, 0, 0] >= 1).all() and not outs[0][:, 1, 0].any()
    assert_same(*(state.rows for state in states))
    for name in ("feedback_RD", "logits_RV", "slot_R"):
        assert torch.equal(*(getattr(state, name) for state in states)), name
