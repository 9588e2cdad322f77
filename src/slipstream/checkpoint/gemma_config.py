"""Read what Gemma says of itself beyond a Llama: norms, scales and its activation."""

from dataclasses import replace

from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.spec import Activation, ModelSpec

_GELU = ("gelu_pytorch_tanh", "gelu_tanh")


def with_gemma(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Return a spec with Gemma's norms, scales and activation."""
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    if (activation := fields.text(key, _GELU[0])) not in _GELU:
        raise fields.error(key, f"is {activation!r}; slipstream computes Gemma with {_GELU[0]!r}.")
    if fields.has("attn_logit_softcapping"):
        raise fields.error("attn_logit_softcapping", "is set, as in Gemma 2; slipstream computes scores without a cap.")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "is true; slipstream writes text from left to right.")
    return replace(
        spec,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        activation=Activation("gelu"),
        norms_around=True,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        logit_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )
