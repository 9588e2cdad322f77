"""The draft unrolled over whole texts at once, with exactly the attention that step-by-step drafting has.

Step j of slot t sees the step-0 keys of slots up to t in its own text and, from each step 1..j, slot t's own key.

Shape letters beyond the models': B rows, T slots of a row, R query heads per key head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels import Ops
from slipstream.models.eagle3 import DraftHidden, Eagle3Draft
from slipstream.models.latent import LatentUp, attend_by_head


class PackedContext:
    """A pass of the target over rows of packed texts: causal inside each text."""

    def __init__(self, ops: Ops, positions_BT: Tensor, bias_BTT: Tensor) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._bias_B1TT = bias_BTT[:, None]

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend within the row; nothing is kept for later passes."""
        assert window is None or window >= q_BTHd.shape[1], "rows longer than the target's window are refused earlier"
        repeats = q_BTHd.shape[2] // k_BTGd.shape[2]
        k_BTHd, v_BTHd = k_BTGd.repeat_interleave(repeats, 2), v_BTGd.repeat_interleave(repeats, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2),
            k_BTHd.transpose(1, 2),
            v_BTHd.transpose(1, 2),
            attn_mask=self._bias_B1TT.expand(-1, q_BTHd.shape[2], -1, -1),
            scale=scale,
        )
        return out.transpose(1, 2)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


class UnrollContext:
    """The context of draft steps: `advance` moves every slot one token on, keeping earlier steps' keys."""

    def __init__(self, ops: Ops, positions_BT: Tensor, bias_BTT: Tensor) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._bias_BTT = bias_BTT
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def advance(self) -> None:
        """Go on to the next step."""
        self.positions_T = self.positions_T + 1

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Keep this step's keys and values, and attend as drafting would."""
        assert window is None or window >= q_BTHd.shape[1], "rows longer than the draft's window are refused earlier"
        keys, values = self._keys.setdefault(layer_index, []), self._values.setdefault(layer_index, [])
        keys.append(k_BTGd.transpose(1, 2))
        values.append(v_BTGd.transpose(1, 2))
        apply: Any = _DraftAttention.apply  # torch leaves it untyped
        out: Tensor = apply(q_BTHd.transpose(1, 2) * scale, self._bias_BTT, *keys, *values)
        return out.transpose(1, 2)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


def text_bias(text_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where slot t may see slot s (same text, s <= t) and -inf elsewhere, [B, T, T]."""
    length = text_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=text_BT.device).tril()
    seen_BTT = (text_BT[:, :, None] == text_BT[:, None, :]) & causal_TT
    return torch.zeros(seen_BTT.shape, dtype=dtype, device=text_BT.device).masked_fill_(~seen_BTT, -torch.inf)


def unroll(
    draft: Eagle3Draft, features: tuple[Tensor, ...], ids_BT: Tensor, ctx: UnrollContext, steps: int
) -> Iterator[DraftHidden]:
    """Yield each step's hidden states; step j of slot t is given token t + 1 + j (past the row's end, token 0)."""
    hidden_BTD = draft.fuse(features, ctx.ops)
    for step in range(steps):
        if step > 0:
            ctx.advance()
        out: DraftHidden = draft(hidden_BTD, shift_left(ids_BT, 1 + step), ctx)
        yield out
        hidden_BTD = out.feedback_TD


def shift_left(ids_BT: Tensor, by: int) -> Tensor:
    """Move each row left, filling with token 0."""
    return torch.nn.functional.pad(ids_BT[:, by:], (0, min(by, ids_BT.shape[1])))


class _DraftAttention(torch.autograd.Function):
    """Softmax over the step-0 block and the later steps' own keys together.

    The gradient is written out because the block's weights are all it needs to keep: one [B, H, T, T] tensor a step.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTd: Tensor, bias_BTT: Tensor, *keys_values: Tensor) -> Tensor:  # torch's own ctx
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        B, H, T, d = q_BHTd.shape
        G = keys[0].shape[1]
        q = q_BHTd.reshape(B, G, H // G, T, d)
        scores = (q.reshape(B, G, -1, d) @ keys[0].transpose(-1, -2)).view(B, G, H // G, T, T)
        scores += bias_BTT[:, None, None]
        own = [(q * key[:, :, None]).sum(-1, dtype=_wide(q)) for key in keys[1:]]
        best = scores.amax(-1).to(_wide(q))
        for score in own:
            best = torch.maximum(best, score)
        block = scores.sub_(best.to(scores.dtype)[..., None]).exp_()
        best = best.to(scores.dtype).to(_wide(q))
        own = [(score - best).exp_() for score in own]
        total = block.sum(-1, dtype=_wide(q)) + sum(own)
        block.div_(total[..., None].to(block.dtype))
        own = [weight / total for weight in own]
        out = (block.view(B, G, -1, T) @ values[0]).view(B, G, H // G, T, d)
        for weight, value in zip(own, values[1:], strict=True):
            out = out + weight.to(out.dtype)[..., None] * value[:, :, None]
        ctx.save_for_backward(q, block, out, *own, *keys, *values)
        ctx.num_own = len(own)
        return out.view(B, H, T, d)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        q, block, out, *rest = ctx.saved_tensors
        n = ctx.num_own
        own, keys, values = rest[:n], rest[n : 2 * n + 1], rest[2 * n + 1 :]
        B, G, R, T, d = q.shape
        grad = grads[0].reshape(B, G, R, T, d)
        flat_grad = grad.reshape(B, G, R * T, d)
        drop = (grad * out).sum(-1, dtype=_wide(q))
        grad_block = (flat_grad @ values[0].transpose(-1, -2)).view(B, G, R, T, T)
        grad_block.sub_(drop.to(block.dtype)[..., None]).mul_(block)
        flat_block, flat_weights = grad_block.view(B, G, R * T, T), block.view(B, G, R * T, T)
        grad_q = (flat_block @ keys[0]).view(B, G, R, T, d)
        grad_keys = [flat_block.transpose(-1, -2) @ q.reshape(B, G, R * T, d)]
        grad_values = [flat_weights.transpose(-1, -2) @ flat_grad]
        for weight, key, value in zip(own, keys[1:], values[1:], strict=True):
            grad_score = weight * ((grad * value[:, :, None]).sum(-1, dtype=_wide(q)) - drop)
            grad_q = grad_q + grad_score.to(q.dtype)[..., None] * key[:, :, None]
            grad_keys.append((grad_score.to(q.dtype)[..., None] * q).sum(2))
            grad_values.append((weight.to(q.dtype)[..., None] * grad).sum(2))
        return grad_q.view(B, G * R, T, d), None, *grad_keys, *grad_values


def _wide(x: Tensor) -> torch.dtype:
    """Return the precision for sums: float32, or float64 when already there."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
