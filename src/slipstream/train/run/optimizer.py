"""The optimizer of a draft: AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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


OPTIMIZERS = ("adamw", "muon")


class Optimizer:
    """One learning rate for all parameters; the head's may be a multiple of it.

    Muon's steps are scaled to AdamW's usual size, so that one rate serves both.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], kind: str, head_lr_scale: float = 1.0) -> None:
        head = [p for name, p in named.items() if name.startswith("lm_head.")]
        body = [p for name, p in named.items() if not name.startswith("lm_head.")]
        matrices = [p for p in body if p.dim() == 2] if kind == "muon" else []
        others = [p for p in body if kind != "muon" or p.dim() != 2]
        groups = [{"params": others, "scale": 1.0}, {"params": head, "scale": head_lr_scale}]
        fused = all(p.is_cuda for p in named.values())
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if adamw_groups := [group for group in groups if group["params"]]:
            self._parts["adamw"] = torch.optim.AdamW(adamw_groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        if matrices:
            muon_groups = [{"params": matrices, "scale": 1.0}]
            self._parts["muon"] = torch.optim.Muon(muon_groups, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Update every parameter at this rate."""
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = lr * group["scale"]
            part.step()

    def forget(self) -> None:
        """Drop the averages gathered so far."""
        for part in self._parts.values():
            part.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
