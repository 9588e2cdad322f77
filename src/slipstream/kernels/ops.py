"""The operations a backend offers, and the plain values they take: the contract between models and kernels.

Shape letters: T query tokens of a pass, R requests, P pages of a request, S slots of a cache, D width, H query
heads, G key/value heads, d head width, C width of a latent, E experts, K experts of a token, N outputs of a layer,
V vocabulary, L rows of logits.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from slipstream.checkpoint.spec import SILU, Activation, RoutingSpec
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.sampling import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.quant.packed import ExpertWeights, PackedWeight


@dataclass(frozen=True)
class Sight:
    """What a layer's attention sees beyond the plain rule: a window or a chunk, and sinks.

    Args:
        window: only the last keys, so many, its own included; None sees all. Of a tree, keys of the token's own path.
        chunk: only the keys from the last multiple of this position on, its own included; None sees all.
        sinks_H: float32, a score for each query head that takes part in its softmax and stands for no key.
    """

    window: int | None = None
    chunk: int | None = None
    sinks_H: Tensor | None = None


def sight_of(window: int | Sight | None) -> Sight:
    """Return what a layer sees; a number is a window and nothing else."""
    return window if isinstance(window, Sight) else Sight(window)


PLAIN_BLOCK = "attention by head and a gated feed-forward"
"""What the blocks of Llama and of an EAGLE-3 draft say that they are (`kind`)."""


class Layer(Protocol):
    """A decoder block as the kernels see it."""

    def __call__(self, hidden_TD: Tensor, ctx: Any, embedding_TD: Tensor | None = None) -> Tensor:
        """Apply the block; a draft's blocks also take the embeddings of their tokens.

        `ctx` is the models' ForwardContext, which lies a package higher and is passed through.
        """
        ...


class Ops(Protocol):
    """One backend. Every method is specified by the reference (`slipstream.kernels.reference`)."""

    name: str

    @property
    def promise(self) -> str:
        """Say in one line what this backend guarantees about bits: do they depend on rows, batch or pages?"""
        ...

    @property
    def row_invariant(self) -> bool:
        """Tell whether a row's bits are the same whatever other rows, requests and page size share the pass."""
        ...

    @property
    def places_matter(self) -> bool:
        """Tell whether a query's bits depend on where among a request's keys those it sees lie.

        Then the paths of a tree are given as requests of their own, each with its keys where plain decoding has them.
        """
        ...

    @property
    def capturable(self) -> bool:
        """Tell whether a pass can be captured in a CUDA graph: no operation asks the host for a value."""
        ...

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in]."""
        ...

    def packed_linear(self, x_TD: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a weight as stored, in its format's own arithmetic."""
        ...

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight in the layout this backend reads fastest, for `packed_linear` and `packed_rows`.

        Called once per weight when a model is loaded, after rows were joined; the result belongs to this backend.
        """
        ...

    def packed_rows(self, weight: PackedWeight, row_ids_T: Tensor) -> Tensor:
        """Return rows of a packed table as float32 numbers, for embeddings kept as stored."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square, then by `weight_D`."""
        ...

    def silu_mul(self, gate_up_TN: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row."""
        ...

    def gate_mul(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        """Return what an activation makes of the first half of each row, the gate, and the second, up."""
        ...

    def rotate(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
        """Apply rotary embedding (half-split form) to the first 2r of each head's d values."""
        ...

    def write_kv(self, layer: KvLayer, keys_TGd: Tensor, values_TGd: Tensor, slots_T: Tensor) -> None:
        """Write keys and values into their slots, in place."""
        ...

    def move_kv(self, layer: KvLayer, from_slots: Tensor, to_slots: Tensor) -> None:
        """Copy slots to slots, in place, as if all reads came before all writes.

        Values may be a view of the keys (`KvLayer`), so neither may be written before both are read.
        """
        ...

    def attention(
        self, q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | Sight | None
    ) -> Tensor:
        """Attend over the pages; a window of w sees only the w last keys, its own included (see `Sight`)."""
        ...

    def latent_attention(
        self, q_THC: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, value_width: int
    ) -> Tensor:
        """Attend over latents that all heads share (MLA, absorbed): out [T, H, value_width].

        Each head's weights are softmax(q . latent * scale) over the latents `batch` lets a token see; its output is
        their mean of latent[:value_width].
        """
        ...

    def head_linear(self, x_THd: Tensor, weight_HNd: Tensor) -> Tensor:
        """Multiply each head's values by that head's own weight, [out, in]: [T, H, N]. The weight may be a view."""
        ...

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, routing: RoutingSpec
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: ids, int64 [T, K], best first, and float32 weights [T, K].

        Scores are the sigmoid or the softmax of x . weight, in float32 from the first product on. Experts are chosen by
        score, ties to the lower id, and weighted by it; `routing` says where a bias goes (see `RoutingSpec`).
        """
        ...

    def experts(
        self,
        x_TD: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation = SILU,
    ) -> Tensor:
        """Return, for each token, the sum over its K experts of weight * down(silu(gate x) * up x): [T, D].

        Rows of `gate_up` are [gate; up]. An id of -1 stands for an expert that lies elsewhere and is skipped. Both
        products are in the format's own arithmetic (inputs quantized per token, and per token and expert) with
        float32 results, to which biases are added; silu(gate) * up, or another activation, is rounded to x's type
        before the second. The sum over K is in float32, in the order of k, and rounded once, so that a token's bits
        do not depend on the others.
        """
        ...

    def run_layers(
        self,
        layers: Sequence[Layer],
        hidden_TD: Tensor,
        ctx: Any,
        captured_layers: Sequence[int],
        embedding_TD: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply blocks in order; also return the hidden states seen after k blocks, for each k captured.

        `embedding_TD` is given for a draft, whose blocks take it beside the hidden state. Where the context has an
        `ending`, only those tokens' outputs are returned, and none can be captured.
        """
        ...

    def sample(
        self, logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None = None
    ) -> Sampled:
        """Return each row's token by its slot's settings, as `slipstream.kernels.sampling` defines it."""
        ...

    def count(self, state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor) -> None:
        """Add the first `counts` tokens of each row to what its slot has said, where penalties look back on it.

        All are int64; tokens below 0 are none.
        """
        ...

    def perturb(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: "RowSampling") -> Tensor:
        """Return logits / T + gumbel(seed, position, token id); at T = 0 the logits themselves."""
        ...

    def top_k(self, logits_LV: Tensor, token_ids_V: Tensor, sampling: "RowSampling", k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of each row of perturbed logits, best first: log-probabilities and tokens, both [L, k].

        The log-probabilities are of the softmax over the perturbed row. For drafting, which only proposes: a backend
        may round the noise of the rule.
        """
        ...


@runtime_checkable
class CompiledOps(Protocol):
    """A backend whose kernels are compiled when they are first needed, and may be before."""

    def compiling(self) -> AbstractContextManager[None]:
        """Have kernels compiled side by side instead of launched, for as long as this lasts; tokens are 0 meanwhile."""
        ...


@dataclass(frozen=True)
class Ending:
    """The tokens of a pass whose outputs are wanted; of the others the last block writes keys and values alone.

    Args:
        rows_L: int64, which tokens.
        batch: what they attend to.
    """

    rows_L: Tensor
    batch: AttentionBatch


def ended(hidden_TD: Tensor, ctx: Any) -> Tensor:
    """Return a whole pass's outputs, or those of the tokens its context ends with."""
    ending: Ending | None = getattr(ctx, "ending", None)
    return hidden_TD if ending is None else hidden_TD.index_select(0, ending.rows_L)


@dataclass
class Borrowed:
    """Tokens of a request's own text that its draft does not know, with rows of the draft's head for them.

    Both tensors have room for as many as there may be; they are written to, never replaced.

    Args:
        rows_BD: float32; what the head reads times a row is the token's logit.
        bonus: added to these logits.
        count: how many there are.
    """

    tokens_B: Tensor
    rows_BD: Tensor
    bonus: float
    count: int = 0

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Where the two tensors lie."""
        return self.tokens_B.data_ptr(), self.rows_BD.data_ptr()


@dataclass(frozen=True)
class ChainStart:
    """Where chains of drafted tokens start, one for each of R requests. All tensors are contiguous.

    Args:
        page_table_RP: int32, as in AttentionBatch.
        lengths_R: int64, keys the draft has committed; a chain's own go after them.
        hidden_RD: what the last committed slot feeds the first level; not changed.
        logits_RV: what that slot foretells: the first level's logits, over the draft's vocabulary.
        borrowed: each request's, drafted beside the draft's own tokens; empty if nobody has any.
    """

    page_table_RP: Tensor
    page_size: int
    lengths_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    hidden_RD: Tensor
    logits_RV: Tensor
    borrowed: Sequence[Borrowed | None] = ()


@dataclass(frozen=True)
class Cut:
    """Which nodes a tree has of those that were drafted or may be copied; by default all that were drafted.

    A node's chance of being kept is worked out from the draft's confidence and from what the text says. The likeliest
    node of any request comes next, as long as its chance is worth another row of the pass.

    Args:
        floor: a token of a lower cumulative log-probability is not checked, and its chain not drafted further.
        need: another level is drafted only if the chains' chances, each as far as it is above the floor's, add up to so
            much. A chain that the text goes on from counts less, the surer the text is.
        least: a token that is copied, not drafted, is checked if its chance is no less.
        row: a row's worth, in tokens, once there are many; see `price`.
        trust: a drafted token's chance is its probability to this power, where the text says nothing.
    """

    floor: float = -math.inf
    need: float = 0.0
    least: float = 0.02
    row: float = 0.0
    trust: float = 1.0

    def price(self, num_rows: int) -> float:
        """Return what another row costs beside so many, in tokens."""
        return self.row * (row_work(num_rows + 1) - row_work(num_rows)) if self.row else 0.0


def row_work(num_rows: float) -> float:
    """Return what a pass over so many rows costs beyond reading the weights, in rows.

    The first rows cost little: they are multiplied while the weights of the next are read.
    """
    return num_rows * num_rows / (num_rows + 8)


@runtime_checkable
class ChainOps(Protocol):
    """A backend that can also draft whole chains in one call."""

    def draft_chain(self, draft: Any, kv: Any, start: ChainStart, depth: int, cut: Cut) -> tuple[Tensor, Tensor] | None:
        """Return cumulative log-probabilities and tokens [R, depth]: each the best after the one before.

        What `cut` leaves out has -inf; the first token of a chain below its floor is returned all the same. `draft` and
        `kv` are the models' EAGLE-3 draft and its cache, a package higher. None if the call cannot run this draft.
        """
        ...


@dataclass(frozen=True)
class RowSampling:
    """Temperature, seed and absolute position of each row of logits."""

    temperature_L: Tensor
    seed_L: Tensor
    position_L: Tensor
