"""Whether a checkpoint can be split as asked, told from its headers before a rank is started; and how it can be."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.joined import taken_apart
from slipstream.checkpoint.names import canonical_draft_name, canonical_names, canonical_target_name
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.spec import ModelSpec
from slipstream.errors import ConfigError
from slipstream.kernels import Ops
from slipstream.models.accounting import Place, places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.packing import checkpoint_modules, packed_source
from slipstream.models.parallel import Ranks
from slipstream.models.target import Target
from slipstream.models.topology import Topology

_MOST_RANKS = 64


def check_target_split(source: TensorSource, topology: Topology, ops: Ops | None) -> None:
    """Raise ConfigError, with the splits that would do, unless a target can be split so.

    Args:
        ops: the kernels its packed weights are kept for; None where they are expanded.
    """
    if topology.tp == 1 and topology.ep == 1:
        return
    spec = model_spec(source.config, source.folder)
    source = taken_apart(source, spec)
    try:
        _check_target(source, spec, topology, ops)
    except ConfigError as error:
        raise ConfigError(f"{error} {_advice(source, spec, topology, ops)}") from error


def check_draft_split(source: TensorSource, target: ModelSpec, topology: Topology, ops: Ops | None) -> None:
    """Raise ConfigError unless a draft can be split as it is to be."""
    if topology.draft_tp == 1:
        return
    spec = draft_spec(source.config, source.folder, target.num_layers)
    try:
        topology.check_draft(spec)
        with torch.device("meta"):
            wanted = places(Eagle3Draft(spec, 1, Ranks(0, topology.tp)))
        _check_cuts(source, canonical_names(source.names(), canonical_draft_name), wanted, ops)
    except ConfigError as error:
        raise ConfigError(f"{error} Keep the draft whole, on the first rank (--draft-tp 1).") from error


def _check_target(source: TensorSource, spec: ModelSpec, topology: Topology, ops: Ops | None) -> None:
    topology.check(spec)
    with torch.device("meta"):
        found = places(Target(spec, 1, Ranks(0, topology.tp, topology.ep)))
    wanted = {name if name.startswith("lm_head.") else f"model.{name}": place for name, place in found.items()}
    rename = partial(canonical_target_name, norms_around=spec.norms_around)
    _check_cuts(source, canonical_names(source.names(), rename), wanted, ops)


def _check_cuts(source: TensorSource, names: dict[str, str], wanted: dict[str, Place], ops: Ops | None) -> None:
    """Look at the first rank's part of every packed weight: shares are even, so all cuts fall as its own does."""
    packs = packed_source(source, ops)
    if packs is None:
        return
    modules = checkpoint_modules(names)
    for name, place in wanted.items():
        module = modules.get(name.removesuffix(".weight"))
        if module is None or not name.endswith(".weight") or len(place.window) != 2 or place.expert not in (None, 0):
            continue
        if not place.is_elsewhere and packs.stored(module, place.shape) is not None:
            packs.check_cut(module, *place.window)


def _advice(source: TensorSource, spec: ModelSpec, asked: Topology, ops: Ops | None) -> str:
    possible = [f"--tp {split.tp}" + (f" --ep {split.ep}" if split.ep > 1 else "") for split in _others(spec, asked)
                if _fits(source, spec, split, ops)]  # fmt: skip
    if not possible:
        return "It cannot be split over any number of ranks: leave --tp out."
    return f"It can be split with {' or '.join(possible[:6])}, or not at all (leave --tp out)."


def _others(spec: ModelSpec, asked: Topology) -> Iterator[Topology]:
    """Yield splits in the order of preference: as many experts' groups as asked for, then whole experts."""
    ranks = sorted((n for n in range(2, _MOST_RANKS + 1) if spec.num_heads % n == 0), key=lambda n: abs(n - asked.tp))
    for tp in ranks:
        groups = dict.fromkeys([asked.ep, 1, tp]) if spec.moe is not None else [1]
        for ep in groups:
            if tp % ep == 0:
                yield dataclasses.replace(asked, tp=tp, ep=ep, draft_tp=tp if asked.draft_tp > 1 else 1)


def _fits(source: TensorSource, spec: ModelSpec, topology: Topology, ops: Ops | None) -> bool:
    try:
        _check_target(source, spec, topology, ops)
    except ConfigError:
        return False
    return True
