"""One door to the kernels: `select` picks a backend; nothing else in the package names one."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from slipstream.errors import KernelError
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer, TreePaths
from slipstream.kernels.bookkeeping import StepOps
from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.ops import (
    PLAIN_BLOCK,
    Borrowed,
    ChainOps,
    ChainStart,
    CompiledOps,
    Cut,
    Ending,
    Ops,
    RowSampling,
    Sight,
    row_work,
    sight_of,
)
from slipstream.kernels.reference.bookkeeping import TorchBookkeeping
from slipstream.kernels.reference.kv_fp8 import FP8 as KV_FP8
from slipstream.kernels.reference.kv_fp8 import keys_and_values
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.rounds import (
    Copying,
    Follower,
    Hurry,
    MaskFiller,
    Onward,
    RoundModels,
    RoundOps,
    RoundResult,
    RoundStart,
)
from slipstream.kernels.sampling import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.texts import CopiedRun, CopyText, Learned, TextOps
from slipstream.kernels.threads import torch_threads
from slipstream.kernels.trees import (
    Candidates,
    Children,
    Growth,
    GrowthPlan,
    GrowthRows,
    LevelNodes,
    TreeNodes,
    TreeOutcome,
)

__all__ = [
    "KERNEL_CHOICES",
    "KV_FP8",
    "PLAIN_BLOCK",
    "AttentionBatch",
    "Borrowed",
    "Candidates",
    "ChainOps",
    "ChainOutcome",
    "ChainPlaces",
    "ChainRows",
    "ChainStart",
    "Children",
    "CompiledOps",
    "CopiedRun",
    "CopyText",
    "Copying",
    "Cut",
    "Ending",
    "Follower",
    "Growth",
    "GrowthPlan",
    "GrowthRows",
    "Hurry",
    "KernelChoice",
    "KvLayer",
    "Learned",
    "LevelNodes",
    "MaskFiller",
    "Onward",
    "Ops",
    "RoundModels",
    "RoundOps",
    "RoundResult",
    "RoundStart",
    "RowSampling",
    "SampleRows",
    "Sampled",
    "SamplingState",
    "Sight",
    "StepOps",
    "TextOps",
    "TokenMasks",
    "TreeNodes",
    "TreeOutcome",
    "TreePaths",
    "beside",
    "keys_and_values",
    "one_pool",
    "row_work",
    "select",
    "sight_of",
    "step_ops",
]

KernelChoice = Literal["auto", "cpu", "triton", "reference"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)
_LOG = logging.getLogger(__name__)


def select(device: torch.device, choice: KernelChoice = "auto", tiles: Mapping[str, int] | None = None) -> Ops:
    """Return the backend for a device: the fastest that runs there, or the one asked for.

    Args:
        tiles: tile shapes of the experts' products in place of the shipped ones, which only the Triton kernels have.
    """
    if choice not in KERNEL_CHOICES:
        raise KernelError(f"There is no kernel path {choice!r}; it is {' or '.join(KERNEL_CHOICES)}.")
    if choice == "cpu" and device.type != "cpu":
        raise KernelError(f"The 'cpu' kernels cannot run on device {device}; choose 'auto' or 'reference'.")
    if tiles and (choice in ("cpu", "reference") or (choice == "auto" and device.type == "cpu")):
        raise KernelError("Tile shapes are those of the Triton kernels, which run on a GPU; leave them out.")
    if choice == "reference":
        return ReferenceOps(device)
    if choice == "triton" or device.type != "cpu":
        return _triton(device, choice, tiles or {})
    try:
        return CpuOps(torch.get_num_threads())
    except KernelError as error:
        if choice == "cpu":
            raise
        _LOG.warning(
            "Using torch in place of the CPU kernels: %s A pass over 4 rows then costs 2 to 4 times a pass over one, "
            "so a draft gains little, and bits change with the number of rows. With a C++ compiler, install the "
            "package again to build them.",
            error,
        )
        return ReferenceOps(device)


def _triton(device: torch.device, choice: KernelChoice, tiles: Mapping[str, int]) -> Ops:
    try:
        from slipstream.kernels.triton.moe.tiles import MoeOptions
        from slipstream.kernels.triton.ops import TritonOps  # triton is absent from CPU builds of torch
    except ImportError as error:
        if choice == "triton":
            raise KernelError(
                f"The Triton kernels need the package triton, which is not installed: {error}."
            ) from error
        _LOG.warning(
            "Using torch in place of the Triton kernels, because the package triton is not installed (%s): a step is "
            "several times slower, and bits change with the number of rows.",
            error,
        )
        return ReferenceOps(device)
    return TritonOps(device, moe=MoeOptions(tiles))


def step_ops(ops: Ops) -> StepOps:
    """Return what does a step's bookkeeping beside a backend: the backend itself, or torch."""
    return ops if isinstance(ops, StepOps) else TorchBookkeeping(ops)


def beside(ops: Ops) -> Ops:
    """Return a backend that prepares weights while another runs: in the same layouts, on the caller's thread alone."""
    return CpuOps(1, ops.isa) if isinstance(ops, CpuOps) else ops


def one_pool(ops: Ops) -> AbstractContextManager[None]:
    """Keep torch's threads out of the way while a backend with threads of its own runs.

    A torch worker spins for milliseconds after even a tiny operation, on a core that the backend's worker needs.
    """
    return torch_threads(1) if isinstance(ops, CpuOps) else nullcontext()
