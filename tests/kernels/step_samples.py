"""Rows of a batch as a step's bookkeeping takes them, and comparisons of what it writes."""

import dataclasses

import torch

from interpreted import DEVICE
from slipstream.kernels import ChainRows

PAGE_SIZE = 4


def rows_of(num_rows: int, num_nodes: int, generator: torch.Generator) -> ChainRows:
    """A batch whose page tables are views of wider ones, as a step's are."""

    def whole(high: int) -> torch.Tensor:
        return torch.randint(0, high, (num_rows,), generator=generator).to(DEVICE)

    pages = torch.randint(0, 100, (num_rows, 12), generator=generator, dtype=torch.int32).to(DEVICE)
    temperature = torch.rand(num_rows, generator=generator).to(DEVICE)
    assert 30 + num_nodes <= 10 * PAGE_SIZE
    return ChainRows(whole(30), whole(9), whole(2), temperature, whole(2**62) * 3, whole(40), pages[:, :10])


def copied(values):
    return type(values)(**{f.name: getattr(values, f.name).clone() for f in dataclasses.fields(values)})


def assert_same(got, expected):
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name
