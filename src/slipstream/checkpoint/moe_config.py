"""Read what families say of themselves beyond a Llama: latent attention, and experts in each one's spelling."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slipstream.checkpoint.families import Experts
from slipstream.checkpoint.fields import MOST_EXPERTS, MOST_LAYERS, WIDEST_HEAD, Fields
from slipstream.checkpoint.rope import yarn_score_factor
from slipstream.checkpoint.spec import Activation, MlaSpec, MoeSpec, RoutingSpec


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text part of a model that also sees; what it leaves out stands at the top."""
    if not fields.has("text_config"):
        return fields
    text = fields.nested("text_config")
    inner = {key: value for key, value in text.values.items() if value is not None}
    kept = {key: fields.values[key] for key in ("architectures", "tie_word_embeddings") if key in fields.values}
    merged: Mapping[str, Any] = {**fields.values, **inner, **kept}  # the head is the whole model's, and so is its tie
    return Fields(merged, fields.file, "text_config.")


def read_mla(fields: Fields) -> MlaSpec:
    """Return the latent attention of a config."""
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "is true; slipstream computes latent attention without biases.")
    nope_dim = fields.integer("qk_nope_head_dim", maximum=WIDEST_HEAD)
    rope_dim = fields.integer("qk_rope_head_dim", maximum=WIDEST_HEAD)
    value_dim = fields.integer("v_head_dim")
    if value_dim > nope_dim + rope_dim:
        raise fields.error("v_head_dim", f"is {value_dim}, more than the {nope_dim + rope_dim} of queries and keys.")
    return MlaSpec(
        q_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_score_factor(fields),
        interleaved=fields.flag("rope_interleave", True),
    )


def read_experts(fields: Fields, whose: Experts) -> MoeSpec | None:
    """Return the experts of a config, in the spelling of one family; None for a dense member of one that has both."""
    readers: dict[Experts, Callable[[Fields], MoeSpec | None]] = {
        "deepseek": _read_deepseek,
        "minimax": _read_minimax,
        "qwen3": partial(_read_qwen3, normalise=False),
        "qwen3_vl": partial(_read_qwen3, normalise=True),
        "gpt_oss": _read_gpt_oss,
        "llama4": _read_llama4,
        "gemma4": _read_gemma4,
    }
    return readers[whose](fields)


