"""Build a target or a draft from a checkpoint; every tensor is accounted for, and a draft must fit its target."""

import torch
from torch import Tensor, nn

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.names import canonical_draft_name, canonical_names, canonical_target_name
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.spec import DraftSpec, ModelSpec
from slipstream.errors import CheckpointError, DraftMismatchError
from slipstream.models.accounting import Place, check_tensors, places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.llama import LlamaDecoder
from slipstream.models.rope import Rotary


def load_target(
    source: TensorSource, dtype: torch.dtype, device: torch.device, max_position: int | None = None
) -> LlamaDecoder:
    """Read a Llama-class target. `max_position` bounds the rotary table (default: what the model allows)."""
    spec = model_spec(source.config, source.folder)
    with torch.device("meta"):
        model = LlamaDecoder(spec, max_position)
    names = canonical_names(source.names(), canonical_target_name)
    wanted = {name if name.startswith("lm_head.") else f"model.{name}": place for name, place in places(model).items()}
    if spec.tie_embeddings:
        wanted.pop("lm_head.weight")
        _check_tied_head(source, names)
    _fill(model, source, names, wanted, dtype, device)
    if spec.tie_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def load_draft(
    source: TensorSource, target: LlamaDecoder, dtype: torch.dtype, max_position: int | None = None
) -> Eagle3Draft:
    """Read an EAGLE-3 draft for a target; what the draft leaves out (embedding, full-size head) is the target's."""
    spec = draft_spec(source.config, source.folder, target.spec.num_layers)
    check_pair(spec, target.spec, str(source.folder))
    with torch.device("meta"):
        draft = Eagle3Draft(spec, max_position)
    device = target.embed_tokens.device
    names = canonical_names(source.names(), canonical_draft_name)
    wanted = places(draft)
    shares_embedding = "embed_tokens.weight" not in names and spec.hidden_size == target.spec.hidden_size
    shares_head = "lm_head.weight" not in names and spec.draft_vocab_size == spec.vocab_size
    if shares_embedding:
        wanted.pop("embed_tokens.weight")
        draft.share_embedding(target.embed_tokens)
    if shares_head:
        wanted.pop("lm_head.weight")
        draft.lm_head = target.lm_head
    token_ids_V = _draft_tokens(source, names, spec)
    _fill(draft, source, names, wanted, dtype, device)
    draft.token_ids_V = token_ids_V.to(device)
    return draft.eval()


def captured_layers(draft: DraftSpec, target: ModelSpec) -> tuple[int, ...]:
    """Return the target states a draft wants, by default those EAGLE-3 captures."""
    return draft.captured_layers or target.default_captured_layers()


def check_pair(draft: DraftSpec, target: ModelSpec, where: str) -> None:
    """Raise DraftMismatchError if a draft cannot belong to a target, naming both values."""
    layers = captured_layers(draft, target)
    for what, theirs, ours in (
        ("hidden size of its target", draft.target_hidden_size, target.hidden_size),
        ("vocabulary size", draft.vocab_size, target.vocab_size),
        ("number of captured layers", draft.num_features, len(layers)),
    ):
        if theirs != ours:
            raise DraftMismatchError(
                f"{where}: the draft's {what} is {theirs}, the target's is {ours}; it was trained for another target."
            )
    if not all(0 <= k <= target.num_layers for k in layers):
        raise DraftMismatchError(
            f"{where}: the draft captures layers {list(layers)}, the target has {target.num_layers} layers; "
            "it was trained for another target."
        )


def _check_tied_head(source: TensorSource, names: dict[str, str]) -> None:
    """Drop a head stored beside the embedding it is tied to; refuse one that differs from it."""
    stored = names.pop("lm_head.weight", None)
    if stored is not None and not torch.equal(source.tensor(stored), source.tensor(names["model.embed_tokens.weight"])):
        raise CheckpointError(
            f"{source.folder}: config.json ties the head to the embedding, but {stored} differs from it. "
            "Set tie_word_embeddings to false if the head was trained apart."
        )


def _draft_tokens(source: TensorSource, names: dict[str, str], spec: DraftSpec) -> Tensor:
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


def _fill(
    model: nn.Module,
    source: TensorSource,
    names: dict[str, str],
    wanted: dict[str, Place],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check the accounts, then give every parameter its memory and its values."""
    check_tensors(source, names, {name: place.shape for name, place in wanted.items()})
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fill(device)
    for name, place in wanted.items():
        values = source.tensor(names[name])
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{source.info(names[name]).file}: tensor {names[name]} holds NaN or infinite values; the file is "
                "damaged or the training run diverged."
            )
        parameter = getattr(place.module, place.parameter)
        if parameter.is_meta:
            parameter = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
            setattr(place.module, place.parameter, parameter)
        parameter[place.start : place.start + place.shape[0]].copy_(values)
