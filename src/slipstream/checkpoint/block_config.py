"""Read what the blocks of a model have of their own: over how many keys each attends, and how it turns positions."""

from slipstream.checkpoint.families import Family
from slipstream.checkpoint.fields import MOST_LAYERS, Fields
from slipstream.checkpoint.spec import BlockSpec, RopeSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_blocks(fields: Fields, family: Family, rope: RopeSpec) -> tuple[BlockSpec, ...]:
    """Return each block's own; nothing where a family's blocks are all alike."""
    if family.window != "layers":
        return ()
    window = fields.integer("sliding_window")
    return tuple(BlockSpec(rope, window if kind == _SLIDING else None) for kind in _kinds(fields, family))


def _kinds(fields: Fields, family: Family) -> tuple[str, ...]:
    """Return the kind of attention of each block, from the config's list or by the family's pattern."""
    num_layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = fields.texts("layer_types")
    if not kinds:
        return tuple(_SLIDING if (index + 1) % family.full_every else _FULL for index in range(num_layers))
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"names {len(kinds)} blocks, and num_hidden_layers is {num_layers}.")
    if other := next((kind for kind in kinds if kind not in (_SLIDING, _FULL)), None):
        raise fields.error("layer_types", f"names {other!r}; slipstream reads {_SLIDING!r} and {_FULL!r}.")
    return kinds
