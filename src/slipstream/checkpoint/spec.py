"""What a checkpoint is: the architecture of a target and of a draft, in one canonical form whatever wrote it."""

from dataclasses import dataclass, replace
from typing import Literal

RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding; the fields beyond `factor` matter only to the scaling that names them.

    Args:
        divisors: what LongRoPE divides each pair's frequency by, up to the original context.
        long_divisors: what it divides by where texts may be longer (`at_context`).
        truncate: whether YaRN's ramp begins and ends at whole dimensions.
        turning: how many pairs "proportional" turns, the first ones; the others stay as they are.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    truncate: bool = True
    turning: int = 0

    def at_context(self, max_context: int) -> "RopeSpec":
        """Return the rope of texts of up to so many tokens: LongRoPE turns them all as the longest may need it."""
        if self.scaling == "longrope" and max_context > self.original_max_position:
            return replace(self, divisors=self.long_divisors)
        return self


@dataclass(frozen=True)
class MlaSpec:
    """Latent attention: keys and values of all heads are projections of one latent per token, which is what is kept.

    Args:
        q_rank: the width queries are squeezed through; None if they are projected directly.
        kv_rank: the width of the latent, without its rotary part.
        nope_dim: of each head's query and key, the part without positions; `rope_dim` is the part with.
        value_dim: the width of each head's value.
        scale: what scores are multiplied by; YaRN's share of it included.
        interleaved: whether rotary pairs lie side by side in the checkpoint (2i, 2i + 1), not half a width apart.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """The width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """The width of what is kept of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class RoutingSpec:
    """How a token's experts are chosen and weighted: by a score for each of them.

    Args:
        top_k: experts per token.
        num_groups: experts compete in groups, of which those with the best two members in sum are kept.
        normalise: whether a token's weights are made to sum to one before they are scaled.
        weighs_inputs: whether a weight multiplies what its expert is given, not what it gives.
        scoring: what turns the router's logits into scores.
        bias: what the router's bias is added to: the scores experts are chosen by (not those they are weighted by),
            or the logits.
        scaled_experts: whether each expert's weight is multiplied by a stored number of its own.
    """

    top_k: int
    num_groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    bias: Literal["choice", "logits", "none"] = "choice"
    weighs_inputs: bool = False
    scaled_experts: bool = False


@dataclass(frozen=True)
class Activation:
    """What a gated feed-forward part makes of its gate and up.

    Args:
        kind: act(gate) * up with SiLU or GELU (its tanh form); or "clamped", gate * sigmoid(alpha * gate) * (up + 1)
            with the gate at most `limit` and up within it on both sides.
    """

    kind: Literal["silu", "gelu", "clamped"] = "silu"
    limit: float = 0.0
    alpha: float = 1.0


SILU = Activation()


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in place of the feed-forward part.

    Args:
        intermediate_size: of one expert.
        shared_size: the intermediate size of the expert every token goes through; 0 for none.
        dense_layers: the blocks that keep their dense feed-forward part, ascending.
        bias: whether the experts' products have biases.
        beside_dense: whether experts stand beside every block's dense part, each with norms of its own (Gemma 4).
    """

    num_experts: int
    intermediate_size: int
    routing: RoutingSpec
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    activation: Activation = SILU
    beside_dense: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """What the attention of one block has of its own, where a model's blocks differ.

    Args:
        rope: its rotary positions; None for a block that knows no positions.
        window: how many keys a token sees, the last ones, its own included; None sees all.
        chunk: keys lie in chunks of so many positions, and a token sees those of its own chunk; None sees all.
        heads: the width of its heads and the number of its key heads; None for the model's.
        keys_as_values: whether values are what the keys are made of, so there is no projection for them.
    """

    rope: RopeSpec | None
    window: int | None = None
    chunk: int | None = None
    heads: tuple[int, int] | None = None
    keys_as_values: bool = False


@dataclass(frozen=True)
class Tempering:
    """Queries at position p are multiplied by 1 + scale * log(1 + floor((p + 1) / floor))."""

    floor: float
    scale: float


