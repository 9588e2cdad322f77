"""The Triton backend: kernels for NVIDIA and AMD GPUs behind the contract, and for tests on CPU tensors interpreted."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation, RoutingSpec
from slipstream.errors import KernelError
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.ops import Layer, RowSampling, Sight
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.reference.trees import expand_level
from slipstream.kernels.sampling import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.trees import Children, Growth, LevelNodes, TreeNodes, TreeOutcome
from slipstream.kernels.triton import norm, sampling, speculative, trees
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.attention.prefill import windowed_attention
from slipstream.kernels.triton.copies import move_paths
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.launch import compiling_ahead
from slipstream.kernels.triton.mla.attention import latent_attention
from slipstream.kernels.triton.mla.heads import heads_linear
from slipstream.kernels.triton.moe import router
from slipstream.kernels.triton.moe.dispatch import ExpertOptions, experts
from slipstream.kernels.triton.moe.tiles import MoeOptions, expert_tiles
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.tuning import (
    Tuning,
    architecture_of,
    check_architecture,
    read_tuning,
    tuned_file,
    with_tuned,
)
from slipstream.quant.packed import ExpertWeights, PackedWeight

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusedKernels:
    """What whole decoder blocks are put together of.

    Args:
        attention: how it is launched behind the kernels of a block, which let it start early.
    """

    architecture: str
    products: Products
    attention: AttentionLaunch
    moe: MoeOptions


class TritonOps:
    """Kernels whose grids follow from shapes alone: nothing here asks the device anything, so graphs can hold it.

    One stream at a time: kernels share counters.
    """

    name = "triton"
    places_matter = True
    capturable = True

    def __init__(self, device: torch.device, tuning: Tuning | None = None, moe: MoeOptions | None = None) -> None:
        if device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise KernelError("The Triton kernels run on a GPU; on a CPU choose 'auto', 'cpu' or 'reference'.")
        self._device = device
        check_architecture(architecture_of(device))
        self._tuning = tuning or _tuning_for(device)
        self._products = Products(self._tuning, device)
        self._dependent = self._tuning.dependent_launch
        self._launch = AttentionLaunch(
            self._tuning.attention, self._products.counters, self._dependent, self._tuning.instruction
        )
        self._moe = moe or MoeOptions()
        early = replace(self._launch, early=True)
        self.fused = FusedKernels(self._tuning.architecture, self._products, early, self._moe)
        self._reference = ReferenceOps(device)
        self._said: set[str] = set()
        self._compiling = False

    @property
    def promise(self) -> str:
        """Say what these kernels are made for, and for which weights it does not hold."""
        tiles = "tiles as measured" if self._tuning.measured else "portable kernels, tiles by arithmetic"
        return (
            f"Triton kernels ({self._tuning.architecture}, {tiles}): made so that a row's bits depend on its own "
            "inputs only, not on the number of rows, the batch or the page size; weights in formats they do not know "
            "are multiplied by torch, which promises nothing"
        )

    @property
    def row_invariant(self) -> bool:
        """Tell of the kernels here: the weight's shape and the row's own keys fix how sums are cut and merged."""
        return True

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in]."""
        _refuse_gradients(x_TD, weight_ND)
        _check_width(x_TD, weight_ND.shape[1])
        weight = weight_ND if self._products.knows(weight_ND) else weight_ND.contiguous()
        x = x_TD.reshape(-1, x_TD.shape[-1])
        y = self._products.multiply(self._products.rows_for(weight, x), weight, Epilogue(bias_N))
        return y.view(*x_TD.shape[:-1], weight_ND.shape[0])

    def packed_linear(self, x_TD: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a weight as stored, in its format's own arithmetic."""
        _check_width(x_TD, weight.in_features)
        if not self._products.knows(weight):
            self.say_once(
                f"The Triton kernels do not multiply by weights of format {weight.format}; torch does: slower, and a "
                "row's bits may change with the number of rows."
            )
            return self._reference.packed_linear(x_TD, weight, bias_N)
        x = x_TD.reshape(-1, x_TD.shape[-1])
        y = self._products.multiply(self._products.rows_for(weight, x), weight, Epilogue(bias_N))
        return y.view(*x_TD.shape[:-1], weight.out_features)

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight in the layout the kernels read, where they know its format."""
        return self._products.prepare(weight)

    def packed_rows(self, weight: PackedWeight, row_ids_T: Tensor) -> Tensor:
        """Return rows of a packed table as float32 numbers."""
        return self._reference.packed_rows(weight, row_ids_T)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square in float32, then by `weight_D`."""
        _refuse_gradients(x_TD, weight_D)
        rows = x_TD.reshape(-1, x_TD.shape[-1])
        return norm.rms_norm(rows, Norm(weight_D, eps), self._dependent).view(x_TD.shape)

    def silu_mul(self, gate_up_TN: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row."""
        rows = gate_up_TN.reshape(-1, gate_up_TN.shape[-1])
        return norm.silu_mul(rows, self._dependent).view(*gate_up_TN.shape[:-1], -1)

    def gate_mul(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        """Return what an activation makes of gate and up, by torch."""
        return self._reference.gate_mul(gate_up_TN, activation)

    def rotate(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
        """Rotate pairs (i, i + r) of each head's first 2r values; the blocks that are fused do it on the way."""
        return self._reference.rotate(x_THd, cos_Tr, sin_Tr)

    def write_kv(self, layer: KvLayer, keys_TGd: Tensor, values_TGd: Tensor, slots_T: Tensor) -> None:
        """Write keys and values into their slots, in place."""
        self._reference.write_kv(layer, keys_TGd, values_TGd, slots_T)

    def move_kv(self, layer: KvLayer, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy slots to slots; indexing reads everything before anything is written."""
        self._reference.move_kv(layer, from_slots, to_slots)

    def attention(
        self, q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend over the pages of each request."""
        if isinstance(window, Sight):
            how = (self._dependent, self._launch.instruction)
            return windowed_attention(q_THd.contiguous(), layer, batch, scale, window, *how)
        return attention(q_THd.contiguous(), layer, batch, scale, window, self._launch)

    def latent_attention(
        self, q_THC: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, value_width: int
    ) -> Tensor:
        """Attend over latents, each read once for all heads and query tokens of a tile."""
        return latent_attention(q_THC, layer, batch, scale, value_width)

    def head_linear(self, x_THd: Tensor, weight_HNd: Tensor) -> Tensor:
        """Multiply each head's values by that head's own weight."""
        return heads_linear(_unit_stride(x_THd), weight_HNd, None, self._dependent)

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, routing: RoutingSpec
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts."""
        if not router.fits(routing):
            return self._reference.route(x_TD, weight_ED, bias_E, routing)
        return router.route(x_TD, weight_ED, bias_E, routing, self._dependent)

    def experts(
        self,
        x_TD: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation = SILU,
    ) -> Tensor:
        """Sum each token's experts."""
        options = ExpertOptions(activation=activation)
        if self._moe.settings:
            tiles = expert_tiles(self._tuning.architecture, gate_up.format, expert_ids_TK.numel())
            options = ExpertOptions(tiles.changed(self._moe.settings), activation=activation)
        return experts(x_TD, gate_up, down, expert_ids_TK, weights_TK, options)

    def run_layers(
        self,
        layers: Sequence[Layer],
        hidden_TD: Tensor,
        ctx: Any,
        captured_layers: Sequence[int],
        embedding_TD: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply blocks one operation at a time; `slipstream.models.fused` puts whole blocks together of kernels."""
        return self._reference.run_layers(layers, hidden_TD, ctx, captured_layers, embedding_TD)

    def sample(
        self, logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None = None
    ) -> Sampled:
        """Return each row's token, and log probabilities where its slot wants them."""
        sampled = sampling.sample(_unit_stride(logits_LV), rows, state, masks, self._dependent)
        return replace(sampled, tokens_L=sampled.tokens_L.zero_()) if self._compiling else sampled

    def count(self, state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor) -> None:
        """Add emitted tokens to what the slots have said."""
        sampling.count(state, slot_R, tokens_RN, counts_R, self._dependent)

    def perturb(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling) -> Tensor:
        """Add the noise of (seed, position, token id) to logits / T; rows at T = 0 stay as they are."""
        return speculative.perturb(_unit_stride(logits_LV), token_ids_V, sampling, self._dependent)

    def top_k(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, k: int) -> tuple[Tensor, Tensor]:
        """Find the best of perturbed logits."""
        if not 0 < k <= min(speculative.MAX_K, logits_LV.shape[1]):
            best = torch.log_softmax(self.perturb(logits_LV, token_ids_V, sampling), dim=-1).topk(k, dim=-1)
            return best.values, token_ids_V[best.indices]
        scores_LK, tokens_LK = speculative.top_k(_unit_stride(logits_LV), token_ids_V, sampling, k, self._dependent)
        return scores_LK, tokens_LK.zero_() if self._compiling else tokens_LK

    def place_chains(self, rows: ChainRows, places: ChainPlaces, page_size: int) -> None:
        """Write where a step's nodes lie."""
        speculative.place_chains(rows, places, page_size, self._dependent)

    def propose(self, logits_RV: Tensor, token_ids_V: Tensor, sampling: RowSampling, out_R: Tensor) -> Tensor:
        """Return the token drafted for each row, and write it to `out_R` too."""
        token_R = speculative.propose(_unit_stride(logits_RV), token_ids_V, sampling, out_R, self._dependent)
        return token_R.zero_() if self._compiling else token_R

    def accept_chains(
        self, rows: ChainRows, chain_RN: Tensor, chosen_RN: Tensor, thresholds_K: Tensor, outcome: ChainOutcome
    ) -> None:
        """Keep what agrees of each chain, write what came of it, and move the rows on."""
        tokens_RN = (chain_RN.contiguous(), chosen_RN.contiguous())
        speculative.accept_chains(rows, tokens_RN, thresholds_K, outcome, self._dependent)

    def expand_level(
        self, growth: Growth, above: LevelNodes | None, children: Children, feedback_LH: Tensor | None
    ) -> LevelNodes:
        """Note a level's candidates, and return those that the draft is run on next."""
        level = trees.expand_level(growth, above, children, feedback_LH, self._dependent)
        # Where kernels are only compiled, torch may write keys all the same, and needs true slots.
        return expand_level(growth, above, children, feedback_LH) if self._compiling else level

    def rerank_trees(self, growth: Growth, above: LevelNodes | None, children: Children, nodes: TreeNodes) -> None:
        """Keep what the plan says of all candidates, and write the nodes."""
        trees.rerank_trees(growth, above, children, nodes, self._dependent)

    def accept_trees(
        self, rows: ChainRows, nodes: TreeNodes, chosen_RN: Tensor, thresholds_K: Tensor, outcome: TreeOutcome
    ) -> None:
        """Keep of each tree the path that agrees, write what came of it, and move the rows on."""
        trees.accept_trees(rows, nodes, chosen_RN.contiguous(), thresholds_K, outcome, self._dependent)

    def move_paths(self, layers: Sequence[KvLayer], from_RD: Tensor, to_RD: Tensor) -> None:
        """Copy slots to slots in every layer; scales of FP8 take a pass of their own."""
        if layers[0].scales is None:
            move_paths(layers, from_RD, to_RD, self._dependent)
        for layer in layers if layers[0].scales is not None else ():
            self._reference.move_kv(layer, from_RD.flatten(), to_RD.flatten())

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Have kernels compiled side by side instead of launched; tokens are 0 meanwhile."""
        if self._device.type == "cpu":  # interpreted
            yield
            return
        self._compiling = True
        try:
            with compiling_ahead():
                yield
        finally:
            self._compiling = False

    def say_once(self, sentence: str) -> None:
        """Log a warning, the first time."""
        if sentence not in self._said:
            self._said.add(sentence)
            _LOG.warning(sentence)


def _tuning_for(device: torch.device) -> Tuning:
    """Return what ships for a device, and what `slipstream tune` has found for it."""
    shipped = read_tuning(architecture_of(device))
    return with_tuned(shipped, tuned_file(device)) if device.type == "cuda" else shipped


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_width(x_TD: Tensor, num_inputs: int) -> None:
    if x_TD.shape[-1] != num_inputs:
        raise KernelError(f"A weight of {num_inputs} columns cannot multiply rows of {x_TD.shape[-1]}.")


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise KernelError(
            "The Triton kernels give no gradients: run under torch.no_grad(), or train with the reference kernels."
        )
