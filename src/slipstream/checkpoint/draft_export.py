"""Write a draft's config.json in the dialect that a given engine reads right."""

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.checkpoint.captures import CONVENTION, LAYER_IDS, OUR_BLOCK, CaptureConvention, spelled
from slipstream.checkpoint.rope import write_rope
from slipstream.checkpoint.spec import DraftSpec
from slipstream.errors import CheckpointError

_SPECULATIVE_TOKENS = 3  # what speculators' dialect proposes to its readers

DraftDialect = Literal["sglang", "vllm", "speculators"]


@dataclass(frozen=True)
class DraftOrigin:
    """The target a draft was made for, which speculators' dialect records; its architecture where it is known."""

    target: str
    architecture: str | None = None


def draft_config(spec: DraftSpec, dialect: DraftDialect, origin: DraftOrigin | None = None) -> dict[str, Any]:
    """Return a config.json that the named engine reads as this draft and nothing else.

    Every flag is written even at its default, both rope spellings are there, the captured layers follow the reader's
    convention, and a `slipstream` block carries the canonical ones. What the reader cannot express (a normed residual
    or query/key norms in SGLang) is an error, as it would be served wrongly in silence.

    Args:
        spec: the draft.
        dialect: sglang (SpecForge's flat form), vllm (flat), or speculators (nested; vLLM reads it too).
        origin: the target, needed by the speculators dialect only.
    """
    if spec.mla is not None:
        raise CheckpointError("A draft with latent attention (MLA) is read, but no dialect is written for one.")
    if dialect == "sglang":
        _refuse_for_sglang(spec)
    if dialect == "speculators" and spec.mask_token_id is not None:
        raise CheckpointError("A P-EAGLE draft is written in the vllm dialect only; name that (--dialect vllm).")
    flags: dict[str, Any] = {
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "num_aux_hidden_states": spec.num_features,
        "norm_before_residual": spec.residual == "normed",
        "norm_before_fc": spec.feature_norm == "concat",
        "fc_norm": spec.feature_norm == "per_layer",
        "norm_output": spec.feedback == "post_norm",
        "tie_word_embeddings": False,
        "dtype": spec.dtype,
        "torch_dtype": spec.dtype,
        OUR_BLOCK: {"captured_layers": list(spec.captured_layers) if spec.captured_layers else None},
    }
    if dialect == "speculators":
        return _speculators_config(spec, flags, origin)
    convention: CaptureConvention = "block_output" if dialect == "sglang" else "blocks_applied"
    eagle: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": spec.feature_norm == "concat"}
    config = {"architectures": [_architecture(spec, dialect)], **_block_config(spec), **flags}
    if spec.mask_token_id is not None:
        config |= {"mask_token_id": spec.mask_token_id, "parallel_drafting": True}
    if spec.captured_layers is not None:
        eagle[LAYER_IDS] = spelled(spec.captured_layers, convention)
        if dialect == "vllm":  # one of its two runners reads the top level, the other eagle_config
            config[LAYER_IDS] = spelled(spec.captured_layers, convention)
    return {**config, "eagle_config": eagle, CONVENTION: convention}


def _refuse_for_sglang(spec: DraftSpec) -> None:
    problems = {
        "a normed residual (norm_before_residual)": spec.residual == "normed",
        "query and key norms": spec.qk_norm,
        "masks for tokens not drafted yet (P-EAGLE)": spec.mask_token_id is not None,
        "the embedding output (0 blocks applied) as a captured layer": 0 in (spec.captured_layers or ()),
    }
    for what, found in problems.items():
        if found:
            raise CheckpointError(
                f"This draft has {what}, which SGLang's EAGLE-3 loader would skip in silence. "
                f"Export it in the vllm or speculators dialect."
            )


def _architecture(spec: DraftSpec, dialect: DraftDialect) -> str:
    if dialect == "sglang":
        return "LlamaForCausalLMEagle3"
    return "Eagle3Qwen3ForCausalLM" if spec.qk_norm else "Eagle3LlamaForCausalLM"


def _block_config(spec: DraftSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if spec.qk_norm else "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_position,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        **write_rope(spec.rope, spec.head_dim),
    }


def _speculators_config(spec: DraftSpec, flags: dict[str, Any], origin: DraftOrigin | None) -> dict[str, Any]:
    if origin is None:
        raise CheckpointError("The speculators dialect records the target's name: give it (--target).")
    architectures = [] if origin.architecture is None else [origin.architecture]
    nested = {"architectures": [_architecture(spec, "vllm")], **_block_config(spec)}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": nested,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "verifier": {"name_or_path": origin.target, "architectures": architectures},
        },
        **flags,
    }
    if spec.captured_layers is not None:
        config[LAYER_IDS] = list(spec.captured_layers)
    return config
