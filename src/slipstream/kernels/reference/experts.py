"""Mixture of experts: which experts a token goes to, and what they add up to, one token and one expert at a time.

Shape letters: T tokens, E experts, K experts of a token, G groups of experts, D width.
"""

import torch
from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation, RoutingSpec
from slipstream.errors import KernelError
from slipstream.kernels.reference.activations import gated
from slipstream.kernels.reference.packed import PACKED_LINEARS
from slipstream.quant.packed import ExpertWeights, PackedWeight


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, routing: RoutingSpec) -> tuple[Tensor, Tensor]:
    """Return ids [T, K] of each token's experts, best first, and their float32 weights; see `Ops.route`.

    Torch's vectors and the rest of a row differ in a sigmoid's last bit, and so would a token's by its place among
    others; in float64, rounded once, they agree.
    """
    if routing.bias == "logits":
        assert bias_E is not None
        logits_TE = logits_TE + bias_E.float()
    logits_TE = logits_TE.double()
    scores_TE = (logits_TE.sigmoid() if routing.scoring == "sigmoid" else logits_TE.softmax(-1)).float()
    choice_TE = scores_TE
    if routing.bias == "choice":
        assert bias_E is not None
        choice_TE = scores_TE + bias_E.float()
    if routing.num_groups > 1:
        choice_TGe = choice_TE.view(*choice_TE.shape[:-1], routing.num_groups, -1)
        group_scores_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
        kept_Tg = _best_first(group_scores_TG, routing.kept_groups)
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(-1, kept_Tg, False)
        choice_TE = choice_TGe.masked_fill(dropped_TG[..., None], -torch.inf).flatten(-2)
    ids_TK = _best_first(choice_TE, routing.top_k)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if routing.normalise:
        weights_TK = weights_TK / (weights_TK.double().sum(-1, keepdim=True) + 1e-20).float()
    return ids_TK, weights_TK * routing.scale


def experts(
    x_TD: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation = SILU,
) -> Tensor:
    """Sum weight * down(silu(gate x) * up x) over each token's experts; -1 stands for one that lies elsewhere.

    A pass over one row has one order of accumulation, so going token by token makes a token's bits its own.
    """
    out_TD = torch.zeros((x_TD.shape[0], down.out_features), dtype=torch.float32, device=x_TD.device)
    for token, expert_ids_K in enumerate(expert_ids_TK.tolist()):
        for k, expert in enumerate(expert_ids_K):
            if expert >= 0:
                row_1D = _expert(x_TD[token : token + 1], gate_up, down, expert, activation)
                out_TD[token] += weights_TK[token, k] * row_1D[0]
    return out_TD.to(x_TD.dtype)


def _best_first(scores_TE: Tensor, count: int) -> Tensor:
    """Return the indices of the best; a stable sort gives ties to the lower index, on every device."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _expert(x_1D: Tensor, gate_up: ExpertWeights, down: ExpertWeights, expert: int, activation: Activation) -> Tensor:
    inner = _biased(_product(x_1D.float(), gate_up.expert(expert)), gate_up, expert)
    if activation.kind == "silu":
        gate, up = inner.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
    else:
        hidden = gated(inner, activation)
    return _biased(_product(hidden.to(x_1D.dtype).float(), down.expert(expert)), down, expert)


def _biased(y_1N: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    return y_1N if weights.bias_EN is None else y_1N + weights.bias_EN[expert].float()


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
