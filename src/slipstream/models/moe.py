"""Mixture of experts in place of a block's feed-forward part or beside it, its weights dense or as stored."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream.checkpoint.spec import MoeSpec, RoutingSpec
from slipstream.kernels import Ops
from slipstream.models.layers import MLP, RMSNorm
from slipstream.models.parallel import ALONE, Ranks
from slipstream.quant.packed import ExpertWeights


class Router(nn.Module):
    """Scores the experts; a correction bias takes part in the choice, not in the weights, a plain one in both.

    Experts may have a scale each, by which their weights are multiplied.
    """

    def __init__(self, width: int, num_experts: int, routing: RoutingSpec) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        if routing.bias != "none":
            self.register_parameter(self.bias_name, nn.Parameter(torch.empty(num_experts, dtype=torch.float32)))
        scale_E = torch.empty(num_experts, dtype=torch.float32) if routing.scaled_experts else None
        self.expert_scale = None if scale_E is None else nn.Parameter(scale_E)

    @property
    def bias_name(self) -> str:
        """What checkpoints call the router's bias."""
        return "e_score_correction_bias" if self.routing.bias == "choice" else "bias"

    @property
    def bias_E(self) -> Tensor | None:
        """The bias, where there is one."""
        return None if self.routing.bias == "none" else self.get_parameter(self.bias_name)

    def forward(self, x_TD: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, both [T, K]."""
        ids_TK, weights_TK = ops.route(x_TD, self.weight, self.bias_E, self.routing)
        return ids_TK, weights_TK if self.expert_scale is None else weights_TK * self.expert_scale[ids_TK]


class Experts(nn.Module):
    """The routed experts of a layer, stacked: gate and up [E, 2I, D], down [E, D, I].

    A rank holds some of the experts, or part of each one's width, or both.
    """

    gate_up_weight: nn.Parameter | None
    down_weight: nn.Parameter | None

    def __init__(self, spec: MoeSpec, width: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.activation = spec.activation
        self.weighs_inputs = spec.routing.weighs_inputs
        self.held, self.inner = ranks.cut_experts(spec.num_experts), ranks.cut_in_expert(spec.intermediate_size)
        self.width, self.intermediate = width, self.inner.size
        self.gate_up_weight = nn.Parameter(torch.empty(self.held.size, 2 * self.intermediate, width))
        self.down_weight = nn.Parameter(torch.empty(self.held.size, width, self.intermediate))
        self.gate_up_bias = nn.Parameter(torch.empty(self.held.size, 2 * self.intermediate)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.empty(self.held.size, width)) if spec.bias else None
        self.packed: tuple[ExpertWeights, ExpertWeights] | None = None

    def pack(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        """Give up the dense weights for packed ones of the same shape."""
        assert gate_up.codes.shape[:2] == (self.held.size, 2 * self.intermediate) and gate_up.in_features == self.width
        assert down.codes.shape[:2] == (self.held.size, self.width) and down.in_features == self.intermediate
        self.gate_up_weight = self.down_weight = None
        self.packed = (gate_up, down)

    @property
    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Gate and up joined, and down, with their biases."""
        # Ranks that split an expert add up what its down product gives, so one of them adds the bias.
        down_bias = self.down_bias if self.inner.start == 0 else None
        if self.packed is not None:
            gate_up, down = self.packed
            if self.gate_up_bias is None:
                return gate_up, down
            return replace(gate_up, bias_EN=self.gate_up_bias), replace(down, bias_EN=down_bias)
        assert self.gate_up_weight is not None and self.down_weight is not None
        shapes = (2 * self.intermediate, self.width), (self.width, self.intermediate)
        return (
            ExpertWeights("dense", *shapes[0], self.gate_up_weight, bias_EN=self.gate_up_bias),
            ExpertWeights("dense", *shapes[1], self.down_weight, bias_EN=down_bias),
        )

    def forward(self, x_TD: Tensor, chosen: tuple[Tensor, Tensor], ops: Ops) -> Tensor:
        """Add up what each token's experts say, those of this rank."""
        expert_ids_TK, weights_TK = chosen
        if not self.held.is_whole:
            here_TK = (expert_ids_TK >= self.held.start) & (expert_ids_TK < self.held.stop)
            expert_ids_TK = torch.where(here_TK, expert_ids_TK - self.held.start, -1)
        if not self.weighs_inputs:
            return ops.experts(x_TD, *self.weights, expert_ids_TK, weights_TK, self.activation)
        sums = [
            ops.experts(x_TD * weight_T1.to(x_TD.dtype), *self.weights, ids_T1, torch.ones_like(weight_T1))
            for ids_T1, weight_T1 in zip(_columns(expert_ids_TK), _columns(weights_TK), strict=True)
        ]
        return sum(sums[1:], start=sums[0])


def _columns(x_TK: Tensor) -> list[Tensor]:
    return [x_TK[:, k : k + 1].contiguous() for k in range(x_TK.shape[1])]


class MixtureOfExperts(nn.Module):
    """A router, its experts, and perhaps one that every token goes through."""

    def __init__(self, spec: MoeSpec, width: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._ranks = ranks
        self.gate = Router(width, spec.num_experts, spec.routing)
        self.experts = Experts(spec, width, ranks)
        self.shared_experts = MLP(width, spec.shared_size, False, ranks, adds_up=False) if spec.shared_size else None

    def forward(self, x_TD: Tensor, ops: Ops, routed_by_TD: Tensor | None = None) -> Tensor:
        """Route each token, whatever leading dimensions there are; every rank routes alike, and one sum joins them.

        Args:
            routed_by_TD: what the router reads; None for what the experts are given.
        """
        rows_TD = x_TD.reshape(-1, x_TD.shape[-1])
        chosen = self.gate(rows_TD if routed_by_TD is None else routed_by_TD.reshape(rows_TD.shape), ops)
        out_TD: Tensor = self.experts(rows_TD, chosen, ops)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(rows_TD, ops)
        return self._ranks.sum(out_TD).view(x_TD.shape)


class ExpertsBeside(nn.Module):
    """Experts that a block has beside its dense part: both read the stream, both are normed, and they add up."""

    def __init__(self, spec: MoeSpec, norm: Callable[[], RMSNorm], ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.dense_out_norm, self.input_norm, self.out_norm = norm(), norm(), norm()
        width, eps = self.input_norm.columns.size, self.input_norm.eps
        self.gate_norm = RMSNorm(width, eps, factor=width**-0.5)
        self.mixture = MixtureOfExperts(spec, width, ranks)

    def forward(self, dense_TD: Tensor, hidden_TD: Tensor, ops: Ops) -> Tensor:
        """Return the sum of what the dense part and the experts make of the stream."""
        routed_by_TD = self.gate_norm(hidden_TD, ops)
        out_TD = self.out_norm(self.mixture(self.input_norm(hidden_TD, ops), ops, routed_by_TD), ops)
        both_TD: Tensor = self.dense_out_norm(dense_TD, ops) + out_TD
        return both_TD
