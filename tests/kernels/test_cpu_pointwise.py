import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import KernelError
from slipstream.kernels import RowSampling, SampleRows, SamplingState
from slipstream.kernels.cpu.library import load_library
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.speculation.sampling import SamplingParams

CPU = torch.device("cpu")
REFERENCE = ReferenceOps(CPU)


@pytest.mark.parametrize("shape", [(1, 576), (40, 576), (3, 2, 5), (0, 16), (2, 33)])
def test_norms_and_activations_match_the_reference(cpu_ops, generator, shape):
    x = torch.randn(shape, generator=generator) * 3
    weight = torch.randn(shape[-1], generator=generator)
    assert torch.allclose(cpu_ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    doubled = torch.cat([x * 20, x], dim=-1)
    assert torch.allclose(cpu_ops.silu_mul(doubled), REFERENCE.silu_mul(doubled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("half", "head_dim"), [(32, 64), (20, 40), (16, 64), (3, 7)])
def test_rotations_give_the_reference_bits(cpu_ops, generator, half, head_dim):
    x = torch.randn(9, 12, head_dim, generator=generator)[:, 2:7]
    angles = torch.randn(9, half, generator=generator)
    expected = REFERENCE.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(cpu_ops.rotate(x, angles.cos(), angles.sin()), expected)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    rows=st.integers(1, 4),
    vocab=st.integers(1, 9000),
    spread=st.sampled_from([0.0, 0.3, 4.0, 300.0]),
)
def test_the_chosen_tokens_are_the_references(seed, rows, vocab, spread):
    ops = _ops()
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[:, :: max(vocab // 3, 1)] = -torch.inf if spread == 4.0 and vocab > 9 else 0.0
    state = SamplingState(rows, vocab, CPU)
    for slot, temperature in enumerate((0.0, 0.7, 1.0, 1.9)[:rows]):
        state.load(slot, SamplingParams(temperature=temperature), seed, (), (), ())
    places = SampleRows(torch.arange(rows), torch.arange(rows) + 2**20, torch.zeros(rows, 0, dtype=torch.int64))
    expected = REFERENCE.sample(logits, places, state).tokens_L
    assert torch.equal(ops.sample(logits, places, state).tokens_L, expected)


def test_perturbed_logits_are_the_references(cpu_ops, generator):
    logits = torch.randn(3, 777, generator=generator)
    ids = torch.randperm(50000, generator=generator)[:777]
    rows = RowSampling(torch.tensor([0.0, 0.8, 1.0]), torch.tensor([1, -5, 2**40]), torch.tensor([0, 7, 2**33 + 1]))
    expected = REFERENCE.perturb(logits, ids, rows)
    assert torch.allclose(cpu_ops.perturb(logits, ids, rows), expected, rtol=0, atol=5e-7)


def _ops():
    try:
        load_library()
    except KernelError:
        pytest.skip("CPU kernels not built")
    return CpuOps(2)


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (777, 8), (3000, 1)])
def test_the_best_entries_for_drafting_match_the_reference(cpu_ops, generator, vocab, k):
    logits = torch.randn(3, vocab, generator=generator) * 3
    ids = torch.randperm(50000, generator=generator)[:vocab]
    rows = RowSampling(torch.tensor([0.0, 0.8, 1.3]), torch.tensor([1, -5, 2**40]), torch.tensor([0, 7, 2**33 + 1]))
    scores, tokens = cpu_ops.top_k(logits, ids, rows, k)
    expected_scores, expected_tokens = REFERENCE.top_k(logits, ids, rows, k)
    assert torch.equal(tokens, expected_tokens)
    assert torch.allclose(scores, expected_scores, rtol=1e-5, atol=1e-4)
