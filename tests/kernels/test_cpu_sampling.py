"""The sampler's C++ against the reference: tokens, and log probabilities to the bit."""

import dataclasses

import pytest
import torch
from sampling_samples import Case, Settings, assert_same, logits_of, masks_of, mixed, rows_of, state_of

from slipstream.errors import KernelError
from slipstream.kernels import SampleRows
from slipstream.kernels.reference.ops import ReferenceOps

CPU = torch.device("cpu")
REFERENCE = ReferenceOps(CPU)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "odd"])
@pytest.mark.parametrize("vocab", [301, 9001])
def test_every_row_is_the_references(cpu_ops, kind, vocab, generator):
    cases = mixed(vocab)
    logits = logits_of(kind, len(cases), vocab, generator)
    state, rows, masks = state_of(cases, vocab, CPU), rows_of(cases, CPU), masks_of(cases, vocab, CPU)
    untouched = logits.clone()
    got = cpu_ops.sample(logits, rows, state, masks)
    assert torch.equal(logits.view(torch.int32), untouched.view(torch.int32))
    assert_same(got, REFERENCE.sample(logits, rows, state, masks), cases)


@pytest.mark.parametrize("vocab", [301, 9001])
def test_rows_whose_logits_over_temperature_are_all_infinite_are_the_references(cpu_ops, vocab):
    warm = Settings(temperature=0.1)
    cases = [
        Case(dataclasses.replace(warm, **cut, logprobs=2)) for cut in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})
    ]
    logits = torch.full((len(cases), vocab), -1e38)
    logits[:, 5], logits[:, 0] = -9e37, -torch.inf
    state, rows = state_of(cases, vocab, CPU), rows_of(cases, CPU)
    assert_same(cpu_ops.sample(logits, rows, state), REFERENCE.sample(logits, rows, state), cases)


def test_half_precision_rows_without_grammars_are_the_references(fast_ops, generator):
    cases = [case for case in mixed(700) if case.allowed is None]
    logits = logits_of("ties", len(cases), 700, generator).bfloat16()
    state, rows = state_of(cases, 700, CPU), rows_of(cases, CPU)
    assert_same(fast_ops.sample(logits, rows, state), REFERENCE.sample(logits, rows, state), cases)


def test_a_slot_or_mask_that_is_not_there_is_refused(fast_ops):
    state, masks = state_of([Case(Settings())], 50, CPU), masks_of([Case(Settings(), allowed=(3,))], 50, CPU)
    place = torch.tensor([7]), torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(KernelError, match="outside"):
        fast_ops.sample(torch.zeros(1, 50), SampleRows(torch.tensor([99]), *place), state)
    masks.row_L[0] = 1
    with pytest.raises(KernelError, match="outside"):
        fast_ops.sample(torch.zeros(1, 50), SampleRows(torch.tensor([0]), *place), state, masks)
