"""Memory for weights in pages of 2 MiB, where the system has them: a step reads every weight, and looks up every page.

With pages of 4 KiB a step over one row of a 100 MB model looks up 25,000 of them, more than a CPU remembers.
"""

import mmap

import torch
from torch import Tensor

_CHUNK = 32 << 20
_ALIGNED = 4096


class Arena:
    """Hands out byte tensors from large chunks; a chunk lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return so many bytes, zero at first."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _chunk(max(num_bytes, _CHUNK)), 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return taken


def _chunk(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; elsewhere the system decides by itself
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
