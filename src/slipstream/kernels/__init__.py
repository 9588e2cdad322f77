"""One door to the kernels: `select` picks a backend; nothing else in the package names one."""

from typing import Literal, get_args

import torch

from slipstream.errors import KernelError
from slipstream.kernels.ops import AttentionBatch, KvLayer, Ops, RowSampling
from slipstream.kernels.reference.ops import ReferenceOps

__all__ = ["KERNEL_CHOICES", "AttentionBatch", "KernelChoice", "KvLayer", "Ops", "RowSampling", "select"]

KernelChoice = Literal["auto", "reference"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)


def select(device: torch.device, choice: KernelChoice = "auto") -> Ops:
    """Return the backend for a device: the fastest that runs there, or the one asked for."""
    if choice not in KERNEL_CHOICES:
        raise KernelError(f"There is no kernel path {choice!r}; it is {' or '.join(KERNEL_CHOICES)}.")
    return ReferenceOps(device)
