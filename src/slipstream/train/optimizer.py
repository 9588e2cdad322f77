"""The optimizer of a draft: AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

OPTIMIZERS = ("adamw", "muon")


class Optimizer:
    """One learning rate for all parameters; the head's may be a multiple of it.

    Muon's steps are scaled to AdamW's usual size, so that one rate serves both.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], kind: str, head_lr_scale: float = 1.0, weight_decay: float = 0.0
    ) -> None:
        head = [p for name, p in named.items() if name.startswith("lm_head.")]
        body = [p for name, p in named.items() if not name.startswith("lm_head.")]
        matrices = [p for p in body if p.dim() == 2] if kind == "muon" else []
        others = [p for p in body if kind != "muon" or p.dim() != 2]
        groups = [{"params": others, "scale": 1.0}, {"params": head, "scale": head_lr_scale}]
        fused = all(p.is_cuda for p in named.values())
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if adamw_groups := [group for group in groups if group["params"]]:
            self._parts["adamw"] = torch.optim.AdamW(
                adamw_groups, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused
            )
        if matrices:
            muon_groups = [{"params": matrices, "scale": 1.0}]
            self._parts["muon"] = torch.optim.Muon(
                muon_groups, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )

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
