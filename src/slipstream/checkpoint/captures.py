"""Which target layers a draft captures: two conventions under one JSON key, and how they are told apart."""

import logging
from typing import Literal, NamedTuple

from slipstream.checkpoint.fields import Fields

log = logging.getLogger(__name__)

CaptureConvention = Literal["blocks_applied", "block_output"]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "capture_convention"
OUR_BLOCK = "slipstream"
_CONVENTIONS: tuple[CaptureConvention, ...] = ("blocks_applied", "block_output")


class Captures(NamedTuple):
    """Captured layers as the file spells them, the convention decided on, and why."""

    raw: tuple[int, ...]
    field: str
    convention: CaptureConvention
    reason: str

    @property
    def layers(self) -> tuple[int, ...]:
        """The canonical meaning: k = number of target blocks applied before the capture."""
        return canonical(self.raw, self.convention)


def canonical(ids: tuple[int, ...], convention: CaptureConvention) -> tuple[int, ...]:
    """Convert layer ids to k = blocks applied: the output of block i is the state after i + 1 blocks."""
    return tuple(i + 1 for i in ids) if convention == "block_output" else ids


def spelled(layers: tuple[int, ...], convention: CaptureConvention) -> list[int]:
    """Convert canonical layers to the ids a reader of the given convention expects."""
    return [k - 1 for k in layers] if convention == "block_output" else list(layers)


def read_captures(fields: Fields, speculators: bool, target_layers: int | None) -> Captures | None:
    """Return the captured layers a draft's config names, or None when it leaves them to the default.

    The ids mean one of two things: "block_output" (i = the output of block i, counted from 0; SpecForge, SGLang,
    NVIDIA, DeepSpec) or "blocks_applied" (k = the state after k blocks; speculators, vLLM). Decided by the first rule
    that applies:

    1. `slipstream.captured_layers`, our own block, is blocks_applied; an explicit `capture_convention` field wins
       over everything that follows.
    2. speculators' dialect is blocks_applied; `target_layer_ids` (DeepSpec) is block_output.
    3. An id equal to the target's number of layers can only be blocks_applied.
    4. First id 1 is block_output, first id 2 is blocks_applied: both are the default "second block" of their world.
    5. Otherwise ids inside `eagle_config` are block_output (SpecForge, NVIDIA), ids at the top level blocks_applied
       (vLLM); as this is a guess, it is logged as a warning.
    """
    ours = fields.nested(OUR_BLOCK)
    if ours.has("captured_layers"):
        raw = _named(ours, "captured_layers")
        captures = Captures(raw, ours.name("captured_layers"), "blocks_applied", "it is our own field")
        return _checked(ours, "captured_layers", captures, target_layers)
    eagle = fields.nested("eagle_config")
    found = [
        (place, key)
        for place, key in (
            (fields, LAYER_IDS),
            (eagle, LAYER_IDS),
            (eagle, "layer_ids"),
            (fields, "target_layer_ids"),
        )
        if place.has(key)
    ]
    if not found:
        return None
    place, key = found[0]
    for other, other_key in found[1:]:
        if other.integers(other_key) != place.integers(key):
            raise place.error(
                key,
                f"is {list(place.integers(key))}, but {other.name(other_key)!r} is "
                f"{list(other.integers(other_key))}; make them agree.",
            )
    raw = _named(place, key)
    decided = _stated(fields, eagle)
    if decided is None and speculators:
        decided = "blocks_applied", "the speculators dialect means that"
    if decided is None and key == "target_layer_ids":
        decided = "block_output", "target_layer_ids means that"
    if decided is None:
        decided = _told_by_ids(raw, target_layers) or _guess(fields, raw, at_top=place is fields)
    captures = Captures(raw, place.name(key), *decided)
    log.info(
        "%s: %s = %s read as %s because %s; captured after %s blocks (the other reading: %s)",
        fields.file,
        captures.field,
        list(raw),
        captures.convention,
        captures.reason,
        list(captures.layers),
        list(canonical(raw, "block_output" if captures.convention == "blocks_applied" else "blocks_applied")),
    )
    return _checked(place, key, captures, target_layers)


def stated_captures(
    place: Fields, key: str, convention: CaptureConvention, target_layers: int | None, reason: str
) -> Captures:
    """Return the captured layers of a field whose convention is known."""
    return _checked(place, key, Captures(_named(place, key), place.name(key), convention, reason), target_layers)


def _named(place: Fields, key: str) -> tuple[int, ...]:
    raw = place.integers(key)
    if not raw:
        raise place.error(key, "is an empty list; leave it out for the default layers.")
    return raw


def _stated(fields: Fields, eagle: Fields) -> tuple[CaptureConvention, str] | None:
    place = fields if fields.has(CONVENTION) else eagle
    if not place.has(CONVENTION):
        return None
    value = place.text(CONVENTION)
    for convention in _CONVENTIONS:
        if value == convention:
            return convention, f"{place.name(CONVENTION)} says so"
    raise place.error(CONVENTION, f"is {value!r}; it can be {' or '.join(_CONVENTIONS)}.")


def _told_by_ids(raw: tuple[int, ...], target_layers: int | None) -> tuple[CaptureConvention, str] | None:
    if target_layers is not None and max(raw) == target_layers:
        return "blocks_applied", f"id {target_layers} is the target's number of layers"
    if raw[0] in (1, 2):
        return ("block_output" if raw[0] == 1 else "blocks_applied"), f"the first id is {raw[0]}"
    return None


def _guess(fields: Fields, raw: tuple[int, ...], at_top: bool) -> tuple[CaptureConvention, str]:
    guess: CaptureConvention = "blocks_applied" if at_top else "block_output"
    log.warning(
        "%s: captured layers %s do not tell their convention; taken as %s because of where they stand. "
        "Write %r into the file to settle it.",
        fields.file,
        list(raw),
        guess,
        CONVENTION,
    )
    return guess, "of where the field stands (a guess)"


def _checked(place: Fields, key: str, captures: Captures, target_layers: int | None) -> Captures:
    layers = captures.layers
    if min(layers) < 0 or (target_layers is not None and max(layers) > target_layers):
        limit = "any target" if target_layers is None else f"a target of {target_layers} layers"
        raise place.error(
            key,
            f"is {list(captures.raw)}, that is the states after {list(layers)} blocks, which {limit} does not have.",
        )
    return captures
