"""The target as training sees it: the precision it runs in, and one split over several processes.

The ranks of a split target are those of the engine that wrote the data (`slipstream.ranks.launch`): after it they wait
for calls, and a pass over packed rows is one more kind of call. The draft is whole, on the first rank alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checkpoint.source import TensorSource
from slipstream.engine.loading import Loaded
from slipstream.errors import ConfigError
from slipstream.executors.eager import EagerExecutor
from slipstream.kernels.training.loss import product_f32
from slipstream.kernels.training.ops import train_ops
from slipstream.kernels.training.seen import Seen
from slipstream.models.layers import Embedding, Linear
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.models.target import Hidden, Target
from slipstream.ranks.channel import Leader
from slipstream.train.draft.packing import PackedContext

TARGET_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DRAFT_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_REMEDY = "set train.target_dtype to bfloat16 or float32"


def draft_dtype(device: torch.device, name: str | None = None) -> torch.dtype:
    """Return the precision of the draft's activations; never float16, in which small gradients vanish."""
    if name is not None:
        return DRAFT_DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def target_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the precision a target runs in: the one named, else the draft's."""
    return draft_dtype(device) if name is None else TARGET_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return what recipes and records call a precision."""
    return str(dtype).removeprefix("torch.")


def load_and_digest(
    source: TensorSource, dtype: torch.dtype, device: torch.device, max_position: int
) -> tuple[Target, str]:
    """Return the target, and a digest of its weights that is the same for every precision it may run in."""
    if dtype != torch.float16:
        model = load_target(source, dtype, device, max_position)
        return model, weights_digest(model)
    # A number rounded to float16 and then to bfloat16 is not always the number rounded to bfloat16.
    digest = weights_digest(load_target(source, torch.bfloat16, torch.device("cpu"), max_position))
    return load_target(source, dtype, device, max_position), digest


@torch.no_grad()
def last_states(model: "Target | SplitTarget", ids: Sequence[int]) -> Tensor:
    """Return the normed last states of one text."""
    device = model.embed_tokens.device
    ids_BT, positions_BT = torch.tensor([list(ids)], device=device), torch.arange(len(ids), device=device)[None]
    ops = train_ops(device)
    hidden = model(ids_BT, PackedContext(ops, positions_BT, Seen(torch.zeros_like(ids_BT))))
    normed_TD: Tensor = model.norm(hidden.last_TD[0], ops)
    return normed_TD


@torch.no_grad()
def check_range(model: Target, prompt: list[int]) -> None:
    """Refuse a target in float16 whose weights, or states on a prompt, are beyond its largest number."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"{name} of the target has weights beyond float16's largest number, 65504; {_REMEDY}.")
    assert model.lm_head.weight is not None
    if not bool(torch.isfinite(product_f32(last_states(model, prompt), model.lm_head.weight)).all()):
        raise ConfigError(f"On a first prompt the target's states exceed float16's largest number, 65504; {_REMEDY}.")


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of the target as it runs; the values in bfloat16 say enough to tell two targets apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Pass:
    """A pass over packed rows, on every rank."""

    ids_BT: Tensor
    positions_BT: Tensor
    text_BT: Tensor
    captured: tuple[int, ...]

    def run(self, executor: EagerExecutor) -> Hidden:
        return self.over(executor.runner.model)

    def over(self, part: Target) -> Hidden:
        device = part.embed_tokens.device
        ids, positions, text = (x.to(device) for x in (self.ids_BT, self.positions_BT, self.text_BT))
        hidden: Hidden = part(ids, PackedContext(train_ops(device), positions, Seen(text)), self.captured)
        return hidden


@dataclass(frozen=True)
class _Head:
    """The target's whole head, brought together once."""

    def run(self, executor: EagerExecutor) -> Tensor:
        return self.over(executor.runner.model)

    def over(self, part: Target) -> Tensor:
        assert part.lm_head.weight is not None, "training reads dense weights"
        return part.ranks.join(part.lm_head.weight.detach().t()).t().contiguous()


class SplitTarget(nn.Module):
    """The first rank's part of a target, and the way to the others; a pass gives what the whole target would."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        leader = loaded.seat.channel
        assert isinstance(leader, Leader), "the first rank holds this"
        self._leader, part = leader, loaded.target
        if any(layer.packed is not None for layer in part.modules() if isinstance(layer, Linear | Embedding | Experts)):
            raise ConfigError(
                f"{loaded.name}: its weights are packed (FP8, INT4 or such), and --tp trains on dense targets only. "
                "Train without --tp, or on the checkpoint in bfloat16."
            )
        self._part = (part,)  # a tuple, so that its parameters are listed under their own names only
        self.spec, self.ranks, self.rotary = part.spec, part.ranks, part.rotary
        self.embed_tokens, self.layers, self.norm = part.embed_tokens, part.layers, part.norm
        self.lm_head = Linear(part.spec.hidden_size, {"lm_head": part.spec.vocab_size})
        self.lm_head.weight = nn.Parameter(self._everywhere(_Head()), requires_grad=False)

    def forward(self, ids_BT: Tensor, ctx: PackedContext, captured_layers: Sequence[int] = ()) -> Hidden:
        """Run every rank's part over packed rows."""
        call = _Pass(ids_BT, ctx.positions_T, ctx.text_BT, tuple(captured_layers))
        hidden: Hidden = self._everywhere(call)
        return hidden

    @torch.no_grad()
    def _everywhere(self, call: _Pass | _Head) -> Any:  # the call's own result
        self._leader.send(call)
        try:
            return call.over(self._part[0])
        except Exception as error:
            raise self._leader.failure(error) from error
