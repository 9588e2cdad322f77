"""Read what the blocks of a model have of their own: over how many keys each attends, and how it turns positions."""

from typing import Any, NamedTuple

from slipstream.checkpoint.families import Family
from slipstream.checkpoint.fields import MOST_LAYERS, Fields
from slipstream.checkpoint.rope import read_rope
from slipstream.checkpoint.spec import BlockSpec, RopeSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"


class Ropes(NamedTuple):
    """The rotary positions of blocks that see all keys, and of those that see a window; mostly the same."""

    full: RopeSpec
    sliding: RopeSpec


def read_ropes(fields: Fields, head_dims: tuple[int, int], max_position: int, family: Family) -> Ropes:
    """Return the rotary settings of both kinds of blocks, whose heads have these widths.

    Transformers 5 nests them by kind; older files say `rope_theta` and `rope_scaling` of the one and
    `rope_local_base_freq` of the other.
    """
    if family.local_theta is None:
        rope = read_rope(fields, head_dims[0], max_position, family)
        return Ropes(rope, rope)
    full: dict[str, Any]
    sliding: dict[str, Any]
    nested = fields.nested("rope_parameters")
    kept = {key: value for key, value in fields.values.items() if key != "rope_parameters"}
    if nested.has(_FULL) or nested.has(_SLIDING):
        blocks = [nested.nested(kind).values for kind in (_FULL, _SLIDING)]
        thetas = (family.theta, family.local_theta)
        full, sliding = (
            {"rope_parameters": {"rope_theta": theta, **block}} for theta, block in zip(thetas, blocks, strict=True)
        )
    else:
        full, sliding = dict(kept), {"rope_theta": fields.number("rope_local_base_freq", family.local_theta)}
        if family.full_rope:
            full["rope_parameters"] = dict(family.full_rope)
    both = zip((full, sliding), head_dims, strict=True)
    return Ropes(*(read_rope(Fields(values, fields.file), width, max_position, family) for values, width in both))


def read_blocks(
    fields: Fields, family: Family, ropes: Ropes, full_heads: tuple[int, int] | None
) -> tuple[BlockSpec, ...]:
    """Return each block's own; nothing where a family's blocks are all alike.

    Args:
        full_heads: the width and number of key heads of blocks that see all keys; None for the model's.
    """
    if family.window != "layers":
        return ()
    shared = family.gemma == 4 and fields.flag("attention_k_eq_v", False)
    full = BlockSpec(ropes.full, heads=full_heads, keys_as_values=shared)
    sliding = BlockSpec(ropes.sliding, fields.integer("sliding_window"))
    return tuple(sliding if kind == _SLIDING else full for kind in _kinds(fields, family))


def _kinds(fields: Fields, family: Family) -> tuple[str, ...]:
    """Return the kind of attention of each block, from the config's list or by the family's pattern."""
    num_layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = fields.texts("layer_types")
    if not kinds:
        every = fields.integer("sliding_window_pattern", family.full_every)
        kinds = tuple(_SLIDING if (index + 1) % every else _FULL for index in range(num_layers))
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"names {len(kinds)} blocks, and num_hidden_layers is {num_layers}.")
    if other := next((kind for kind in kinds if kind not in (_SLIDING, _FULL)), None):
        raise fields.error("layer_types", f"names {other!r}; slipstream reads {_SLIDING!r} and {_FULL!r}.")
    return (*kinds[:-1], _FULL) if family.gemma == 4 else kinds  # as transformers has it, whatever the file says
