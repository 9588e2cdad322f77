"""Mixture of experts: what each token's chosen experts add up to, one token and one expert at a time."""

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels.reference.packed import PACKED_LINEARS
from slipstream.quant.packed import ExpertWeights, PackedWeight


def experts(
    x_TD: Tensor, gate_up: ExpertWeights, down: ExpertWeights, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Sum weight * down(silu(gate x) * up x) over each token's experts; -1 stands for one that lies elsewhere.

    A pass over one row has one order of accumulation, so going token by token makes a token's bits its own.
    """
    out_TD = torch.zeros((x_TD.shape[0], down.out_features), dtype=torch.float32, device=x_TD.device)
    for token, expert_ids_K in enumerate(expert_ids_TK.tolist()):
        for k, expert in enumerate(expert_ids_K):
            if expert >= 0:
                row_1D = _expert(x_TD[token : token + 1], gate_up.expert(expert), down.expert(expert))
                out_TD[token] += weights_TK[token, k] * row_1D[0]
    return out_TD.to(x_TD.dtype)


def _expert(x_1D: Tensor, gate_up: PackedWeight, down: PackedWeight) -> Tensor:
    gate, up = _product(x_1D.float(), gate_up).chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate) * up).to(x_1D.dtype)
    return _product(hidden.float(), down)


def _product(x_1D: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply in the format's own arithmetic, with a float32 result."""
    if weight.format == "dense":
        return x_1D @ weight.codes.float().t()
    product = PACKED_LINEARS.get(weight.format)
    if product is None:
        raise KernelError(
            f"The reference kernels know no experts of format {weight.format!r}; they know "
            f"{sorted(('dense', *PACKED_LINEARS))}."
        )
    return product(x_1D, weight)
