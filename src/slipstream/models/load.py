"""Build a target or a draft from a checkpoint; every tensor is accounted for, and a draft must fit its target."""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.dflash_config import dflash_spec
from slipstream.checkpoint.joined import taken_apart
from slipstream.checkpoint.known_targets import targets_of
from slipstream.checkpoint.names import (
    canonical_draft_name,
    canonical_names,
    canonical_target_name,
    left_out_of_target,
)
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec, ModelSpec
from slipstream.errors import CheckpointError, ConfigError, DraftMismatchError
from slipstream.kernels import Ops
from slipstream.models.accounting import places
from slipstream.models.block_draft import BlockDraft
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.fill import Filler
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.target import Target

_log = logging.getLogger(__name__)


def load_target(
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    ops: Ops | None = None,
    ranks: Ranks = ALONE,
    max_context: int | None = None,
) -> Target:
    """Read a target, or the part of it that one rank holds.

    Args:
        dtype: of the weights that are stored dense.
        max_position: bounds the rotary table (default: what the model allows).
        ops: the kernels packed weights are laid out for; without them a GGUF's blocks are expanded to `dtype`.
        max_context: the longest text there may be, by which some ropes are chosen (default: as many as positions).
    """
    spec = model_spec(source.config, source.folder)
    spec = replace(spec, rope=spec.rope.at_context(max_context or max_position or spec.max_position))
    source = taken_apart(source, spec)
    _check_counts(source, spec)
    with torch.device("meta"):
        model = Target(spec, max_position, ranks)
    _fill_target(model, _target_names(source, spec), _Reading(source, dtype, device, ops))
    return model.eval()


def load_ends(source: TensorSource, dtype: torch.dtype, device: torch.device, max_position: int) -> Target:
    """Read a target's table, last norm and head: all that training needs where its states come from elsewhere."""
    spec = model_spec(source.config, source.folder)
    spec = replace(spec, rope=spec.rope.at_context(max_position))
    source = taken_apart(source, spec)
    with torch.device("meta"):
        model = Target(spec, max_position)
    model.layers = torch.nn.ModuleList()
    names = {name: stored for name, stored in _target_names(source, spec).items() if ".layers." not in name}
    _fill_target(model, names, _Reading(source, dtype, device, None))
    return model.eval()


