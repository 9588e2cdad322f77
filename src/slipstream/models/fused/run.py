"""Which blocks run by fused kernels, and which one operation at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from slipstream.kernels.ops import ended
from slipstream.models.context import ForwardContext
from slipstream.models.mla import LatentAttention

if TYPE_CHECKING:
    from slipstream.kernels.triton.ops import FusedKernels


@runtime_checkable
class FusedOps(Protocol):
    """A backend whose kernels whole blocks can be put together of."""

    @property
    def fused(self) -> "FusedKernels":
        """What blocks are put together of."""
        ...

    def say_once(self, sentence: str) -> None:
        """Log a warning, the first time."""
        ...


def run_layers(
    layers: Sequence[nn.Module],
    hidden_TD: Tensor,
    ctx: ForwardContext,
    captured_layers: Sequence[int],
    embedding_TD: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Apply blocks in order, as `Ops.run_layers` does: by fused kernels where backend, blocks and context allow it."""
    ops = ctx.ops
    if not isinstance(ops, FusedOps):
        return ops.run_layers(layers, hidden_TD, ctx, captured_layers, embedding_TD)
    from slipstream.models.fused.llama import LlamaBlocks  # triton is absent on CPU machines
    from slipstream.models.fused.mla import MlaBlocks

    if layers and isinstance(getattr(layers[0], "self_attn", None), LatentAttention):
        latent = MlaBlocks(ops.fused)
        reason = latent.unfit(layers, ctx)
        if not reason:
            last_TD, captured = latent.run(layers, hidden_TD, ctx, captured_layers)
            return ended(last_TD, ctx), captured
    else:
        blocks = LlamaBlocks(ops.fused)
        reason = blocks.unfit(layers, ctx)
        if not reason:
            return blocks.run(layers, hidden_TD, ctx, captured_layers, embedding_TD)
    ops.say_once(f"Blocks run one operation at a time, which is slower: {reason}.")
    return ops.run_layers(layers, hidden_TD, ctx, captured_layers, embedding_TD)