@dataclass(frozen=True)
class ModelSpec:
    """A target: enough to build the module and to check every tensor's shape.

    Args:
        head_dim: the width of a head's query and key.
        qk_norm: whether queries and keys are normed: each head by itself, or all heads as one ("full").
        blocks: what each block's attention has of its own; empty where all have the model's rope and window.
        sinks: whether each head's softmax has a further, learned score that stands for no key.
        neighbours: whether rotary pairs lie side by side in the checkpoint (2i, 2i + 1), not half a head apart.
        unit_qk: whether rotated queries and keys are then normed, without a weight.
        tempering: how queries of blocks without positions grow with their position, if they do.
        attention_scale: what scores are multiplied by; None for one over the root of a head's width.
        norms_around: whether the outputs of attention and of the feed-forward part are normed, too.
        norm_offset: what is added to every norm's stored weight.
        embedding_scale: what embeddings are multiplied by before the first block.
        logit_cap: where logits are squeezed between minus and plus this number.
        unit_values: whether each head's values are normed, without a weight.
        scaled_blocks: whether the stream is multiplied by a stored number after each block.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | Literal["full"] = False
    sliding_window: int | None = None
    blocks: tuple[BlockSpec, ...] = ()
    sinks: bool = False
    neighbours: bool = False
    unit_qk: bool = False
    tempering: Tempering | None = None
    attention_scale: float | None = None
    activation: Activation = SILU
    norms_around: bool = False
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    logit_cap: float | None = None
    unit_values: bool = False
    scaled_blocks: bool = False
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def block(self, index: int) -> BlockSpec:
        """Return what a block's attention has of its own."""
        return self.blocks[index] if self.blocks else BlockSpec(self.rope, self.sliding_window)

    def block_heads(self, index: int) -> tuple[int, int]:
        """Return the width of a block's heads and the number of its key heads."""
        return self.block(index).heads or (self.head_dim, self.num_kv_heads)

    @property
    def widest_window(self) -> int | None:
        """The most keys that any block shows a token; None where some block shows all."""
        blocks = [self.block(index) for index in range(self.num_layers)]
        shown = [block.window or block.chunk for block in blocks]
        return None if None in shown else max(size for size in shown if size is not None)

    def default_captured_layers(self) -> tuple[int, ...]:
        """Return the layers EAGLE-3 captures when a draft names none (k = blocks applied before the capture)."""
        return (2, self.num_layers // 2, self.num_layers - 3)


@dataclass(frozen=True)
class DraftSpec:
    """An EAGLE-3 draft in canonical form.

    Args:
        captured_layers: k = number of target blocks applied before the capture; None means the target's default.
        num_features: how many captured layers feed `fc`.
        feedback: which hidden state a draft step hands to the next: before or after the final norm.
        residual: whether the first block's residual is the hidden state as it came or its normed form.
        feature_norm: none, one norm over the concatenation (`input_norm`), or one per captured layer (`fc_norm.N`).
        draft_vocab_size: equals `vocab_size` when the draft speaks the whole vocabulary (no d2t).
        mla: latent attention in place of keys and values by head, as in drafts trained for Kimi-K2.
        mask_token_id: of a P-EAGLE draft, what stands for tokens not drafted yet: it drafts them all in one pass.
    """

    architecture: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    captured_layers: tuple[int, ...] | None = None
    num_features: int = 3
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    residual: Literal["raw", "normed"] = "raw"
    feature_norm: Literal["none", "concat", "per_layer"] = "none"
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    mla: MlaSpec | None = None
    mask_token_id: int | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class BlockDraftSpec:
    """A DFlash draft in canonical form: a few Qwen3 blocks that fill a block of tokens in one pass.

    Args:
        block_size: tokens of a block as it was trained, the first of which is known.
        captured_layers: k = number of target blocks applied before the capture.
        windows: of each layer, how many keys a token sees, the last ones; None for all.
        causal: of each layer, whether a token of a block sees only those before it.
        attention_bias: on the products before and after attention.
        target_layers: how many blocks its target has, where the file says so.
    """

    architecture: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    block_size: int
    mask_token_id: int
    captured_layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    attention_bias: bool = False
    target_layers: int | None = None
    dtype: str = "bfloat16"

    @property
    def num_features(self) -> int:
        """How many captured layers feed `fc`."""
        return len(self.captured_layers)

    @property
    def widest_window(self) -> int | None:
        """The most keys that any layer shows a token; None where some layer shows all."""
        shown = [window for window in self.windows if window is not None]
        return max(shown) if len(shown) == self.num_layers else None
