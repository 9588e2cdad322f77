"""Which checkpoint tensors a model is made of, and the check that a checkpoint has just those, in the right shapes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.checkpoint.source import TensorSource
from slipstream.errors import CheckpointError
from slipstream.models.layers import Embedding, Linear, RMSNorm
from slipstream.models.moe import Experts, Router

_MAX_LISTED = 12


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes: rows of a parameter of a module, from `start` on.

    Args:
        expert: which of a stack of experts it belongs to; None elsewhere.
        dtype: what the parameter must be kept in whatever the model's type; None if it follows that.
    """

    module: Linear | RMSNorm | Embedding | Router | Experts
    parameter: str
    start: int
    shape: tuple[int, ...]
    expert: int | None = None
    dtype: torch.dtype | None = None


def places(model: nn.Module) -> dict[str, Place]:
    """Return every tensor the model takes, by the name of its own module path with joined layers taken apart."""
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            above = path.rpartition(".")[0]
            start = 0
            for part, height in module.parts.items():
                name = f"{above}.{part}" if above else part
                found[f"{name}.weight"] = Place(module, "weight", start, (height, module.in_features))
                if module.bias is not None:
                    found[f"{name}.bias"] = Place(module, "bias", start, (height,))
                start += height
        elif isinstance(module, RMSNorm):
            found[f"{path}.weight"] = Place(module, "weight", 0, tuple(module.weight.shape))
        elif isinstance(module, Embedding):
            found[f"{path}.weight"] = Place(module, "weight", 0, module.shape)
        elif isinstance(module, Router):
            found[f"{path}.weight"] = Place(module, "weight", 0, tuple(module.weight.shape))
            bias = module.e_score_correction_bias
            found[f"{path}.e_score_correction_bias"] = Place(
                module, "e_score_correction_bias", 0, tuple(bias.shape), dtype=torch.float32
            )
        elif isinstance(module, Experts):
            found |= _expert_places(path, module)
    return found


def _expert_places(path: str, module: Experts) -> dict[str, Place]:
    """Return gate, up and down of each expert in turn."""
    inner, width = module.intermediate, module.width
    found = {}
    for expert in range(module.num_experts):
        for part, parameter, start, shape in (
            ("gate_proj", "gate_up_weight", 0, (inner, width)),
            ("up_proj", "gate_up_weight", inner, (inner, width)),
            ("down_proj", "down_weight", 0, (width, inner)),
        ):
            found[f"{path}.{expert}.{part}.weight"] = Place(module, parameter, start, shape, expert)
    return found


def check_tensors(source: TensorSource, names: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the checkpoint has each wanted tensor in its shape, and nothing else.

    Args:
        names: our names of the checkpoint's tensors, to its own.
        wanted: our names to shapes.
    """
    problems = [f"missing {name} {list(wanted[name])}" for name in sorted(wanted.keys() - names.keys())]
    problems += [
        f"unknown {names[name]} {list(source.info(names[name]).shape)}" for name in sorted(names.keys() - wanted.keys())
    ]
    for name in sorted(wanted.keys() & names.keys()):
        shape = source.info(names[name]).shape
        if shape != wanted[name]:
            problems.append(f"misshapen {names[name]} {list(shape)}, expected {list(wanted[name])}")
    if problems:
        more = f"\n  ... and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{source.folder}: its tensors are not those of the model its config.json describes. "
            f"Either file may be of another model; fetch both again.\n  " + "\n  ".join(problems[:_MAX_LISTED]) + more
        )
