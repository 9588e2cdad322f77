"""Who uses the cores: torch's own threads, or those of a backend that brings a pool of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the block. Costs less than a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
