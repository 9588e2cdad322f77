"""Read a DFlash draft's config.json, as its authors (z-lab) or speculators write it, into one BlockDraftSpec.

The facts of the format are those of z-lab/dflash (MIT) and of vLLM, which reads both dialects.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.checkpoint.captures import LAYER_IDS, Captures, stated_captures
from slipstream.checkpoint.draft_config import DFLASH, with_left_out
from slipstream.checkpoint.families import FAMILIES
from slipstream.checkpoint.fields import MOST_LAYERS, WIDEST_HEAD, Fields, check_activation, config_file, dtype_name
from slipstream.checkpoint.files import shown
from slipstream.checkpoint.rope import read_rope
from slipstream.checkpoint.spec import BlockDraftSpec

_MOST_TOKENS = 1024  # of a block; the published ones have 8 to 16
_SLIDING, _FULL = "sliding_attention", "full_attention"
# What `dflash_config` may switch, and the one value for which the draft is the one slipstream computes.
_SWITCHES = {
    "projector_type": "dflash",
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "fc_layernorm": False,
}
_READ = ("mask_token_id", "target_layer_ids", "block_size", "causal")
_OF_TRAINING = ("num_anchors", "loss_decay_gamma")
# Likewise at the top.
_TOP_SWITCHES = {"sample_from_anchor": False, "is_neox_style": True, "add_swa_attention_sink_bias": False}


def dflash_spec(config: Mapping[str, Any], source: Path, target_layers: int | None) -> BlockDraftSpec:
    """Read a DFlash draft's config.json (already parsed); `target_layers` bounds the captured layers."""
    return read_dflash(config, source, target_layers)[0]


def read_dflash(config: Mapping[str, Any], source: Path, target_layers: int | None) -> tuple[BlockDraftSpec, Captures]:
    """Read a DFlash draft's config.json, and tell how its captured layers were read."""
    fields = Fields(config, config_file(source))
    speculators = fields.has("speculators_model_type")
    block = with_left_out(fields.nested("transformer_layer_config"), "qwen3") if speculators else fields
    own = fields if speculators else fields.nested("dflash_config")
    _refuse_variants(fields, block)
    hidden_size, num_heads = block.integer("hidden_size"), block.integer("num_attention_heads")
    head_dim = block.integer("head_dim", hidden_size // num_heads, maximum=WIDEST_HEAD)
    num_kv_heads = block.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise block.error("num_attention_heads", f"is {num_heads}, no multiple of {num_kv_heads} key heads.")
    vocab_size, max_position = block.integer("vocab_size"), block.integer("max_position_embeddings")
    windows, causal = _attention(fields, block, speculators)
    captures = _captures(fields, speculators, target_layers)
    spec = BlockDraftSpec(
        architecture=DFLASH,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        hidden_size=hidden_size,
        target_hidden_size=fields.integer("target_hidden_size", hidden_size),
        intermediate_size=block.integer("intermediate_size"),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=block.number("rms_norm_eps", 1e-6),
        rope=read_rope(block, head_dim, max_position, FAMILIES["Qwen3ForCausalLM"]),
        max_position=max_position,
        block_size=block_size(config, source),
        mask_token_id=own.integer("mask_token_id", minimum=0, maximum=vocab_size - 1),
        captured_layers=captures.layers,
        windows=windows,
        causal=causal,
        attention_bias=block.flag("attention_bias", False),
        target_layers=fields.integer("num_target_layers") if fields.has("num_target_layers") else None,
        dtype=dtype_name(fields if fields.has("dtype") or fields.has("torch_dtype") else block, "bfloat16"),
    )
    return spec, captures


def block_size(config: Mapping[str, Any], source: Path) -> int:
    """Return how many tokens a block has, the known one included: written at the top or in `dflash_config`."""
    fields = Fields(config, config_file(source))
    nested = fields.nested("dflash_config")
    place = nested if nested.has("block_size") and not fields.has("block_size") else fields
    return place.integer("block_size", minimum=2, maximum=_MOST_TOKENS)


def _captures(fields: Fields, speculators: bool, target_layers: int | None) -> Captures:
    """Return the captured layers: the authors name blocks whose output they are, from 0; speculators counts blocks."""
    if speculators:
        key = "aux_hidden_state_layer_ids"
        return stated_captures(fields, key, "blocks_applied", target_layers, "the speculators dialect means that")
    named = fields.nested("dflash_config")
    captures = stated_captures(named, "target_layer_ids", "block_output", target_layers, "DFlash means that")
    if fields.has(LAYER_IDS) and fields.integers(LAYER_IDS) != captures.layers:  # what some tools add for vLLM
        raise fields.error(
            LAYER_IDS,
            f"is {list(fields.integers(LAYER_IDS))}, but 'dflash_config.target_layer_ids' means the states after "
            f"{list(captures.layers)} blocks; make them agree.",
        )
    return captures


def _attention(fields: Fields, block: Fields, speculators: bool) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's window, and whether its tokens see only those of the block before them.

    Unless the file says otherwise, layers with a window are causal and the others are not, as vLLM reads it.
    """
    num_layers = block.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = block.texts("layer_types")
    if not kinds and block.flag("use_sliding_window", False):
        raise block.error("layer_types", "is missing, and 'use_sliding_window' says that some layers have a window.")
    kinds = kinds or (_FULL,) * num_layers
    if len(kinds) != num_layers or not set(kinds) <= {_SLIDING, _FULL}:
        raise block.error(
            "layer_types", f"is {shown(list(kinds))}; it names {num_layers} layers, each {_FULL} or {_SLIDING}."
        )
    windows = tuple(block.integer("sliding_window") if kind == _SLIDING else None for kind in kinds)
    causal = tuple(_causal(fields, kind, speculators) for kind in kinds)
    if any(window is not None and not after for window, after in zip(windows, causal, strict=True)):
        raise block.error(
            "layer_types", "has layers with a window whose tokens see those after them, which slipstream does not run."
        )
    return windows, causal


def _causal(fields: Fields, kind: str, speculators: bool) -> bool:
    if speculators:  # as they are trained: layers without a window always see the whole block
        return kind == _SLIDING and not fields.flag("sliding_window_non_causal", False)
    place, key = (fields, "is_causal") if fields.has("is_causal") else (fields.nested("dflash_config"), "causal")
    return place.flag(key, kind == _SLIDING)


def _refuse_variants(fields: Fields, block: Fields) -> None:
    """Refuse what would be computed in another way, fields that are not known included."""
    check_activation(block)
    if (kind := block.text("model_type", "qwen3")) != "qwen3":
        raise block.error("model_type", f"is {kind!r}; slipstream reads DFlash drafts of qwen3 blocks.")
    if fields.has("logit_scale") and fields.number("logit_scale") != 1:
        raise fields.error("logit_scale", "is not 1; slipstream reads DFlash drafts without it.")
    own = fields.nested("dflash_config")
    for place, switches in ((own, _SWITCHES), (fields, _TOP_SWITCHES)):
        for key, expected in switches.items():
            if place.has(key) and place.values[key] != expected:
                raise place.error(
                    key, f"is {shown(place.values[key])}; slipstream computes DFlash with {expected!r} only."
                )
    for key, value in own.values.items():
        if value is not None and key not in (*_SWITCHES, *_READ, *_OF_TRAINING):
            raise own.error(
                str(key)[:80],
                "is not known here; it may be of a draft that follows DFlash, or change what it computes.",
            )
