"""One door to the kernels: `select` picks a backend; nothing else in the package names one."""

from typing import Literal

import torch

from slipstream.errors import KernelError
from slipstream.kernels.ops import AttentionBatch, KvLayer, Ops, RowSampling
from slipstream.kernels.reference.ops import ReferenceOps

__all__ = ["AttentionBatch", "KernelChoice", "KvLayer", "Ops", "RowSampling", "select"]

KernelChoice = Literal["auto", "reference"]


def select(device: torch.device, choice: KernelChoice = "auto") -> Ops:
    """Return the backend for a device: the fastest that runs there, or the one asked for."""
    if choice not in ("auto", "reference"):
        raise KernelError(f"There is no kernel path {choice!r}; it is 'auto' or 'reference'.")
    return ReferenceOps(device)
