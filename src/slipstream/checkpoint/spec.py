"""What a checkpoint is: the architecture of a target and of a draft, in one canonical form whatever wrote it."""

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding; the fields beyond `factor` matter only to the scaling that names them."""

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


@dataclass(frozen=True)
class ModelSpec:
    """A Llama-class target: enough to build the module and to check every tensor's shape."""

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
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

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
    dtype: str = "bfloat16"
