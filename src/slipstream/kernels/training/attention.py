"""Attention over packed rows in torch's own operations: the target's, and that of the draft's unrolled steps.

On a CPU both go text by text (`packed_attention_by_text`, `draft_attention_by_text`): of a row of many short texts most
pairs of slots are of two texts, and a long row's are more than all products of the model. Elsewhere a row is one
product, for launches cost more there.

Shape letters beyond the models': B rows, T slots of a row, S slots of a row that have queries (all T, or some), R query
heads per key head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.training.seen import Seen


def packed_attention(q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, bias_BTT: Tensor, scale: float) -> Tensor:
    """Attend to the slots of the row whose bias is not -inf."""
    repeats = q_BTHd.shape[2] // k_BTGd.shape[2]
    k_BTHd, v_BTHd = k_BTGd.repeat_interleave(repeats, 2), v_BTGd.repeat_interleave(repeats, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2),
        k_BTHd.transpose(1, 2),
        v_BTHd.transpose(1, 2),
        attn_mask=bias_BTT[:, None].expand(-1, q_BTHd.shape[2], -1, -1),
        scale=scale,
    )
    return out.transpose(1, 2)


def draft_attention(
    q_BSHd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], bias_BST: Tensor, scale: float
) -> Tensor:
    """Attend to the first step's keys [B, T, G, d] that the bias lets through, and to later steps' own [B, S, G, d]."""
    apply: Any = DraftAttention.apply  # torch leaves it untyped
    out: Tensor = apply(q_BSHd.transpose(1, 2) * scale, bias_BST, *(x.transpose(1, 2) for x in (*keys, *values)))
    return out.transpose(1, 2)


def packed_attention_by_text(q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, seen: Seen, scale: float) -> Tensor:
    """Attend to the slots of one's own text up to oneself; padding gathers nothing."""
    rows = []
    for row, lengths in enumerate(seen.lengths):
        heads = (torch.split(x_BTHd[row].transpose(0, 1)[None], lengths, 2) for x_BTHd in (q_BTHd, k_BTGd, v_BTGd))
        parts = [
            torch.zeros_like(q_1HTd)
            if padding
            else torch.nn.functional.scaled_dot_product_attention(
                q_1HTd, k_1GTd, v_1GTd, is_causal=True, scale=scale, enable_gqa=True
            )
            for q_1HTd, k_1GTd, v_1GTd, padding in zip(*heads, seen.padding[row], strict=True)
        ]
        rows.append(torch.cat(parts, 2)[0].transpose(0, 1))
    return torch.stack(rows)


def draft_attention_by_text(
    q_BSHd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Seen, slots_BS: Tensor, scale: float
) -> Tensor:
    """Attend as `draft_attention` does with what `slots_BS`, ascending in each row, see."""
    rows = []
    for row, lengths in enumerate(seen.lengths):
        ends = torch.tensor(lengths).cumsum(0)
        before = torch.searchsorted(slots_BS[row].contiguous(), ends)
        counts = before.diff(prepend=torch.zeros_like(before[:1])).tolist()
        firsts = (torch.split(x_BTGd[row][None], lengths, 1) for x_BTGd in (keys[0], values[0]))
        others = [torch.split(x_BSHd[row][None], counts, 1) for x_BSHd in (q_BSHd, *keys[1:], *values[1:])]
        slots = torch.split(slots_BS[row][None], counts, 1)
        parts = []
        for number, (key_1TGd, value_1TGd) in enumerate(zip(*firsts, strict=True)):
            q_1SHd, *own = (x[number] for x in others)
            if q_1SHd.shape[1] == 0:
                continue
            bias_1ST = seen.alone(lengths[number]).bias_at(slots[number] - ends[number] + lengths[number], q_BSHd.dtype)
            own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
            parts.append(draft_attention(q_1SHd, [key_1TGd, *own_keys], [value_1TGd, *own_values], bias_1ST, scale))
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


class DraftAttention(torch.autograd.Function):
    """Softmax over the step-0 block and the later steps' own keys together.

    The gradient is written out because the block's weights are all it needs to keep: one [B, H, S, T] tensor a step.
    """

    @staticmethod
    def forward(ctx: Any, q_BHSd: Tensor, bias_BST: Tensor, *keys_values: Tensor) -> Tensor:  # torch's own ctx
        """Return what each query gathers, having kept what the gradient needs."""
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        B, H, S, d = q_BHSd.shape
        G, T = keys[0].shape[1:3]
        q = q_BHSd.reshape(B, G, H // G, S, d)
        scores = (q.reshape(B, G, -1, d) @ keys[0].transpose(-1, -2)).view(B, G, H // G, S, T)
        scores += bias_BST[:, None, None]
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
        out = (block.view(B, G, -1, T) @ values[0]).view(B, G, H // G, S, d)
        for weight, value in zip(own, values[1:], strict=True):
            out = out + weight.to(out.dtype)[..., None] * value[:, :, None]
        ctx.save_for_backward(q, block, out, *own, *keys, *values)
        ctx.num_own = len(own)
        return out.view(B, H, S, d)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # torch's own types
        """Return the gradients of queries, keys and values."""
        q, block, out, *rest = ctx.saved_tensors
        n = ctx.num_own
        own, keys, values = rest[:n], rest[n : 2 * n + 1], rest[2 * n + 1 :]
        B, G, R, S, d = q.shape
        T = keys[0].shape[2]
        grad = grads[0].reshape(B, G, R, S, d)
        flat_grad = grad.reshape(B, G, R * S, d)
        drop = (grad * out).sum(-1, dtype=_wide(q))
        grad_block = (flat_grad @ values[0].transpose(-1, -2)).view(B, G, R, S, T)
        grad_block.sub_(drop.to(block.dtype)[..., None]).mul_(block)
        flat_block, flat_weights = grad_block.view(B, G, R * S, T), block.view(B, G, R * S, T)
        grad_q = (flat_block @ keys[0]).view(B, G, R, S, d)
        grad_keys = [flat_block.transpose(-1, -2) @ q.reshape(B, G, R * S, d)]
        grad_values = [flat_weights.transpose(-1, -2) @ flat_grad]
        for weight, key, value in zip(own, keys[1:], values[1:], strict=True):
            grad_score = weight * ((grad * value[:, :, None]).sum(-1, dtype=_wide(q)) - drop)
            grad_q = grad_q + grad_score.to(q.dtype)[..., None] * key[:, :, None]
            grad_keys.append((grad_score.to(q.dtype)[..., None] * q).sum(2))
            grad_values.append((weight.to(q.dtype)[..., None] * grad).sum(2))
        return grad_q.view(B, G * R, S, d), None, *grad_keys, *grad_values


def _wide(x: Tensor) -> torch.dtype:
    """Return the precision for sums: float32, or float64 when already there."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
