"""A target split over several processes, as training sees it: every rank runs its part of a pass, the first one trains.

The ranks are those of the engine that wrote the data (`slipstream.engine.launch`): after it they wait for calls, and a
pass over packed rows is one more kind of call. The draft is whole, on the first rank alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.loading import Loaded
from slipstream.errors import ConfigError
from slipstream.executors.channel import Leader
from slipstream.executors.eager import EagerExecutor
from slipstream.models.layers import Embedding, Linear
from slipstream.models.moe import Experts
from slipstream.models.target import Hidden, Target
from slipstream.train.ops import train_ops
from slipstream.train.seen import Seen
from slipstream.train.unroll import PackedContext


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
