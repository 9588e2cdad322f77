"""Weights share large chunks of memory and never each other's bytes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.cpu.arena import Arena


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 63, 4096, 5000, 1 << 20, 20 << 20, 40 << 20]), max_size=6))
def test_tensors_of_an_arena_do_not_overlap_and_outlive_it(sizes):
    arena = Arena()
    taken = [arena.take(size) for size in sizes]
    del arena
    assert [len(tensor) for tensor in taken] == sizes
    assert all(not tensor.any() for tensor in taken)
    for value, tensor in enumerate(taken, start=1):
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(taken, start=1))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in taken)
    assert all(tensor.dtype == torch.uint8 for tensor in taken)
