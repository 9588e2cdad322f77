"""What each slot of packed rows may see: the slots of its own text up to itself, or the last few of them."""

from functools import cached_property

import torch
from torch import Tensor


class Seen:
    """Rows of texts side by side; each form of what their slots see is worked out when first asked for, then kept.

    Args:
        text_BT: which text of its row a slot belongs to; the slots of a text lie side by side.
        window: how many slots are seen, the slot itself included; None shows all.
    """

    def __init__(self, text_BT: Tensor, window: int | None = None) -> None:
        assert window is None or window > 0, "a slot sees itself"
        self.text_BT, self._window = text_BT, window
        self._biases: dict[torch.dtype, Tensor] = {}

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return 0 where slot t may see slot s (same text, s <= t, in the window) and -inf elsewhere, [B, T, T]."""
        if dtype not in self._biases:
            rows, length = self.text_BT.shape
            slots_BT = torch.arange(length, device=self.text_BT.device).expand(rows, -1)
            self._biases[dtype] = self.bias_at(slots_BT, dtype)
        return self._biases[dtype]

    def bias_at(self, slots_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of `bias` of some slots of each row, [B, S, T], without making the others."""
        text_BT, slots_BS1 = self.text_BT, slots_BS[..., None]
        index_T = torch.arange(text_BT.shape[1], device=text_BT.device)
        seen_BST = (text_BT.gather(1, slots_BS)[..., None] == text_BT[:, None]) & (slots_BS1 >= index_T)
        if self._window is not None:
            seen_BST &= slots_BS1 < index_T + self._window
        bias_BST = torch.zeros(seen_BST.shape, dtype=dtype, device=text_BT.device)
        return bias_BST.masked_fill_(~seen_BST, -torch.inf)

    def within(self, window: int | None, chunk: int | None, position_BT: Tensor) -> Tensor:
        """Tell whether slot t sees slot s in a layer that shows a window, or chunks of its text, [B, T, T]."""
        text_BT, index_T = self.text_BT, torch.arange(self.text_BT.shape[1], device=self.text_BT.device)
        distance_TT = index_T[:, None] - index_T
        seen_BTT = (text_BT[:, :, None] == text_BT[:, None, :]) & (distance_TT >= 0)
        if window is not None:
            seen_BTT = seen_BTT & (distance_TT < window)
        if chunk is not None:
            chunk_BT = position_BT // chunk
            seen_BTT = seen_BTT & (chunk_BT[:, :, None] == chunk_BT[:, None, :])
        return seen_BTT

    @cached_property
    def lengths(self) -> list[list[int]]:
        """How many slots each text of each row has, in order, padding last; the host reads it."""
        return [torch.unique_consecutive(text_T, return_counts=True)[1].tolist() for text_T in self.text_BT]

    @cached_property
    def padding(self) -> list[list[bool]]:
        """Of `lengths`, which are no text's."""
        return [(torch.unique_consecutive(text_T) < 0).tolist() for text_T in self.text_BT]

    def alone(self, length: int) -> "Seen":
        """Return what the slots of one text see of it."""
        return Seen(torch.zeros(1, length, dtype=torch.int64, device=self.text_BT.device), self._window)

    @cached_property
    def first_BT(self) -> Tensor:
        """The first slot that each slot sees, its text's or its window's, in int32."""
        index_T = torch.arange(self.text_BT.shape[1], device=self.text_BT.device)
        begins_BT = torch.ones_like(self.text_BT, dtype=torch.bool)
        begins_BT[:, 1:] = self.text_BT[:, 1:] != self.text_BT[:, :-1]
        first_BT = torch.where(begins_BT, index_T, 0).cummax(1).values
        if self._window is not None:
            first_BT = torch.maximum(first_BT, index_T + 1 - self._window)
        return first_BT.int()

    @cached_property
    def end_BT(self) -> Tensor:
        """A slot behind all that see each slot, its text's end, in int32."""
        index_T = torch.arange(self.text_BT.shape[1], device=self.text_BT.device)
        ends_BT = torch.ones_like(self.text_BT, dtype=torch.bool)
        ends_BT[:, :-1] = self.text_BT[:, 1:] != self.text_BT[:, :-1]
        last_BT = torch.where(ends_BT, index_T, self.text_BT.shape[1]).flip(1).cummin(1).values.flip(1)
        return (last_BT + 1).int().contiguous()
