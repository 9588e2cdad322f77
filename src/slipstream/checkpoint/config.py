"""Read a target's config.json into a ModelSpec, and write one; the functions for drafts are named here too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from slipstream.checkpoint.block_config import read_blocks, read_ropes
from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.draft_export import DraftDialect, DraftOrigin, draft_config
from slipstream.checkpoint.families import FAMILIES, Family
from slipstream.checkpoint.fields import MOST_LAYERS, WIDEST_HEAD, Fields, check_activation, config_file, dtype_name
from slipstream.checkpoint.gemma_config import full_heads, with_gemma
from slipstream.checkpoint.llama4_config import with_llama4
from slipstream.checkpoint.moe_config import read_experts, read_mla, text_fields
from slipstream.checkpoint.rope import write_rope
from slipstream.checkpoint.spec import ModelSpec
from slipstream.checkpoint.unknown import unknown_family

__all__ = ["DraftDialect", "DraftOrigin", "draft_config", "draft_spec", "model_config", "model_spec"]

_MISTRAL_WINDOW = 4096  # transformers' value when the field is absent (null means no window)


def model_spec(config: Mapping[str, Any], source: Path) -> ModelSpec:
    """Read a target's config.json (already parsed); `source` is the folder or file, for messages."""
    fields = text_fields(Fields(config, config_file(source)))
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields = fields.with_defaults(family.defaults)
    mla = read_mla(fields) if family.latent else None
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    default_kv_heads = num_heads if family.kv_heads else None
    num_kv_heads = num_heads if mla is not None else fields.integer("num_key_value_heads", default_kv_heads)
    head_dim = _head_dim(fields, family, hidden_size, num_heads) if mla is None else mla.head_dim
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_attention_heads", f"is {num_heads}, no multiple of num_key_value_heads = {num_kv_heads}."
        )
    if not family.gemma:
        check_activation(fields)
    attention_bias = fields.flag("attention_bias", False)
    max_position = fields.integer("max_position_embeddings")
    heads = full_heads(fields, head_dim, num_kv_heads) if family.gemma == 4 else None
    widths = (head_dim if heads is None else heads[0], head_dim) if mla is None else (mla.rope_dim, mla.rope_dim)
    ropes = read_ropes(fields, widths, max_position, family)
    bos = fields.integers("bos_token_id")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(family.dense_size),
        num_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=ropes.full,
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        qkv_bias=family.qkv_bias == "always" or (family.qkv_bias == "flag" and attention_bias),
        output_bias=family.output_bias and attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=_qk_norm(fields, family),
        sliding_window=_sliding_window(fields, family),
        blocks=read_blocks(fields, family, ropes, heads),
        sinks=family.sinks,
        mla=mla,
        moe=None if family.experts is None else read_experts(fields, family.experts),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.integers("eos_token_id"),
        dtype=dtype_name(fields, "float32"),
    )
    if family.window == "chunks":
        return with_llama4(spec, fields)
    return spec if family.gemma is None else with_gemma(spec, fields, family.gemma)


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json that transformers and `model_spec` read back as this spec, for Llama-class targets."""
    assert spec.mla is None and spec.moe is None and not spec.blocks, "only Llama-class targets are written"
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "model_type": FAMILIES[spec.architecture].model_type,
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
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": spec.output_bias,
        "mlp_bias": spec.mlp_bias,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) if len(spec.eos_token_ids) > 1 else None,
        "dtype": spec.dtype,
        "torch_dtype": spec.dtype,
        **write_rope(spec.rope, spec.head_dim),
    }
    if len(spec.eos_token_ids) == 1:
        config["eos_token_id"] = spec.eos_token_ids[0]
    if spec.architecture != "LlamaForCausalLM":
        config["sliding_window"] = spec.sliding_window
    if spec.architecture.startswith("Qwen"):
        config["use_sliding_window"] = spec.sliding_window is not None
        config["max_window_layers"] = 0 if spec.sliding_window is not None else spec.num_layers
    return config


def _architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    if not names:
        raise fields.error("architectures", f"is missing. Slipstream reads {', '.join(FAMILIES)}.")
    if names[0] not in FAMILIES:
        raise unknown_family(fields, names[0])
    return names[0]


def _qk_norm(fields: Fields, family: Family) -> bool | Literal["full"]:
    if family.qk_norm == "full":
        return "full"
    return family.qk_norm == "head" or (family.qk_norm == "flag" and fields.flag("use_qk_norm", False))


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim") or family.head_dim is not None:
        return fields.integer("head_dim", family.head_dim, maximum=WIDEST_HEAD)
    if hidden_size % num_heads:
        raise fields.error(
            "head_dim", f"is missing, and hidden_size {hidden_size} is no multiple of {num_heads} heads."
        )
    if hidden_size // num_heads > WIDEST_HEAD:
        raise fields.error(
            "num_attention_heads",
            f"is {num_heads}, so heads would be {hidden_size // num_heads} wide, which no model has (at most "
            f"{WIDEST_HEAD} is read); fetch the file again.",
        )
    return hidden_size // num_heads


def _sliding_window(fields: Fields, family: Family) -> int | None:
    if family.window in ("none", "layers", "chunks"):
        return None
    if family.window == "mistral":
        if "sliding_window" not in fields.values:
            return _MISTRAL_WINDOW
        return fields.integer("sliding_window") if fields.has("sliding_window") else None
    if family.window == "given":
        return fields.integer("sliding_window") if fields.has("sliding_window") else None
    if not fields.flag("use_sliding_window", False):
        return None
    if family.window == "flag":
        return fields.integer("sliding_window")
    num_layers = fields.integer("num_hidden_layers")
    first_windowed = fields.integer("max_window_layers", num_layers, minimum=0)
    if first_windowed >= num_layers:
        return None
    if first_windowed > 0:
        raise fields.error(
            "max_window_layers",
            f"is {first_windowed}: a window on some of {num_layers} layers only is not read.",
        )
    return fields.integer("sliding_window")
