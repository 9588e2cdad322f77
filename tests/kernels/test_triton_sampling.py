"""The sampler's Triton kernels against the reference: tokens, and log probabilities to the bit."""

import pytest

pytest.importorskip("triton")

import torch
from sampling_samples import PENALTIES, Case, Settings, assert_same, logits_of, masks_of, mixed, rows_of, state_of
from triton_samples import REFERENCE, triton_ops

from interpreted import DEVICE
from slipstream.kernels.triton import sampling
from slipstream.kernels.triton.sampling import Tiles

OPS = triton_ops()
SMALL = Tiles(block=64, taken=3, many=20, cells=32, row_block=256, together=4, kept=64)


@pytest.mark.parametrize(("kind", "dtype"), [("flat", torch.float32), ("ties", torch.bfloat16), ("odd", torch.float32)])
def test_every_row_is_the_references(kind, dtype, generator):
    vocab = 301
    cases = mixed(vocab)
    logits = logits_of(kind, len(cases), vocab, generator).to(dtype).to(DEVICE)
    state, rows, masks = state_of(cases, vocab, DEVICE), rows_of(cases, DEVICE), masks_of(cases, vocab, DEVICE)
    expected = REFERENCE.sample(logits, rows, state, masks)
    assert_same(sampling.sample(logits, rows, state, masks, False, SMALL), expected, cases)


def test_rows_as_they_ship_are_the_references(generator):
    vocab = 5000
    cases = [case for case in mixed(vocab)[::4] if case.allowed is None]
    logits = logits_of("peaked", len(cases), vocab, generator).to(DEVICE)
    state, rows = state_of(cases, vocab, DEVICE), rows_of(cases, DEVICE)
    assert_same(OPS.sample(logits, rows, state), REFERENCE.sample(logits, rows, state), cases)


def test_emitted_tokens_are_counted_as_the_reference_counts_them(generator):
    cases = [Case(PENALTIES), Case(Settings()), Case(PENALTIES)]
    state, expected = (state_of(cases, 50, DEVICE) for _ in range(2))
    slots, counts = torch.tensor([2, 1, 0], device=DEVICE), torch.tensor([[3, 0], [5, 0], [5, 0]], device=DEVICE)[:, 0]
    tokens = torch.randint(0, 4, (3, 5), generator=generator).to(DEVICE)
    tokens[2, 4] = -1
    OPS.count(state, slots, tokens, counts)
    REFERENCE.count(expected, slots, tokens, counts)
    assert torch.equal(state.said_SV, expected.said_SV)
