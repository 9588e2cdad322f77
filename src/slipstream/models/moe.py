"""Mixture of experts in place of a block's feed-forward part, its weights dense or as a checkpoint stores them."""

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import MoeSpec, RoutingSpec
from slipstream.kernels import Ops
from slipstream.models.layers import MLP
from slipstream.quant.packed import ExpertWeights


class Router(nn.Module):
    """Scores the experts; the correction bias takes part in the choice, not in the weights."""

    def __init__(self, width: int, num_experts: int, routing: RoutingSpec) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, both [T, K]."""
        return ops.route(x_TD, self.weight, self.e_score_correction_bias, self.routing)


class Experts(nn.Module):
    """All routed experts of a layer, stacked: gate and up [E, 2I, D], down [E, D, I]."""

    gate_up_weight: nn.Parameter | None
    down_weight: nn.Parameter | None

    def __init__(self, width: int, intermediate: int, num_experts: int) -> None:
        super().__init__()
        self.width, self.intermediate, self.num_experts = width, intermediate, num_experts
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate, width))
        self.down_weight = nn.Parameter(torch.empty(num_experts, width, intermediate))
        self.packed: tuple[ExpertWeights, ExpertWeights] | None = None

    def pack(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        """Give up the dense weights for packed ones of the same shape."""
        assert (
            gate_up.codes.shape[:2] == (self.num_experts, 2 * self.intermediate) and gate_up.in_features == self.width
        )
        assert down.codes.shape[:2] == (self.num_experts, self.width) and down.in_features == self.intermediate
        self.gate_up_weight = self.down_weight = None
        self.packed = (gate_up, down)

    @property
    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Gate and up joined, and down."""
        if self.packed is not None:
            return self.packed
        assert self.gate_up_weight is not None and self.down_weight is not None
        return (
            ExpertWeights("dense", 2 * self.intermediate, self.width, self.gate_up_weight),
            ExpertWeights("dense", self.width, self.intermediate, self.down_weight),
        )

    def forward(self, x_TD: Tensor, chosen: tuple[Tensor, Tensor], ops: Ops) -> Tensor:
        """Add up what each token's experts say."""
        return ops.experts(x_TD, *self.weights, *chosen)


class MixtureOfExperts(nn.Module):
    """A router, its experts, and perhaps one that every token goes through."""

    def __init__(self, spec: MoeSpec, width: int) -> None:
        super().__init__()
        self.gate = Router(width, spec.num_experts, spec.routing)
        self.experts = Experts(width, spec.intermediate_size, spec.num_experts)
        self.shared_experts = MLP(width, spec.shared_size) if spec.shared_size else None

    def forward(self, x_TD: Tensor, ops: Ops) -> Tensor:
        """Route each token, whatever leading dimensions there are."""
        rows_TD = x_TD.reshape(-1, x_TD.shape[-1])
        out_TD: Tensor = self.experts(rows_TD, self.gate(rows_TD, ops), ops)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(rows_TD, ops)
        return out_TD.view(x_TD.shape)