@dataclass(frozen=True)
class _Reading:
    """Where weights come from, in which precision, and where they go."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    ops: Ops | None


def _target_names(source: TensorSource, spec: ModelSpec) -> dict[str, str]:
    rename = partial(canonical_target_name, norms_around=spec.norms_around)
    return canonical_names(_text_part(source, spec), rename)


def _fill_target(model: Target, names: dict[str, str], reading: _Reading) -> None:
    spec, ranks, source = model.spec, model.ranks, reading.source
    wanted = {name if name.startswith("lm_head.") else f"model.{name}": place for name, place in places(model).items()}
    shares_table = spec.tie_embeddings and ranks.size == 1
    if spec.tie_embeddings:
        _check_tied_head(source, names)
    if shares_table:
        wanted.pop("lm_head.weight")
    elif spec.tie_embeddings:  # a rank's head is part of the table, and laid out for the kernels on its own
        names["lm_head.weight"] = names["model.embed_tokens.weight"]
    Filler(source, names, reading.ops, reading.dtype, reading.device).fill(model, wanted)
    if shares_table:
        model.lm_head.weight, model.lm_head.packed = model.embed_tokens.weight, model.embed_tokens.packed


def load_draft(
    source: TensorSource,
    target: Target,
    dtype: torch.dtype,
    max_position: int | None = None,
    ops: Ops | None = None,
    split: bool = False,
) -> Eagle3Draft:
    """Read an EAGLE-3 draft for a target; what the draft leaves out (embedding, full-size head) is the target's.

    Args:
        split: hold this rank's part of the draft, as the target holds its own; otherwise the whole draft.
    """
    ranks = target.ranks if split else ALONE
    spec = draft_spec(source.config, source.folder, target.spec.num_layers)
    check_pair(spec, target.spec, str(source.folder))
    _check_counts(source, spec)
    with torch.device("meta"):
        draft = Eagle3Draft(spec, max_position, ranks)
    device = target.embed_tokens.device
    names = canonical_names(source.names(), canonical_draft_name)
    wanted = places(draft)
    shares_embedding = "embed_tokens.weight" not in names and spec.hidden_size == target.spec.hidden_size
    shares_head = "lm_head.weight" not in names and spec.draft_vocab_size == spec.vocab_size
    if shares_embedding:
        wanted.pop("embed_tokens.weight")
        draft.share_embedding(target.embed_tokens)
    if shares_head:
        _check_shared_head(source, target.ranks, ranks)
        wanted.pop("lm_head.weight")
        draft.lm_head = target.lm_head
    token_ids_V = _draft_tokens(source, names, spec)
    mask_features_C = _mask_features(source, names, spec)
    Filler(source, names, ops, dtype, device, small=True).fill(draft, wanted)
    draft.token_ids_V = token_ids_V.to(device)
    draft.mask_features_C = None if mask_features_C is None else mask_features_C.to(device, dtype)
    return draft.eval()


def load_block_draft(
    source: TensorSource, target: Target, dtype: torch.dtype, max_position: int | None = None, ops: Ops | None = None
) -> BlockDraft:
    """Read a DFlash draft for a target, whose table of embeddings and head it uses unless it has its own."""
    spec = dflash_spec(source.config, source.folder, target.spec.num_layers)
    check_pair(spec, target.spec, str(source.folder))
    _check_counts(source, spec)
    if (source.folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{source.folder}: keeps an embedding of its mask token apart, in mask_embedding.pt, which slipstream does "
            "not read. Give a DFlash draft whose mask is a token of the target's table."
        )
    with torch.device("meta"):
        draft = BlockDraft(spec, max_position)
    names = canonical_names(source.names(), canonical_draft_name)
    wanted = places(draft)
    if "embed_tokens.weight" not in names and spec.hidden_size == target.spec.hidden_size:
        wanted.pop("embed_tokens.weight")
        draft.embed_tokens = target.embed_tokens
    if "lm_head.weight" not in names and spec.draft_vocab_size == spec.vocab_size:
        wanted.pop("lm_head.weight")
        draft.lm_head = target.lm_head
    token_ids_V = _draft_tokens(source, names, spec)
    Filler(source, names, ops, dtype, target.embed_tokens.device, small=True).fill(draft, wanted)
    draft.token_ids_V = token_ids_V.to(target.embed_tokens.device)
    return draft.eval()


def _check_counts(source: TensorSource, spec: ModelSpec | DraftSpec | BlockDraftSpec) -> None:
    """Raise CheckpointError if a config speaks of more layers or experts than there are tensors: none is built."""
    moe = spec.moe if isinstance(spec, ModelSpec) else None
    stacks = 0 if moe is None else moe.num_experts * max(spec.num_layers - len(moe.dense_layers), 0)
    features = spec.num_features if isinstance(spec, DraftSpec) and spec.feature_norm == "per_layer" else 0
    if (least := spec.num_layers + stacks + features) > (number := len(source.names())):
        raise CheckpointError(
            f"{source.folder}: config.json describes {spec.num_layers} layers"
            + (f" with {moe.num_experts} experts each" if moe is not None else "")
            + f", {least} tensors at the least, and the checkpoint has {number}; fetch both again."
        )


def captured_layers(draft: DraftSpec | BlockDraftSpec, target: ModelSpec) -> tuple[int, ...]:
    """Return the target states a draft wants, by default those EAGLE-3 captures."""
    return draft.captured_layers or target.default_captured_layers()


def check_pair(draft: DraftSpec | BlockDraftSpec, target: ModelSpec, where: str) -> None:
    """Raise DraftMismatchError if a draft cannot belong to a target, naming both values."""
    layers = captured_layers(draft, target)
    same_sizes = "; ".join(targets_of(draft))
    another = f"it was trained for another target{f' (it has the sizes of {same_sizes})' if same_sizes else ''}."
    for what, theirs, ours in (
        ("hidden size of its target", draft.target_hidden_size, target.hidden_size),
        ("vocabulary size", draft.vocab_size, target.vocab_size),
        ("number of captured layers", draft.num_features, len(layers)),
    ):
        if theirs != ours:
            raise DraftMismatchError(f"{where}: the draft's {what} is {theirs}, the target's is {ours}; {another}")
    told = draft.target_layers if isinstance(draft, BlockDraftSpec) else None
    if told not in (None, target.num_layers):
        raise DraftMismatchError(
            f"{where}: the draft is for a target of {told} layers, not {target.num_layers}; {another}"
        )
    if not all(0 <= k <= target.num_layers for k in layers):
        raise DraftMismatchError(
            f"{where}: the draft captures layers {list(layers)}, the target has {target.num_layers} layers; {another}"
        )


def _check_shared_head(source: TensorSource, target: Ranks, draft: Ranks) -> None:
    if target.size != draft.size:
        raise ConfigError(
            f"{source.folder}: the draft has no head of its own and uses the target's, of which each of the "
            f"{target.size} ranks holds a part. Split the draft as well (draft_tp {target.size})."
        )


def _text_part(source: TensorSource, spec: ModelSpec) -> list[str]:
    """Return the names of the tensors a target is made of; say once what else the checkpoint holds."""
    kept, left_out = [], dict[str, list[str]]()
    for name in source.names():
        what = left_out_of_target(name, spec)
        if what is None:
            kept.append(name)
        else:
            left_out.setdefault(what, []).append(name)
    for what, names in left_out.items():
        megabytes = sum(source.info(name).nbytes for name in names) / 1e6
        _log.warning("%s: %s left out (%d tensors, %.0f MB).", source.folder, what, len(names), megabytes)
    return kept


def _check_tied_head(source: TensorSource, names: dict[str, str]) -> None:
    """Drop a head stored beside the embedding it is tied to; refuse one that differs from it."""
    stored = names.pop("lm_head.weight", None)
    if stored is not None and not torch.equal(source.tensor(stored), source.tensor(names["model.embed_tokens.weight"])):
        raise CheckpointError(
            f"{source.folder}: config.json ties the head to the embedding, but {stored} differs from it. "
            "Set tie_word_embeddings to false if the head was trained apart."
        )


def _mask_features(source: TensorSource, names: dict[str, str], spec: DraftSpec) -> Tensor | None:
    """Return what stands for the target's states at a P-EAGLE draft's masks, in whatever shape it is stored."""
    stored, width = names.pop("mask_hidden", None), spec.num_features * spec.target_hidden_size
    if spec.mask_token_id is None:
        if stored is None:
            return None
        raise CheckpointError(
            f"{source.folder}: has a tensor {stored}, as P-EAGLE drafts do, and config.json names no mask token "
            "(mask_token_id); fetch both again."
        )
    if stored is None or math.prod(source.info(stored).shape) != width:
        found = "no tensor" if stored is None else f"{list(source.info(stored).shape)} numbers in"
        raise CheckpointError(
            f"{source.folder}: config.json describes a P-EAGLE draft (mask_token_id), and the checkpoint has {found} "
            f"mask_hidden, where {width} numbers are needed; fetch both again."
        )
    return source.tensor(stored).flatten()


def _draft_tokens(source: TensorSource, names: dict[str, str], spec: DraftSpec | BlockDraftSpec) -> Tensor:
    """Return the target token of each entry of the draft's vocabulary (d2t holds offsets); check t2d against it."""
    entries_V = torch.arange(spec.draft_vocab_size)
    d2t, t2d = names.pop("d2t", None), names.pop("t2d", None)
    if d2t is None:
        if spec.draft_vocab_size != spec.vocab_size:
            raise CheckpointError(
                f"{source.folder}: the draft speaks {spec.draft_vocab_size} of {spec.vocab_size} tokens but has no d2t "
                "tensor to say which."
            )
        return entries_V
    tokens_V = entries_V + source.tensor(d2t).long() if source.info(d2t).shape == (len(entries_V),) else entries_V - 1
    if not bool(((tokens_V >= 0) & (tokens_V < spec.vocab_size)).all()) or len(set(tokens_V.tolist())) != len(tokens_V):
        raise CheckpointError(
            f"{source.folder}: d2t does not map {spec.draft_vocab_size} draft entries to distinct tokens below "
            f"{spec.vocab_size} (it holds offsets: token = entry + d2t[entry])."
        )
    if t2d is not None and not torch.equal(source.tensor(t2d).bool().nonzero()[:, 0], tokens_V.sort().values):
        raise CheckpointError(f"{source.folder}: d2t and t2d disagree on which tokens the draft speaks.")
    return tokens_V
