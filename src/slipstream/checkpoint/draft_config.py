"""Read a draft's config.json, in any dialect, into one DraftSpec."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from slipstream.checkpoint.captures import OUR_BLOCK, Captures, read_captures
from slipstream.checkpoint.fields import MOST_LAYERS, WIDEST_HEAD, Fields, check_activation, config_file, dtype_name
from slipstream.checkpoint.files import shown
from slipstream.checkpoint.moe_config import read_mla
from slipstream.checkpoint.rope import read_rope
from slipstream.checkpoint.spec import DraftSpec
from slipstream.errors import CheckpointError

log = logging.getLogger(__name__)

Family = Literal["llama", "qwen3", "deepseek"]

# Architecture names met in config.json, by the kind of block they stand for.
DRAFTS: dict[str, Family] = {
    "LlamaForCausalLMEagle3": "llama",  # SpecForge, SGLang
    "LlamaForCausalLM": "llama",  # SafeAILab and older NVIDIA files, told from a target by their other fields
    "Eagle3LlamaForCausalLM": "llama",  # vLLM, AngelSlim
    "Eagle3Speculator": "llama",  # speculators (the nested config says which block)
    "Eagle3DraftModel": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",  # vLLM
    "Qwen3ForCausalLMEagle3": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "deepseek",  # SGLang, vLLM: latent attention, as trained for Kimi-K2
    "Eagle3DeepseekV3ForCausalLM": "deepseek",
    "PeagleLlamaForCausalLM": "llama",  # vLLM, as is the next: P-EAGLE
    "PeagleQwen3ForCausalLM": "qwen3",
    "PEagleDraftModel": "llama",  # speculators
}
_SPECULATORS = ("eagle3", "peagle")
_LISTED = " or ".join(map(repr, _SPECULATORS))
_MASK_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")  # what P-EAGLE's mask token is called, in vLLM's order
# speculators leaves out of its nested config whatever equals transformers' default for the block's class.
_NESTED_DEFAULTS: dict[Family, dict[str, int]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
# What NVIDIA's eagle_config may switch, and the one value for which the block is the one slipstream computes.
_EAGLE_SWITCHES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

DFLASH = "DFlashDraftModel"  # as its authors' files name it; vLLM gives speculators' ones the same name
# Drafts that came after EAGLE-3, by a word of their architecture or of speculators_model_type: what each is.
_SUCCESSORS = {
    "pard": "PARD, a small model that guesses several tokens in one pass from mask tokens",
    "dspark": "DSpark, a DFlash block with a Markov head and a confidence head",
    "domino": "Domino, a DFlash block whose logits a recurrent network corrects",
    "lilicorr": "LiLiCorr, a DFlash block with a head that corrects candidates",
    "dflash2": "DFlash2, a DFlash block with a convolution and a head that chooses among candidates",
    "dflash": f"a DFlash draft of another architecture than {DFLASH}",
    "xpress": "XPress, a block draft refined by a causal pass",
    "medusa": "Medusa, heads that each guess one token ahead",
    "hydra": "Hydra, Medusa's heads in sequence",
    "mlp_speculator": "an MLP speculator",
    "fastmtp": "FastMTP, a target's own prediction head",
}


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a draft rather than a whole model."""
    first = _first_architecture(config)
    marks = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config")
    named = any(word in first.lower() for word in (*_SPECULATORS, "dflash"))
    return named or any(config.get(key) is not None for key in marks)


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DFlash draft (see `dflash_config`), as its authors or speculators write it."""
    kind = config.get("speculators_model_type")
    return kind == "dflash" if kind is not None else _first_architecture(config) == DFLASH


def _first_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def draft_spec(config: Mapping[str, Any], source: Path, target_layers: int | None) -> DraftSpec:
    """Read a draft's config.json (already parsed), whichever tool wrote it.

    `target_layers` is the target's number of blocks where known: it bounds the captured layers and helps to tell
    their convention (see `captures.read_captures`). Absent `norm_before_residual` is False, except in speculators'
    dialect, where it is True as vLLM reads it.
    """
    return read_draft(config, source, target_layers)[0]


def read_draft(config: Mapping[str, Any], source: Path, target_layers: int | None) -> tuple[DraftSpec, Captures | None]:
    """Read a draft's config.json as `draft_spec` does, and tell how its captured layers were read, if it names any."""
    fields = Fields(config, config_file(source))
    speculators = fields.has("speculators_model_type")
    _refuse_successors(fields)
    _refuse_other_drafts(fields)
    block = fields.nested("transformer_layer_config") if speculators else fields
    family = _family(fields, block, speculators)
    if speculators:
        block = with_left_out(block, family)
    check_activation(block)
    hidden_size = block.integer("hidden_size")
    num_heads = block.integer("num_attention_heads")
    mla = read_mla(block) if family == "deepseek" else None
    head_dim = block.integer("head_dim", hidden_size // num_heads, maximum=WIDEST_HEAD) if mla is None else mla.head_dim
    num_kv_heads = num_heads if mla is not None else block.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise block.error(
            "num_attention_heads", f"is {num_heads}, no multiple of num_key_value_heads = {num_kv_heads}."
        )
    max_position = block.integer("max_position_embeddings")
    vocab_size = block.integer("vocab_size")
    captures = read_captures(fields, speculators, target_layers)
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
    if draft_vocab_size > vocab_size:
        raise fields.error("draft_vocab_size", f"is {draft_vocab_size}, more than vocab_size = {vocab_size}.")
    normed = fields.flag("norm_before_residual", fields.text("speculators_model_type", "") == "eagle3")
    names = fields.texts("architectures")
    spec = DraftSpec(
        architecture=names[0] if names else "Eagle3Speculator",
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=fields.integer("target_hidden_size", hidden_size),
        intermediate_size=block.integer("intermediate_size"),
        num_layers=block.integer("num_hidden_layers", 1, maximum=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=block.number("rms_norm_eps", 1e-6),
        rope=read_rope(block, head_dim if mla is None else mla.rope_dim, max_position),
        max_position=max_position,
        captured_layers=captures.layers if captures else None,
        num_features=_num_features(fields, len(captures.raw) if captures else None),
        feedback=_feedback(fields),
        residual="normed" if normed else "raw",
        feature_norm=_feature_norm(fields),
        qkv_bias=block.flag("attention_bias", False),
        mlp_bias=block.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(block),
        mla=mla,
        mask_token_id=_mask_token(fields, vocab_size),
        dtype=dtype_name(fields if fields.has("dtype") or fields.has("torch_dtype") else block, "bfloat16"),
    )
    return spec, captures


def with_left_out(block: Fields, family: Family) -> Fields:
    """Return the block that speculators describes, with what equals transformers' defaults and so was left out."""
    return block.with_defaults(_NESTED_DEFAULTS[family])


def _family(fields: Fields, block: Fields, speculators: bool) -> Family:
    names = fields.texts("architectures")
    architecture = names[0] if names else ""
    model_type = block.text("model_type", "qwen3" if "qwen3" in architecture.lower() else "llama")
    if speculators:
        kind = fields.text("speculators_model_type")
        if kind not in _SPECULATORS:
            raise fields.error("speculators_model_type", f"is {kind!r}; slipstream reads {_LISTED} drafts only.")
        if model_type not in ("llama", "qwen3"):
            raise block.error("model_type", f"is {model_type!r}; slipstream reads drafts of llama or qwen3 blocks.")
        return "qwen3" if model_type == "qwen3" else "llama"
    if fields.has("kv_lora_rank") != (DRAFTS.get(architecture) == "deepseek"):
        raise CheckpointError(
            f"{fields.file}: architecture {architecture!r} and field 'kv_lora_rank' disagree on whether the draft has "
            f"latent attention (MLA). {_what_is_read()}"
        )
    if DRAFTS.get(architecture) == "deepseek":
        return "deepseek"
    if architecture == "LlamaForCausalLM" and not (fields.has("draft_vocab_size") or fields.has("eagle_config")):
        raise CheckpointError(
            f"{fields.file}: has neither 'draft_vocab_size' nor 'eagle_config', so it is a whole model, "
            f"not an EAGLE-3 draft. Give it as the target, or name the draft's folder."
        )
    if architecture in DRAFTS:
        return "qwen3" if model_type == "qwen3" else DRAFTS[architecture]
    if any(word in architecture.lower() for word in _SPECULATORS) and model_type in ("llama", "qwen3"):
        return "qwen3" if model_type == "qwen3" else "llama"
    raise CheckpointError(
        f"{fields.file}: architecture {architecture or 'none'!r} with model_type {model_type!r} is no "
        f"EAGLE-3 draft that slipstream reads. {_what_is_read()}"
    )


def _what_is_read() -> str:
    return f"It reads {', '.join(DRAFTS)}, and speculators_model_type {_LISTED}."


def _refuse_successors(fields: Fields) -> None:
    """Say what a draft is that slipstream does not run, or not here, and what to do instead."""
    if is_dflash(fields.values):
        raise CheckpointError(
            f"{fields.file}: is a DFlash draft, which slipstream serves (--draft) on one device; it is not split, "
            "rewritten, exchanged or trained on from. Give an EAGLE-3 draft of the target here, or train one "
            "(slipstream train TARGET --out DRAFT)."
        )
    named = [*fields.texts("architectures"), fields.text("speculators_model_type", ""), fields.text("model_type", "")]
    words = " ".join(named).lower().replace("-", "")
    words += " dflash" * fields.has("dflash_config")
    found = next((what for word, what in _SUCCESSORS.items() if word in words), None)
    if found is not None:
        raise CheckpointError(
            f"{fields.file}: is {found}; slipstream runs EAGLE-3, P-EAGLE and DFlash drafts. Give one of those for the "
            "target, train an EAGLE-3 draft (slipstream train TARGET --out DRAFT), or serve without (--draft ngram "
            "copies from the text)."
        )


def _mask_token(fields: Fields, vocab_size: int) -> int | None:
    """Return the token that stands for those not drafted yet; None for a draft that goes from token to token."""
    names = " ".join([*fields.texts("architectures"), fields.text("speculators_model_type", "")]).lower()
    found = [name for name in _MASK_FIELDS if fields.has(name)]
    if not found and "peagle" not in names and not fields.flag("parallel_drafting", False):
        return None
    if not found:
        raise fields.error(_MASK_FIELDS[0], "is missing: a P-EAGLE draft names the token of places not drafted yet.")
    return fields.integer(found[0], minimum=0, maximum=vocab_size - 1)


def _refuse_other_drafts(fields: Fields) -> None:
    if fields.flag("use_moe", False):  # as TorchSpec trains some for GLM-4.5 and Kimi-K2.5
        raise fields.error(
            "use_moe", "is true; slipstream runs drafts with a dense feed-forward part, not with experts."
        )
    eagle = fields.nested("eagle_config")
    for key, expected in _EAGLE_SWITCHES.items():
        if eagle.has(key) and eagle.values[key] != expected:
            raise eagle.error(
                key, f"is {shown(eagle.values[key])}; slipstream computes EAGLE-3 with {expected!r} only."
            )
    # Model Optimizer writes 1 for plain EAGLE-3; what is above are heads that each guess one token further.
    if eagle.values.get("parallel_draft_step") is not False and (steps := eagle.integer("parallel_draft_step", 1)) > 1:
        raise eagle.error(
            "parallel_draft_step", f"is {steps}: the draft has Medusa heads besides, and slipstream runs EAGLE-3 alone."
        )


def _num_features(fields: Fields, num_captured: int | None) -> int:
    count = fields.integer("num_aux_hidden_states", num_captured or 3, maximum=MOST_LAYERS)
    if num_captured is not None and count != num_captured:
        raise fields.error("num_aux_hidden_states", f"is {count}, but {num_captured} captured layers are named.")
    return count


def _feedback(fields: Fields) -> Literal["pre_norm", "post_norm"]:
    if not fields.flag("norm_output", False):
        return "pre_norm"
    if fields.has(OUR_BLOCK):  # written here, where there is one reading
        return "post_norm"
    log.info(
        "%s: norm_output is true, read as SGLang and vLLM do: a draft step hands on its normed hidden state. "
        "SpecForge's own training hands on the state before the norm; if this draft came from there and "
        "accepts little, set norm_output to false.",
        fields.file,
    )
    return "post_norm"


def _feature_norm(fields: Fields) -> Literal["none", "concat", "per_layer"]:
    eagle = fields.nested("eagle_config")
    per_layer = any(place.flag(key, False) for place in (fields, eagle) for key in ("fc_norm", "use_aux_norm"))
    concat = fields.flag("norm_before_fc", False) or eagle.flag("norm_before_fc", False)
    if per_layer and concat:
        raise fields.error("norm_before_fc", "is true together with 'fc_norm'; a draft has one or the other.")
    return "per_layer" if per_layer else "concat" if concat else "none"


def _sliding_window(block: Fields) -> int | None:
    """Return the draft's attention window: set, and not switched off by Qwen's flag or by the layer types."""
    kinds = set(block.texts("layer_types"))
    if len(kinds) > 1:
        raise block.error("layer_types", "mixes kinds of attention, which slipstream does not read in a draft.")
    windowed = kinds == {"sliding_attention"} if kinds else block.flag("use_sliding_window", True)
    return block.integer("sliding_window") if windowed and block.has("sliding_window") else None
