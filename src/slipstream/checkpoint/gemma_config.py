"""Read what Gemma says of itself beyond a Llama: norms, scales, its activation, and heads that differ by block."""

from dataclasses import replace
from typing import Literal

from slipstream.checkpoint.fields import WIDEST_HEAD, Fields
from slipstream.checkpoint.spec import Activation, ModelSpec

_GELU = ("gelu_pytorch_tanh", "gelu_tanh")
_FULL_HEAD = 512  # transformers' value for Gemma 4's blocks that see all keys


def full_heads(fields: Fields, head_dim: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the width and the number of key heads in the blocks of a Gemma 4 that see all keys.

    Published files say `global_head_dim` and `num_global_key_value_heads`; transformers 5 writes them block by block.
    """
    listed = fields.nested("per_layer_config")
    if not listed.values:
        width = fields.integer("global_head_dim", _FULL_HEAD, maximum=WIDEST_HEAD)
        shared = fields.flag("attention_k_eq_v", False)
        return width, fields.integer("num_global_key_value_heads", num_kv_heads) if shared else num_kv_heads
    named = [listed.nested(index) for index in listed.values]
    found = {
        (block.integer("head_dim", head_dim, maximum=WIDEST_HEAD), block.integer("num_key_value_heads", num_kv_heads))
        for block in named
    }
    full = {index for index, kind in enumerate(fields.texts("layer_types")) if kind == "full_attention"}
    if (
        len(found) > 1 or {int(key) if key.isdecimal() and len(key) < 5 else -1 for key in listed.values} != full
    ):  # "05" is 5
        raise fields.error(
            "per_layer_config",
            "gives heads of their own to other blocks than those that see all keys ('layer_types'), or several kinds "
            "of them, which slipstream does not read.",
        )
    return found.pop()


def with_gemma(spec: ModelSpec, fields: Fields, version: Literal[3, 4]) -> ModelSpec:
    """Return a spec with Gemma's norms, scales and activation."""
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if (activation := fields.text(key, _GELU[0])) not in _GELU:
        raise fields.error(key, f"is {activation!r}; slipstream computes Gemma with {_GELU[0]!r}.")
    if fields.has("attn_logit_softcapping"):
        raise fields.error("attn_logit_softcapping", "is set, as in Gemma 2; slipstream computes scores without a cap.")
    if fields.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise fields.error("use_bidirectional_attention", "is set; slipstream writes text from left to right.")
    spec = replace(
        spec,
        activation=Activation("gelu"),
        norms_around=True,
        embedding_scale=spec.hidden_size**0.5,
        logit_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )
    if version == 3:
        return replace(spec, attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5, norm_offset=1.0)
    for key, what in (
        ("hidden_size_per_layer_input", "embeddings for every block"),
        ("num_kv_shared_layers", "blocks that share keys"),
    ):
        if fields.integer(key, 0, minimum=0):
            raise fields.error(
                key,
                f"is {fields.integer(key)}: the model has {what}, as Gemma 4's E2B and E4B do, which slipstream does "
                "not run; of Gemma 4 it runs 12B, 26B-A4B and 31B. To use an EAGLE-3 draft with this model all the "
                "same, let another engine run both: slipstream serve MODEL --draft DRAFT --engine vllm (or sglang).",
            )
    return replace(spec, attention_scale=1.0, unit_values=True, scaled_blocks=True)
