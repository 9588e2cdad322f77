"""Products by the vendor's library, where its sums are ours to the bit: tried on random numbers before it is used.

The library picks one of many kernels by the number of rows. Some add up a stretch of columns in one go, as the kernels
here do, others cut it once more; so every number of rows is tried, for every shape.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.triton.norm_rope import silu_mul

Product = Callable[[Tensor], Tensor]


class Library:
    """Knows for which shapes and numbers of rows the library may be used: on NVIDIA's GPUs, those where it agrees."""

    def __init__(self, device: torch.device) -> None:
        self._present = device.type == "cuda" and torch.version.hip is None
        self.known: dict[tuple[int, ...], bool] = {}

    def agrees(self, weight_NK: Tensor, splits: int, num_rows: int, theirs: Product, ours: Product) -> bool:
        """Tell whether two ways to multiply rows give the same bits; while a graph is made nothing new is tried."""
        key = (*weight_NK.shape, splits, num_rows)
        known = self.known.get(key)
        if known is None:
            if not self._present or weight_NK.shape[1] % splits or torch.cuda.is_current_stream_capturing():
                return False
            x_TK = torch.randn(num_rows, weight_NK.shape[1], device=weight_NK.device).to(weight_NK.dtype)
            known = self.known[key] = torch.equal(theirs(x_TK), ours(x_TK))
        return known


def stretches_by_library(x_TK: Tensor, weight_NK: Tensor, splits: int) -> Tensor:
    """Return float32 sums [S, T, N] of equal stretches of columns."""
    x_STk = x_TK.view(len(x_TK), splits, -1).transpose(0, 1)
    weight_SkN = weight_NK.view(len(weight_NK), splits, -1).permute(1, 2, 0)
    return torch.bmm(x_STk, weight_SkN, out_dtype=torch.float32)


def gated_by_library(x_TK: Tensor, weight_NK: Tensor, dependent: bool) -> Tensor:
    """Return silu(gate) * up of a product's two halves."""
    return silu_mul(torch.mm(x_TK, weight_NK.t()), dependent)
