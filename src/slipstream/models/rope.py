"""Rotary tables: cosines and sines by position, for every scaling that Llama-class checkpoints use."""

import math

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import RopeSpec

_BEYOND = 128  # positions past the last: steps in flight may compute so far before an end of the context is seen


class Rotary(nn.Module):
    """A table of cosines and sines, looked up by position, so that a position's bits never depend on its neighbours."""

    cos_Pr: Tensor
    sin_Pr: Tensor

    def __init__(self, spec: RopeSpec, max_position: int) -> None:
        super().__init__()
        self._spec = spec
        self._max_position = max_position + _BEYOND
        if torch.get_default_device().type == "meta":  # whoever loads the weights checks their sizes first, then fills
            shape = (self._max_position, spec.rotary_dim // 2)
            self.register_buffer("cos_Pr", torch.empty(shape), persistent=False)
            self.register_buffer("sin_Pr", torch.empty(shape), persistent=False)
        else:
            self.fill(torch.device("cpu"))

    def fill(self, device: torch.device) -> None:
        """Compute the table, always on the CPU so that it is the same everywhere, and put it on a device."""
        with torch.device("cpu"):
            angles_Pr = torch.arange(self._max_position).float()[:, None] * _frequencies(self._spec)[None, :]
            cos_Pr, sin_Pr = angles_Pr.cos(), angles_Pr.sin()
        self.register_buffer("cos_Pr", (cos_Pr * self._spec.attention_factor).to(device), persistent=False)
        self.register_buffer("sin_Pr", (sin_Pr * self._spec.attention_factor).to(device), persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each [T, rotary_dim / 2], in float32."""
        return self.cos_Pr[positions_T], self.sin_Pr[positions_T]


def _frequencies(spec: RopeSpec) -> Tensor:
    exponent_r = torch.arange(0, spec.rotary_dim, 2).float() / spec.rotary_dim
    frequency_r = 1.0 / spec.theta**exponent_r
    if spec.scaling == "linear":
        return frequency_r / spec.factor
    if spec.scaling == "llama3":
        return _llama3(spec, frequency_r)
    if spec.scaling == "yarn":
        return _yarn(spec, frequency_r)
    if spec.scaling == "proportional":
        turns_r = torch.arange(len(frequency_r)) < spec.turning
        return torch.where(turns_r, frequency_r / spec.factor, 0.0)
    if spec.scaling == "longrope":
        return 1.0 / (torch.tensor(spec.divisors) * spec.theta**exponent_r)
    return frequency_r


def _llama3(spec: RopeSpec, frequency_r: Tensor) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    wavelength_r = 2 * math.pi / frequency_r
    if spec.high_freq_factor == spec.low_freq_factor:  # as Llama 4 Scout has it: nothing lies between
        is_fast_r = spec.original_max_position / wavelength_r > spec.high_freq_factor
        return torch.where(is_fast_r, frequency_r, frequency_r / spec.factor)
    blend_r = (spec.original_max_position / wavelength_r - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blend_r = blend_r.clamp(0, 1)
    return (1 - blend_r) * frequency_r / spec.factor + blend_r * frequency_r


def _yarn(spec: RopeSpec, frequency_r: Tensor) -> Tensor:
    """Dimensions that turn often within the original context are kept, those that turn rarely are stretched."""

    def dimension_at(turns: float) -> float:
        return (
            spec.rotary_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
        )

    low, high = dimension_at(spec.beta_fast), dimension_at(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    ramp_r = ((torch.arange(spec.rotary_dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency_r / spec.factor * ramp_r + frequency_r * (1 - ramp_r)
