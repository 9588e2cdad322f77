"""The reference backend: torch's own operations behind the kernels' contract."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation, RoutingSpec
from slipstream.errors import KernelError
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.ops import Layer, RowSampling, Sight, ended
from slipstream.kernels.reference.activations import gated
from slipstream.kernels.reference.attention import as_kept, attention, latent_attention
from slipstream.kernels.reference.experts import choose_experts, experts
from slipstream.kernels.reference.kv_fp8 import write_kv_fp8
from slipstream.kernels.reference.noise import gumbel
from slipstream.kernels.reference.packed import PACKED_LINEARS, PACKED_ROWS
from slipstream.kernels.reference.sampling import count, sample
from slipstream.kernels.sampling import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.quant.packed import ExpertWeights, PackedWeight


class ReferenceOps:
    """Plain torch; differentiable where training needs it (linear, norm, silu_mul, rotate)."""

    name = "reference"
    places_matter = True
    capturable = False  # attention and the rule look at lengths and temperatures on the host

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def promise(self) -> str:
        """Say what torch's matrix products do to bits."""
        return (
            f"reference kernels (torch on {self._device.type}): a row's bits may change with the number of rows, "
            "so a near-tie can fall differently with speculation than without"
        )

    @property
    def row_invariant(self) -> bool:
        """Torch picks its product kernels by the number of rows, so no."""
        return False

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight as it is: torch has no layout of its own."""
        return weight

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in]."""
        return torch.nn.functional.linear(x_TD, weight_ND, bias_N)

    def packed_linear(self, x_TD: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a weight as stored, in its format's own arithmetic."""
        product = PACKED_LINEARS.get(weight.format)
        if product is None:
            raise KernelError(
                f"The reference kernels know no format {weight.format!r}; they know {sorted(PACKED_LINEARS)}."
            )
        y_TN = product(x_TD, weight)
        return y_TN if bias_N is None else y_TN + bias_N

    def packed_rows(self, weight: PackedWeight, row_ids_T: Tensor) -> Tensor:
        """Return rows of a packed table as float32 numbers."""
        rows = PACKED_ROWS.get(weight.format)
        if rows is None:
            raise KernelError(f"No rows can be read from format {weight.format!r}; only from {sorted(PACKED_ROWS)}.")
        return rows(weight, row_ids_T)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square in float32, then by `weight_D`."""
        x_f32 = x_TD.float()
        scale_T1 = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
        if weight_D.dtype != x_TD.dtype:  # a weight kept in float32 is multiplied there
            return (weight_D.float() * (x_f32 * scale_T1)).to(x_TD.dtype)
        return weight_D * (x_f32 * scale_T1).to(x_TD.dtype)

    def silu_mul(self, gate_up_TN: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row."""
        gate, up = gate_up_TN.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gate_mul(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        """Return what an activation makes of gate and up."""
        return gated(gate_up_TN, activation)

    def rotate(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
        """Rotate pairs (i, i + r) of each head's first 2r values; the rest passes."""
        half = cos_Tr.shape[-1]
        cos_T1r, sin_T1r = cos_Tr.unsqueeze(-2).to(x_THd.dtype), sin_Tr.unsqueeze(-2).to(x_THd.dtype)
        a, b, rest = x_THd[..., :half], x_THd[..., half : 2 * half], x_THd[..., 2 * half :]
        return torch.cat([a * cos_T1r - b * sin_T1r, b * cos_T1r + a * sin_T1r, rest], dim=-1)

    def write_kv(self, layer: KvLayer, keys_TGd: Tensor, values_TGd: Tensor, slots_T: Tensor) -> None:
        """Write keys and values into their slots, in place."""
        if layer.scales is not None:
            write_kv_fp8(layer, keys_TGd, values_TGd, slots_T)
            return
        layer.keys_SGd.index_copy_(0, slots_T, as_kept(keys_TGd, layer.keys_SGd.dtype))
        layer.values_SGd.index_copy_(0, slots_T, as_kept(values_TGd, layer.values_SGd.dtype))

    def move_kv(self, layer: KvLayer, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy slots to slots; all are read before any is written, as values may be a view of the keys."""
        parts = [part.view(torch.uint8) if layer.scales else part for part in (layer.keys_SGd, layer.values_SGd)]
        parts += layer.scales or ()
        moved = [part[from_slots] for part in parts]
        for part, rows in zip(parts, moved, strict=True):
            part[to_slots] = rows

    def attention(
        self, q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend over the pages of each request."""
        return attention(q_THd, layer, batch, scale, window)

    def latent_attention(
        self, q_THC: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, value_width: int
    ) -> Tensor:
        """Attend over the latents of each request's pages."""
        return latent_attention(q_THC, layer, batch, scale, value_width)

    def head_linear(self, x_THd: Tensor, weight_HNd: Tensor) -> Tensor:
        """Multiply each head's values by that head's own weight."""
        return torch.einsum("...hd,hnd->...hn", x_THd, weight_HNd)

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, routing: RoutingSpec
    ) -> tuple[Tensor, Tensor]:
        """Score the experts in float32 and choose."""
        return choose_experts(torch.nn.functional.linear(x_TD.float(), weight_ED.float()), bias_E, routing)

    def experts(
        self,
        x_TD: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation = SILU,
    ) -> Tensor:
        """Sum each token's experts, one token and one expert at a time."""
        return experts(x_TD, gate_up, down, expert_ids_TK, weights_TK, activation)

    def run_layers(
        self,
        layers: Sequence[Layer],
        hidden_TD: Tensor,
        ctx: Any,
        captured_layers: Sequence[int],
        embedding_TD: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply the blocks one by one, keeping the hidden states that are captured."""
        seen = {0: hidden_TD}
        for applied, layer in enumerate(layers, start=1):
            hidden_TD = layer(hidden_TD, ctx) if embedding_TD is None else layer(hidden_TD, ctx, embedding_TD)
            if applied in captured_layers:
                seen[applied] = hidden_TD
        return ended(hidden_TD, ctx), [seen[k] for k in captured_layers]

    def sample(
        self, logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None = None
    ) -> Sampled:
        """Return each row's token, and log probabilities where its slot wants them."""
        return sample(logits_LV, rows, state, masks)

    def count(self, state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor) -> None:
        """Add emitted tokens to what the slots have said."""
        count(state, slot_R, tokens_RN, counts_R)

    def perturb(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling) -> Tensor:
        """Add the noise of (seed, position, token id) to logits / T; rows at T = 0 stay as they are."""
        logits_LV = logits_LV.float()
        warm_L = sampling.temperature_L > 0
        if not bool(warm_L.any()):
            return logits_LV
        out_LV = logits_LV.clone()
        noise = gumbel(sampling.seed_L[warm_L, None], sampling.position_L[warm_L, None], token_ids_V[None, :])
        out_LV[warm_L] = logits_LV[warm_L] / sampling.temperature_L[warm_L, None] + noise
        return out_LV

    def top_k(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, k: int) -> tuple[Tensor, Tensor]:
        """Perturb, take the log-softmax, keep the best."""
        perturbed_LV = self.perturb(logits_LV, token_ids_V, sampling)
        best = torch.log_softmax(perturbed_LV, dim=-1).topk(k, dim=-1)
        return best.values, token_ids_V[best.indices]
