"""Rotary embedding settings between config.json and RopeSpec, in transformers 4's spelling and 5's."""

import math
from typing import Any

from slipstream.checkpoint.families import FAMILIES, Family
from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.files import shown
from slipstream.checkpoint.spec import RopeScaling, RopeSpec

_LLAMA = FAMILIES["LlamaForCausalLM"]
_SCALINGS: dict[str, RopeScaling] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",
    "su": "longrope",  # as Phi-3's first files call it
    "mrope": "none",  # positions in pictures; those of text are the same in every section
}


def read_rope(fields: Fields, head_dim: int, max_position: int, family: Family = _LLAMA) -> RopeSpec:
    """Return the rotary settings of a config; what it does not say is as the family has it.

    `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (transformers 4) may both be there, as
    exporters write both so that either reader is right; when they disagree, neither can be trusted.
    """
    new, old = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    block = new if new.values else old
    if any(isinstance(value, dict) for value in block.values.values()):
        raise fields.error("rope_parameters", "differs by layer type, which slipstream does not read.")
    theta = _theta(fields, new, old, family.theta)
    kind = _kind(block)
    if new.values and old.values and (_kind(new), _factor(new)) != (_kind(old), _factor(old)):
        raise fields.error(
            "rope_parameters",
            f"is {shown(dict(new.values))}, but 'rope_scaling' is {shown(dict(old.values))}; make them agree.",
        )
    if kind == "proportional":  # turns the first pairs of whole heads, as slowly as if it turned all
        share = block.number("partial_rotary_factor", 1.0)
        turning = int(share * head_dim // 2)
        if head_dim % 2 or share > 1:
            raise block.error("partial_rotary_factor", f"is {share:g} of a head's {head_dim} numbers, which are pairs.")
        return RopeSpec(theta, head_dim, kind, block.number("factor", 1.0), turning=turning)
    rotary_dim = _rotary_dim(fields, block, head_dim, family.partial_rotary)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.error(
            "rotary_dim",
            f"or 'partial_rotary_factor' rotates {rotary_dim} of a head's {head_dim} numbers: pairs of "
            "them are rotated, at most all.",
        )
    if kind == "none":
        return RopeSpec(theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, "linear", block.number("factor"))
    if kind == "llama3":
        if block.number("high_freq_factor") < block.number("low_freq_factor"):
            raise block.error("high_freq_factor", "is below 'low_freq_factor'.")
        return RopeSpec(
            theta,
            rotary_dim,
            "llama3",
            factor=block.number("factor"),
            original_max_position=block.integer("original_max_position_embeddings", max_position),
            low_freq_factor=block.number("low_freq_factor"),
            high_freq_factor=block.number("high_freq_factor"),
        )
    if kind == "longrope":
        return _read_longrope(fields, block, theta, rotary_dim, max_position)
    return _read_yarn(block, theta, rotary_dim, max_position)


def yarn_score_factor(fields: Fields) -> float:
    """Return what DeepSeek's latent attention multiplies its scores by when YaRN stretches the context."""
    new, old = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    block = new if new.values else old
    if _kind(block) == "none" or not block.values.get("mscale_all_dim"):
        return 1.0
    return _yarn_scale(block.number("factor"), block.number("mscale_all_dim")) ** 2


def write_rope(rope: RopeSpec, head_dim: int) -> dict[str, Any]:
    """Return the config.json fields of a RopeSpec, in both spellings so that no reader takes its default."""
    scaling: dict[str, Any] = {}
    if rope.scaling == "linear":
        scaling = {"factor": rope.factor}
    elif rope.scaling == "llama3":
        scaling = {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    elif rope.scaling == "yarn":
        scaling = {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
        if not rope.truncate:
            scaling["truncate"] = False
    elif rope.scaling == "longrope":
        scaling = {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "short_factor": list(rope.divisors),
            "long_factor": list(rope.long_divisors),
            "attention_factor": rope.attention_factor,
        }
    assert rope.scaling != "proportional", "no draft has it"
    kind = "default" if rope.scaling == "none" else rope.scaling
    result: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **scaling},
    }
    if rope.rotary_dim != head_dim:
        result["partial_rotary_factor"] = rope.rotary_dim / head_dim
        result["rope_parameters"]["partial_rotary_factor"] = rope.rotary_dim / head_dim
    return result


def _theta(fields: Fields, new: Fields, old: Fields, default: float) -> float:
    found = {
        place.name("rope_theta"): place.number("rope_theta") for place in (new, old, fields) if place.has("rope_theta")
    }
    if len(set(found.values())) > 1:
        spelled = ", ".join(f"{name} = {value:g}" for name, value in found.items())
        raise fields.error("rope_theta", f"is given twice with different values: {spelled}.")
    theta = next(iter(found.values()), default)
    if theta <= 1:
        raise fields.error(
            "rope_theta", f"is {theta:g}; waves grow longer from one pair to the next, so it is above 1."
        )
    return theta


def _rotary_dim(fields: Fields, block: Fields, head_dim: int, default_share: float) -> int:
    """Return how much of a head is rotated: a share of it or, in MiniMax's files, a number."""
    partial = block if block.has("partial_rotary_factor") else fields
    if not partial.has("partial_rotary_factor"):
        return fields.integer("rotary_dim", int(head_dim * default_share))
    rotary_dim = int(head_dim * partial.number("partial_rotary_factor"))
    if fields.integer("rotary_dim", rotary_dim) != rotary_dim:
        raise fields.error("rotary_dim", f"disagrees with partial_rotary_factor, by which it is {rotary_dim}.")
    return rotary_dim


def _kind(block: Fields) -> RopeScaling:
    key = "rope_type" if block.has("rope_type") else "type"
    name = block.text(key, "default")
    if name not in _SCALINGS:
        raise block.error(key, f"is {name!r}, which slipstream cannot read. It reads {', '.join(sorted(_SCALINGS))}.")
    return _SCALINGS[name]


def _factor(block: Fields) -> float:
    return block.number("factor", 1.0)


def _read_yarn(block: Fields, theta: float, rotary_dim: int, max_position: int) -> RopeSpec:
    original = block.integer("original_max_position_embeddings", max_position)
    factor = block.number("factor", max_position / original)
    if block.has("attention_factor"):
        attention_factor = block.number("attention_factor")
    elif block.values.get("mscale") and block.values.get("mscale_all_dim"):
        attention_factor = _yarn_scale(factor, block.number("mscale")) / _yarn_scale(
            factor, block.number("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeSpec(
        theta,
        rotary_dim,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=block.number("beta_fast", 32.0),
        beta_slow=block.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=block.flag("truncate", True),
    )


def _read_longrope(fields: Fields, block: Fields, theta: float, rotary_dim: int, max_position: int) -> RopeSpec:
    """Phi's own: each pair has a divisor for short contexts and one for long ones."""
    place = block if block.has("original_max_position_embeddings") else fields
    original = place.integer("original_max_position_embeddings", max_position, minimum=2)
    factor = block.number("factor", max_position / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors, long_divisors = (block.numbers(key) for key in ("short_factor", "long_factor"))
    for key, given in (("short_factor", divisors), ("long_factor", long_divisors)):
        if len(given) != rotary_dim // 2:
            raise block.error(key, f"has {len(given)} numbers where each of {rotary_dim // 2} rotary pairs needs one.")
    return RopeSpec(
        theta,
        rotary_dim,
        "longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=block.number("attention_factor", scale),
        divisors=divisors,
        long_divisors=long_divisors,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
