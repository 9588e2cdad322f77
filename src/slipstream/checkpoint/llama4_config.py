"""Read what Llama 4 says of itself beyond a Llama: chunks, blocks without positions, and tempered queries."""

from dataclasses import replace

from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.spec import BlockSpec, ModelSpec, Tempering

_CHUNK, _EVERY = 8192, 4  # transformers' values where a config has none


def with_llama4(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Return a spec whose blocks see a chunk and know positions, or see all keys and know none."""
    if spec.qkv_bias:
        raise fields.error("attention_bias", "is true; slipstream computes Llama 4's attention without biases.")
    chunk = fields.integer("attention_chunk_size", _CHUNK)
    rotates = _rotates(fields, spec.num_layers)
    kinds = fields.texts("layer_types")
    expected = tuple("chunked_attention" if rotated else "full_attention" for rotated in rotates)
    if kinds and kinds != expected:
        raise fields.error(
            "layer_types",
            "shows chunks to other blocks than those with positions ('no_rope_layers'), which is not read.",
        )
    # Scout's file says 4, as Meta's own code once counted blocks; transformers takes any number but 0 for true.
    key = "attn_temperature_tuning"
    counted = isinstance(fields.values.get(key), int) and not isinstance(fields.values[key], bool)
    tempered = fields.integer(key, minimum=0) > 0 if counted else fields.flag(key, True)
    return replace(
        spec,
        blocks=tuple(BlockSpec(spec.rope, chunk=chunk) if rotated else BlockSpec(None) for rotated in rotates),
        neighbours=True,
        unit_qk=fields.flag("use_qk_norm", True),
        tempering=Tempering(fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1))
        if tempered
        else None,
    )


def _rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return of each block whether it knows positions; the field's name says the opposite of its ones."""
    listed = fields.integers("no_rope_layers")
    if not listed:
        every = fields.integer("no_rope_layer_interval", _EVERY)
        return tuple(bool((index + 1) % every) for index in range(num_layers))
    if len(listed) < num_layers:
        raise fields.error("no_rope_layers", f"names {len(listed)} blocks, and num_hidden_layers is {num_layers}.")
    return tuple(bool(rotated) for rotated in listed[:num_layers])