def _read_deepseek(fields: Fields) -> MoeSpec:
    """Return the experts of a DeepSeek-V3, Kimi-K2 or GLM config."""
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (value := fields.text(key, expected)) != expected:
            raise fields.error(key, f"is {value!r}; slipstream routes by {expected!r}, as DeepSeek-V3 does.")
    if (every := fields.integer("moe_layer_freq", 1)) != 1:
        raise fields.error("moe_layer_freq", f"is {every}; slipstream runs experts in every block or in none.")
    inner = fields.integer("moe_intermediate_size")
    num_experts = fields.integer("n_routed_experts", maximum=MOST_EXPERTS)
    routing = RoutingSpec(
        top_k=fields.integer("num_experts_per_tok"),
        num_groups=fields.integer("n_group", 1),
        kept_groups=fields.integer("topk_group", 1),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    _check_routing(fields, routing, num_experts)
    return MoeSpec(
        num_experts=num_experts,
        intermediate_size=inner,
        routing=routing,
        shared_size=inner * fields.integer("n_shared_experts", 0, minimum=0, maximum=MOST_EXPERTS),
        dense_layers=_dense_layers(fields),
    )


def _read_minimax(fields: Fields) -> MoeSpec:
    """Return the experts of a MiniMax-M2 config."""
    for key, expected in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if (value := fields.text(key, expected)) != expected:
            raise fields.error(key, f"is {value!r}; slipstream reads {expected!r}, as MiniMax-M2 has it.")
    if not fields.flag("use_qk_norm", True) or not fields.flag("use_routing_bias", True):
        raise fields.error("use_qk_norm", "or 'use_routing_bias' is false; MiniMax-M2 has both.")
    if any(kind != 1 for kind in fields.integers("attn_type_list")):
        raise fields.error("attn_type_list", "names other attention than the full one (1), all that MiniMax-M2 has.")
    if fields.integer("shared_intermediate_size", 0, minimum=0):
        raise fields.error("shared_intermediate_size", "is set; slipstream reads MiniMax-M2 without a shared expert.")
    num_experts = fields.integer("num_local_experts", maximum=MOST_EXPERTS)
    routing = RoutingSpec(top_k=fields.integer("num_experts_per_tok"))
    _check_routing(fields, routing, num_experts)
    return MoeSpec(num_experts, fields.integer("intermediate_size"), routing)


def _read_qwen3(fields: Fields, normalise: bool) -> MoeSpec:
    """Return the experts of a Qwen3-MoE config, `normalise` where it does not say."""
    spelled = "num_experts" if fields.has("num_experts") else "num_local_experts"  # Qwen's own, and transformers 5's
    num_experts = fields.integer(spelled, maximum=MOST_EXPERTS)
    routing = RoutingSpec(
        top_k=fields.integer("num_experts_per_tok"),
        normalise=fields.flag("norm_topk_prob", normalise),
        scoring="softmax",
        bias="none",
    )
    _check_routing(fields, routing, num_experts)
    step, dense = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers"))
    layers = range(fields.integer("num_hidden_layers", maximum=MOST_LAYERS))
    return MoeSpec(
        num_experts,
        fields.integer("moe_intermediate_size"),
        routing,
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )


def _read_gpt_oss(fields: Fields) -> MoeSpec:
    """Return the experts of a gpt-oss config."""
    num_experts = fields.integer("num_local_experts", maximum=MOST_EXPERTS)
    routing = RoutingSpec(fields.integer("num_experts_per_tok"), scoring="softmax", bias="logits")
    _check_routing(fields, routing, num_experts)
    return MoeSpec(
        num_experts,
        fields.integer("intermediate_size"),
        routing,
        bias=True,
        activation=Activation("clamped", fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)),
    )


def _read_llama4(fields: Fields) -> MoeSpec:
    """Return the experts of a Llama 4 config: every so many blocks have some, and one that every token goes through."""
    num_experts, inner = fields.integer("num_local_experts", maximum=MOST_EXPERTS), fields.integer("intermediate_size")
    routing = RoutingSpec(fields.integer("num_experts_per_tok", 1), normalise=False, bias="none", weighs_inputs=True)
    _check_routing(fields, routing, num_experts)
    num_layers, step = (
        fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        fields.integer("interleave_moe_layer_step", 1),
    )
    sparse = set(fields.integers("moe_layers") if fields.has("moe_layers") else range(step - 1, num_layers, step))
    dense = tuple(layer for layer in range(num_layers) if layer not in sparse)
    return MoeSpec(num_experts, inner, routing, shared_size=inner, dense_layers=dense)


def _read_gemma4(fields: Fields) -> MoeSpec | None:
    """Return the experts of a Gemma 4 config, beside the dense part of every block; most sizes have none."""
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.integer("num_experts", maximum=MOST_EXPERTS)
    routing = RoutingSpec(fields.integer("top_k_experts"), scoring="softmax", bias="none", scaled_experts=True)
    _check_routing(fields, routing, num_experts)
    inner = fields.integer("moe_intermediate_size")
    return MoeSpec(num_experts, inner, routing, activation=Activation("gelu"), beside_dense=True)


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Return the blocks without experts: the first few, or in transformers 5's spelling those of a list."""
    kinds = fields.texts("mlp_layer_types")
    if kinds and not fields.has("first_k_dense_replace"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return tuple(range(fields.integer("first_k_dense_replace", 0, minimum=0, maximum=MOST_LAYERS)))


def _check_routing(fields: Fields, routing: RoutingSpec, num_experts: int) -> None:
    groups = routing.num_groups
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise fields.error("n_group", f"is {groups}, which does not divide {num_experts} experts into groups of two.")
    if routing.kept_groups > groups:
        raise fields.error("topk_group", f"is {routing.kept_groups}, more than n_group = {groups}.")
    if routing.top_k > num_experts // groups * routing.kept_groups:
        raise fields.error("num_experts_per_tok", f"is {routing.top_k}, more than there are experts to choose from.")
