"""What gated feed-forward parts make of gate and up, beyond SiLU."""

import torch
from torch import Tensor

from slipstream.checkpoint.spec import Activation


def gated(gate_up_TN: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up of each row [gate ; up], in the rows' type.

    Torch's vectors and the rest of a row differ in the last bit of a transcendental function, and so would a token's
    numbers by its place among others; in float64, rounded once, they agree.
    """
    gate, up = gate_up_TN.double().chunk(2, dim=-1)
    if activation.kind == "silu":
        out = torch.nn.functional.silu(gate) * up
    elif activation.kind == "gelu":
        out = torch.nn.functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        out = gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    return out.to(gate_up_TN.dtype)
