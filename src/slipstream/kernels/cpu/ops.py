"""The CPU backend: the kernels' contract, carried out by the compiled library; torch only holds the memory."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation, RoutingSpec
from slipstream.errors import KernelError
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.cpu.batch import describe_attention, describe_batch, describe_kv, kv_is_plain, run_apart
from slipstream.kernels.cpu.draft import DraftCache, describe_chain
from slipstream.kernels.cpu.library import (
    Isa,
    NativeEngine,
    NativeRotation,
    NativeSampling,
    NativeTopK,
    check,
)
from slipstream.kernels.cpu.rounds import RoundCache, RoundsCall
from slipstream.kernels.cpu.sampling import sample
from slipstream.kernels.cpu.stack import StackCache
from slipstream.kernels.cpu.text import NativeText
from slipstream.kernels.cpu.weights import (
    PANEL_FORMATS,
    SUFFIX,
    describe_dense,
    describe_panels,
    is_dense,
    rows_of_panels,
    to_panels,
)
from slipstream.kernels.ops import ChainStart, Cut, Layer, RowSampling, Sight, ended
from slipstream.kernels.reference.experts import choose_experts
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.rounds import RoundModels, RoundResult, RoundStart
from slipstream.kernels.sampling import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.threads import torch_threads
from slipstream.quant.packed import ExpertWeights, PackedWeight

_LOG = logging.getLogger(__name__)


class CpuOps:
    """Kernels for inference on a CPU: every output has one order of accumulation, whatever shares the pass."""

    name = "cpu"
    places_matter = False  # a sum runs over the keys that are seen
    capturable = False

    def __init__(self, threads: int, isa: Isa | None = None) -> None:
        self._engine = NativeEngine(threads, isa)
        self._library, self._handle = self._engine.library, self._engine.handle
        self._reference = ReferenceOps(torch.device("cpu"))
        self._stacks = StackCache()
        self._drafts = DraftCache()
        self._rounds = RoundCache(self._stacks, self._drafts)
        self._said: set[str] = set()

    @property
    def isa(self) -> Isa:
        """The instruction set in use."""
        return self._engine.isa

    @property
    def promise(self) -> str:
        """Say what holds of bits."""
        return (
            f"cpu kernels ({self._engine.isa}, {self._engine.threads} threads): a row's bits are the same whatever the "
            "number of rows, requests, threads and pages"
        )

    @property
    def row_invariant(self) -> bool:
        """Every output has one order of accumulation, so yes."""
        return True

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight in the layout these kernels read; formats they do not know stay as they are."""
        return to_panels(weight, self._engine) if weight.format in PANEL_FORMATS else weight

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in], in float32 whatever the weight's type."""
        _refuse_gradients(x_TD, weight_ND)
        if not is_dense(weight_ND):
            raise KernelError(
                f"The CPU kernels multiply by contiguous float32, bfloat16 or float16 weights; this one is "
                f"{weight_ND.dtype} with strides {weight_ND.stride()}. Call .contiguous() when loading it."
            )
        bias = None if bias_N is None else _float_rows(bias_N)
        return self._multiply(x_TD, describe_dense(weight_ND, bias), weight_ND.shape)

    def packed_linear(self, x_TD: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a weight as stored, in its format's own arithmetic."""
        if weight.format in PANEL_FORMATS:
            self._say_once(
                f"A {weight.format} weight was not prepared for the CPU kernels, so each product rearranges it first; "
                "call prepare() when loading the model."
            )
            weight = self.prepare(weight)
        if not weight.format.endswith(SUFFIX):
            self._say_once(
                f"The CPU kernels do not know format {weight.format!r}; torch multiplies it: slower, and a row's bits "
                "may change with the number of rows."
            )
            with torch_threads(self._engine.threads):
                return self._reference.packed_linear(x_TD, weight, bias_N)
        bias = None if bias_N is None else _float_rows(bias_N)
        return self._multiply(x_TD, describe_panels(weight, bias), (weight.out_features, weight.in_features))

    def packed_rows(self, weight: PackedWeight, row_ids_T: Tensor) -> Tensor:
        """Return rows of a packed table as float32 numbers."""
        if not weight.format.endswith(SUFFIX):
            return self._reference.packed_rows(weight, row_ids_T)
        return rows_of_panels(weight, row_ids_T, self._engine)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square in float32, then by `weight_D`."""
        _refuse_gradients(x_TD, weight_D)
        rows = _float_rows(x_TD)
        out = torch.empty(rows.shape)
        weight = _float_rows(weight_D)
        count, width = rows.shape
        stride = rows.stride(0)
        check(
            self._library.slip_rms_norm(
                self._handle, rows.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), count, width, eps
            )
        )
        return out.view(x_TD.shape).to(x_TD.dtype)

    def silu_mul(self, gate_up_TN: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row."""
        _refuse_gradients(gate_up_TN)
        rows = _float_rows(gate_up_TN)
        count, width = rows.shape[0], rows.shape[1] // 2
        out = torch.empty((count, width))
        check(self._library.slip_silu_mul(self._handle, rows.data_ptr(), rows.stride(0), out.data_ptr(), count, width))
        return out.view(*gate_up_TN.shape[:-1], width).to(gate_up_TN.dtype)

    def gate_mul(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        """Return what an activation makes of gate and up, by torch."""
        return self._reference.gate_mul(gate_up_TN, activation)

    def rotate(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
        """Rotate pairs (i, i + r) of each head's first 2r values; the rest passes."""
        _refuse_gradients(x_THd)
        heads, head_dim = x_THd.shape[-2:]
        x = x_THd.float().flatten(0, -3)
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            x = x.contiguous()
        cos, sin = _float_rows(cos_Tr).contiguous(), _float_rows(sin_Tr).contiguous()
        out = torch.empty(x.shape)
        half = cos_Tr.shape[-1]
        rotation = NativeRotation(cos.data_ptr(), sin.data_ptr(), x.stride(0), x.shape[0], heads, head_dim, half)
        check(self._library.slip_rotate(self._handle, rotation, x.data_ptr(), out.data_ptr()))
        return out.view(x_THd.shape).to(x_THd.dtype)

    def write_kv(self, layer: KvLayer, keys_TGd: Tensor, values_TGd: Tensor, slots_T: Tensor) -> None:
        """Write keys and values into their slots, in place."""
        if not kv_is_plain(layer) or layer.keys_SGd.dtype != torch.float32:
            self._reference.write_kv(layer, keys_TGd, values_TGd, slots_T)
            return
        slots_T = slots_T.to(torch.int64).contiguous()
        for cache_SGd, rows_TGd in ((layer.keys_SGd, keys_TGd), (layer.values_SGd, values_TGd)):
            rows = _float_rows(rows_TGd.flatten(-2))
            check(
                self._library.slip_write_slots(
                    cache_SGd.data_ptr(),
                    cache_SGd.stride(0),
                    cache_SGd.shape[0],
                    rows.data_ptr(),
                    rows.stride(0),
                    slots_T.data_ptr(),
                    rows.shape[0],
                    rows.shape[1],
                )
            )

    def move_kv(self, layer: KvLayer, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy slots to slots; indexing reads everything before anything is written."""
        self._reference.move_kv(layer, from_slots, to_slots)

    def attention(
        self, q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend over the pages of each request."""
        if not kv_is_plain(layer):
            self._say_once(
                f"The CPU kernels attend over contiguous float32, bfloat16, float16 or FP8 keys and values, not "
                f"{layer.keys_SGd.dtype}; torch attends: slower, and bits may change with the batch."
            )
            q = q_THd if layer.scales is not None else q_THd.to(layer.keys_SGd.dtype)
            with torch_threads(self._engine.threads):
                return self._reference.attention(q, layer, batch, scale, window).to(q_THd.dtype)
        q = q_THd.float().contiguous()
        out = torch.empty(q.shape)
        described = describe_batch(batch, None, None)
        shape = describe_attention(q, layer, scale, window)
        check(
            self._library.slip_attention(
                self._handle, described.native, describe_kv([layer]), shape, q.data_ptr(), out.data_ptr()
            )
        )
        return out.to(q_THd.dtype)

    def latent_attention(
        self, q_THC: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, value_width: int
    ) -> Tensor:
        """Attend over latents, by torch, a token at a time."""
        return self._reference.latent_attention(q_THC, layer, batch, scale, value_width)

    def head_linear(self, x_THd: Tensor, weight_HNd: Tensor) -> Tensor:
        """Multiply each head's values by that head's own weight, a head at a time."""
        heads = [self.linear(x_THd[..., head, :], weight.contiguous()) for head, weight in enumerate(weight_HNd)]
        return torch.stack(heads, dim=-2)

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, routing: RoutingSpec
    ) -> tuple[Tensor, Tensor]:
        """Score the experts in float32 and choose."""
        return choose_experts(self.linear(x_TD.float(), weight_ED), bias_E, routing)

    def experts(
        self,
        x_TD: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation = SILU,
    ) -> Tensor:
        """Sum each token's experts, by torch, one token and one expert at a time."""
        return self._reference.experts(x_TD, gate_up, down, expert_ids_TK, weights_TK, activation)

    def run_layers(
        self,
        layers: Sequence[Layer],
        hidden_TD: Tensor,
        ctx: Any,
        captured_layers: Sequence[int],
        embedding_TD: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply all blocks in one call where they and the context allow it, else one by one."""
        stack = self._stacks.find(layers, getattr(ctx, "kv", None))
        if isinstance(stack, str):
            self._say_once(f"Blocks run one by one, which is slower: {stack}.")
            return self._reference.run_layers(layers, hidden_TD, ctx, captured_layers, embedding_TD)
        if getattr(ctx, "beside", None) is not None:
            return run_apart(self, layers, hidden_TD, ctx, captured_layers, embedding_TD)
        hidden = hidden_TD.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        embedding = None if embedding_TD is None else _float_rows(embedding_TD).contiguous()
        captured = [torch.empty_like(hidden) for _ in captured_layers]
        described = describe_batch(ctx.batch, ctx.slots_T, ctx.positions_T)
        native = stack.native(captured_layers, captured)
        check(
            self._library.slip_run_layers(
                self._handle,
                native,
                described.native,
                hidden.data_ptr(),
                None if embedding is None else embedding.data_ptr(),
            )
        )
        hidden = ended(hidden, ctx)
        if hidden_TD.dtype == torch.float32:
            return hidden, captured
        return hidden.to(hidden_TD.dtype), [state.to(hidden_TD.dtype) for state in captured]

    def draft_chain(self, draft: Any, kv: Any, start: ChainStart, depth: int, cut: Cut) -> tuple[Tensor, Tensor] | None:
        """Draft whole chains in one call, if the library can read the draft's blocks, head and embeddings."""
        described = self._drafts.find(draft)
        stack = self._stacks.find(list(draft.layers), kv)
        if described is None or isinstance(stack, str):
            return None
        scores_RK = torch.empty((len(start.lengths_R), depth))
        tokens_RK = torch.empty((len(start.lengths_R), depth), dtype=torch.int64)
        chain = describe_chain(start, depth, cut, (scores_RK, tokens_RK))
        vocab: int = draft.embed_tokens.shape[0]
        check(self._library.slip_draft_chain(self._handle, stack.native((), ()), described.native, chain, vocab))
        return scores_RK, tokens_RK

    def run_rounds(self, models: RoundModels, start: RoundStart, depth: int, cut: Cut) -> list[RoundResult] | None:
        """Run whole rounds in one call, if the library can read both models."""
        described = self._rounds.find(models)
        if described is None:
            return None
        call = RoundsCall(start, models.target_kv.page_size, depth, cut)
        check(self._library.slip_rounds(self._handle, described.native, call.native, described.vocab))
        return call.results()

    def copy_text(self, prior: Sequence[float]) -> NativeText:
        """Return an empty text that rounds can read and extend."""
        return NativeText(self._engine, prior)

    def sample(
        self, logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None = None
    ) -> Sampled:
        """Return each row's token, and log probabilities where its slot wants them."""
        return sample(self._engine, logits_LV, rows, state, masks)

    def count(self, state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor) -> None:
        """Add emitted tokens to what the slots have said."""
        self._reference.count(state, slot_R, tokens_RN, counts_R)

    def perturb(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling) -> Tensor:
        """Add the noise of (seed, position, token id) to logits / T; rows at T = 0 stay as they are."""
        logits, ids = logits_LV.float().contiguous(), token_ids_V.contiguous()
        rows = (
            sampling.temperature_L.float().contiguous(),
            sampling.seed_L.contiguous(),
            sampling.position_L.contiguous(),
        )
        out_LV = torch.empty(logits.shape)
        check(
            self._library.slip_perturb(
                self._handle, logits.data_ptr(), ids.data_ptr(), *logits.shape, _sampling(rows), out_LV.data_ptr()
            )
        )
        return out_LV

    def top_k(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, k: int) -> tuple[Tensor, Tensor]:
        """Find the best of perturbed logits, the noise within 1e-5 of the rule's."""
        logits, ids = logits_LV.float().contiguous(), token_ids_V.contiguous()
        rows = (
            sampling.temperature_L.float().contiguous(),
            sampling.seed_L.contiguous(),
            sampling.position_L.contiguous(),
        )
        num_rows, vocab = logits.shape
        _check_top_k(k, vocab)
        scores_LK = torch.empty((num_rows, k))
        entries_LK = torch.empty((num_rows, k), dtype=torch.int64)
        check(
            self._library.slip_top_k(
                self._handle,
                NativeTopK(num_rows, vocab, k),
                logits.data_ptr(),
                ids.data_ptr(),
                _sampling(rows),
                scores_LK.data_ptr(),
                entries_LK.data_ptr(),
            )
        )
        return scores_LK, token_ids_V[entries_LK]

    def _multiply(self, x_TD: Tensor, weight: Any, shape_ND: Sequence[int]) -> Tensor:
        """`weight` is a ctypes structure, which mypy cannot pass through byref."""
        if x_TD.shape[-1] != shape_ND[1]:
            raise KernelError(f"A weight of {shape_ND[1]} columns cannot multiply rows of {x_TD.shape[-1]}.")
        rows = _float_rows(x_TD)
        y = torch.empty((rows.shape[0], shape_ND[0]))
        check(
            self._library.slip_linear(
                self._handle, weight, rows.data_ptr(), rows.stride(0), rows.shape[0], y.data_ptr()
            )
        )
        y = y.view(*x_TD.shape[:-1], shape_ND[0])
        return y if x_TD.dtype == torch.float32 else y.to(x_TD.dtype)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            _LOG.warning(sentence)


def _float_rows(x: Tensor) -> Tensor:
    """Return float32 rows [*, width] whose last dimension is contiguous."""
    rows = x if x.dtype == torch.float32 else x.float()
    if rows.dim() != 2:
        rows = rows.reshape(-1, rows.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else rows.contiguous()


def _sampling(rows: tuple[Tensor, Tensor, Tensor]) -> NativeSampling:
    assert rows[1].dtype == rows[2].dtype == torch.int64
    return NativeSampling(*(row.data_ptr() for row in rows))


def _check_top_k(k: int, vocab: int) -> None:
    if not 0 <= k <= vocab:
        raise KernelError(f"The best {k} of {vocab} entries were asked for.")


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise KernelError(
            "The CPU kernels give no gradients: run under torch.no_grad(), or train with the reference kernels."
        )
