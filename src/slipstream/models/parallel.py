"""A model split over ranks: who this process is, what part of each layer it holds, and how the parts come together.

`Ranks` is a value handed to the layers; one rank alone (`ALONE`) holds everything and never communicates. Heads and
feed-forward widths are split, each block's two products end in a sum over ranks, the vocabulary is split, and what
flows between layers is whole and the same on every rank.

Shape letters: L rows, V vocabulary of all ranks, W that of this one, K best entries, N ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.checkpoint.span import Span
from slipstream.kernels import Ops, RowSampling

_SMALL_ELEMENTS = 1 << 17
"""Up to here every rank adds up everything itself (one message); beyond, each adds a share and hands it round (two)."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` that hold one model together.

    Args:
        expert_groups: how many groups of ranks the experts of a layer are dealt to; within a group each expert is
            split by its width. 1 splits every expert over all ranks.
        group: the processes; None for a lone rank.
    """

    rank: int = 0
    size: int = 1
    expert_groups: int = 1
    group: dist.ProcessGroup | None = None

    def cut(self, total: int) -> Span:
        """Return this rank's share of something that splits evenly (checked when the model is chosen)."""
        return _share(total, self.rank, self.size)

    def cut_or_copy(self, total: int) -> Span:
        """Return this rank's share of key heads; where there are fewer than ranks, ranks share one."""
        return self.cut(total) if total >= self.size else _share(total, self.rank * total // self.size, total)

    def cut_experts(self, total: int) -> Span:
        """Return which experts this rank holds, whole or in part."""
        return _share(total, self.rank // (self.size // self.expert_groups), self.expert_groups)

    def cut_in_expert(self, width: int) -> Span:
        """Return which part of each of its experts' width this rank holds."""
        within = self.size // self.expert_groups
        return _share(width, self.rank % within, within)

    def sum(self, x: Tensor) -> Tensor:
        """Add up over ranks: in float32, in the order of ranks, rounded once.

        Every element is added in the same order whatever shares the tensor, so a row's bits do not depend on how many
        rows there are, and all ranks hold the same bits.
        """
        if self.size == 1:
            return x
        if x.numel() <= _SMALL_ELEMENTS:
            return _add(self._all(x)).to(x.dtype)
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % self.size))
        shares = torch.empty_like(flat)
        dist.all_to_all_single(shares, flat, group=self.group)
        mine = _add(list(shares.chunk(self.size))).to(x.dtype)
        return torch.cat(self._all(mine))[: x.numel()].view(x.shape)

    def join(self, x_LW: Tensor) -> Tensor:
        """Return the ranks' columns side by side, [L, V], on every rank."""
        return x_LW if self.size == 1 else torch.cat(self._all(x_LW), dim=-1)

    def top_k(self, logits_LW: Tensor, token_ids_V: Tensor, sampling: RowSampling, ops: Ops, k: int) -> "TopK":
        """Return what `Ops.top_k` returns for whole rows; `token_ids_V` names the tokens of all ranks' entries."""
        if self.size == 1:
            return TopK(*ops.top_k(logits_LW, token_ids_V, sampling, k))
        width = logits_LW.shape[-1]
        first = self.rank * width
        perturbed_LW = ops.perturb(logits_LW, token_ids_V[first : first + width], sampling)
        best = perturbed_LW.topk(min(k, width), dim=-1)
        values_LK = torch.cat(self._all(best.values), dim=-1)
        entries_LK = torch.cat(self._all(best.indices + first), dim=-1)
        total_L1 = torch.stack(self._all(perturbed_LW.logsumexp(-1))).logsumexp(0)[:, None]
        merged = values_LK.topk(k, dim=-1)
        return TopK(merged.values - total_L1, token_ids_V[entries_LK.gather(-1, merged.indices)])

    def _all(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts


ALONE = Ranks()


class TopK(NamedTuple):
    """The best of rows, best first: log-probabilities and tokens."""

    scores_LK: Tensor
    tokens_LK: Tensor


def _share(total: int, index: int, count: int) -> Span:
    size = total // count
    assert size * count == total, f"{total} does not split into {count}"
    return Span(total, index * size, (index + 1) * size)


def _add(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
