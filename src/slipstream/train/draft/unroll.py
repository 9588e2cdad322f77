"""The draft unrolled over whole texts at once, with exactly the attention that step-by-step drafting has.

Step j of slot t sees the step-0 keys of slots up to t in its own text and, from each step 1..j, slot t's own key.

Shape letters beyond the models': B rows, T slots of a row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels import KvLayer, Sight, sight_of
from slipstream.kernels.reference.attention import sink_attention
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.eagle3 import DraftHidden, Eagle3Draft
from slipstream.models.latent import LatentUp, attend_by_head


class PackedContext:
    """A pass of the target over rows of packed texts: causal inside each text."""

    def __init__(self, ops: TrainOps, positions_BT: Tensor, seen: Seen) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._seen = seen

    @property
    def text_BT(self) -> Tensor:
        """Which text of its row each slot belongs to."""
        return self._seen.text_BT

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend within the row; nothing is kept for later passes."""
        sight = sight_of(window)
        if sight.sinks_H is None and sight.chunk is None and (sight.window is None or sight.window >= q_BTHd.shape[1]):
            return self.ops.packed_attention(q_BTHd, k_BTGd, v_BTGd, self._seen, scale)
        visible_BTT = self._seen.within(sight.window, sight.chunk, self.positions_T)
        sinks_H = q_BTHd.new_full((q_BTHd.shape[2],), -torch.inf) if sight.sinks_H is None else sight.sinks_H
        return sink_attention(q_BTHd, KvLayer(k_BTGd, v_BTGd), visible_BTT, scale, sinks_H)

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


class UnrollContext:
    """The context of draft steps: `advance` moves every slot one token on, keeping earlier steps' keys."""

    def __init__(self, ops: TrainOps, positions_BT: Tensor, seen: Seen) -> None:
        self.ops = ops
        self.positions_T = positions_BT
        self._seen = seen
        self._windowed: dict[int, Seen] = {}
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def advance(self) -> None:
        """Go on to the next step."""
        self.positions_T = self.positions_T + 1

    def attend(
        self, layer_index: int, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Keep this step's keys and values, and attend as drafting would."""
        shown = sight_of(window).window
        keys, values = self._keys.setdefault(layer_index, []), self._values.setdefault(layer_index, [])
        keys.append(k_BTGd)
        values.append(v_BTGd)
        seen = self._seen if shown is None or shown >= q_BTHd.shape[1] else self._within(shown + 1 - len(keys))
        return self.ops.draft_attention(q_BTHd, keys, values, seen, scale)

    def _within(self, window: int) -> Seen:
        """Return what is seen of the first step's keys; each later step's own takes a place in the window."""
        if window not in self._windowed:
            self._windowed[window] = Seen(self._seen.text_BT, window)
        return self._windowed[window]

    def attend_latent(self, layer_index: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        """Keep the heads that latents stand for, and attend over those."""
        return attend_by_head(self, layer_index, q, latent, up)


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
