"""Weights averaged over the steps of a run: smoother than the last step's own, at no cost when drafting."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """Follows a draft's weights; each step moves the average by `1 - decay` of the way, and by more at the start."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights, self._decay = weights, decay
        self._averages = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step (from 0)."""
        # What the average began with would otherwise be felt for 1 / (1 - decay) steps.
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self._averages.items():
            average.lerp_(self._weights[name], 1 - decay)

    @torch.no_grad()
    def take(self) -> None:
        """Give the draft the averages, for good."""
        for name, weight in self._weights.items():
            weight.copy_(self._averages[name])

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Give the draft the averages for a while, then its own weights back."""
        own = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.take()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(own[name])

    @property
    def named(self) -> dict[str, Tensor]:
        """The averages, themselves and not copies, under names that no weight has."""
        return {f"average.{name}": average for name, average in self._averages.items()}
