"""Which checkpoint tensors a model is made of, and the check that a checkpoint has just those, in the right shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.span import Span, Window
from slipstream.errors import CheckpointError
from slipstream.models.layers import Attention, Embedding, Linear, RMSNorm, Scale
from slipstream.models.moe import Experts, Router

_MAX_LISTED = 12


@dataclass(frozen=True)
class Place:
    """Where a checkpoint tensor goes: a window of it to the rows of a module's parameter, from `start` on.

    The window is all of the tensor, or what this rank holds of it; an empty one marks a tensor of other ranks.

    Args:
        expert: which of this rank's stack of experts it belongs to; None elsewhere.
        dtype: what the parameter must be kept in whatever the model's type; None if it follows that.
        offset: what is added to the stored values, after `factor` has multiplied them.
    """

    module: Linear | RMSNorm | Embedding | Router | Experts | Attention | Scale
    parameter: str
    start: int
    window: Window
    expert: int | None = None
    dtype: torch.dtype | None = None
    offset: float = 0.0
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the checkpoint."""
        return tuple(span.total for span in self.window)

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether only other ranks hold the tensor."""
        return any(span.size == 0 for span in self.window)


def places(model: nn.Module) -> dict[str, Place]:
    """Return every tensor the model takes, by the name of its own module path with joined layers taken apart."""
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            above = path.rpartition(".")[0]
            start = 0
            for part, rows in module.rows.items():
                name = f"{above}.{part}" if above else part
                found[f"{name}.weight"] = Place(module, "weight", start, (rows, module.columns))
                if module.bias is not None:
                    found[f"{name}.bias"] = Place(module, "bias", start, (rows,))
                start += rows.size
        elif isinstance(module, RMSNorm):
            offset, factor = module.offset, module.factor
            kept = torch.float32 if (offset, factor) != (0, 1) else None
            found[f"{path}.weight"] = Place(module, "weight", 0, (module.columns,), None, kept, offset, factor)
        elif isinstance(module, Scale):
            found[f"{path}.weight"] = Place(module, "weight", 0, _whole(module.weight.shape))
        elif isinstance(module, Embedding):
            found[f"{path}.weight"] = Place(module, "weight", 0, _whole(module.shape))
        elif isinstance(module, Router):
            found[f"{path}.weight"] = Place(module, "weight", 0, _whole(module.weight.shape))
            if (bias := module.bias_E) is not None:
                whole = _whole(bias.shape)
                found[f"{path}.{module.bias_name}"] = Place(module, module.bias_name, 0, whole, dtype=torch.float32)
            if (scale := module.expert_scale) is not None:
                whole = _whole(scale.shape)
                found[f"{path}.expert_scale"] = Place(module, "expert_scale", 0, whole, dtype=torch.float32)
        elif isinstance(module, Experts):
            found |= _expert_places(path, module)
        elif isinstance(module, Attention) and module.sinks is not None:
            found[f"{path}.sinks"] = Place(module, "sinks", 0, (module.heads,), dtype=torch.float32)
    return found


def _expert_places(path: str, module: Experts) -> dict[str, Place]:
    """Return gate, up and down of each expert in turn, those of other ranks included."""
    held, width = module.held, Span.whole(module.width)
    found = {}
    for expert in range(held.total):
        here = held.start <= expert < held.stop
        inner = module.inner if here else Span(module.inner.total, 0, 0)
        for part, parameter, start, window in (
            ("gate_proj", "gate_up_weight", 0, (inner, width)),
            ("up_proj", "gate_up_weight", inner.size, (inner, width)),
            ("down_proj", "down_weight", 0, (width, inner)),
        ):
            local = expert - held.start if here else None
            found[f"{path}.{expert}.{part}.weight"] = Place(module, parameter, start, window, local)
            if module.gate_up_bias is not None:
                bias = window[:1] if here or part != "down_proj" else (Span(width.total, 0, 0),)
                beside = parameter.replace("weight", "bias")
                found[f"{path}.{expert}.{part}.bias"] = Place(module, beside, start, bias, local)
    return found


def _whole(shape: Sequence[int]) -> Window:
    return tuple(Span.whole(size) for size in shape)


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
