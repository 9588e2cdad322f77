"""Build a target or a draft from a checkpoint; every tensor is accounted for, and a draft must fit its target."""

import torch
from torch import Tensor, nn

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.names import canonical_draft_name, canonical_names, canonical_target_name
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.spec import DraftSpec, ModelSpec
from slipstream.errors import CheckpointError, ConfigError, DraftMismatchError
from slipstream.kernels import Ops
from slipstream.models.accounting import Place, check_tensors, places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Embedding, Linear, RMSNorm
from slipstream.models.llama import LlamaDecoder
from slipstream.models.packing import check_uniform, checkpoint_modules, packed_source
from slipstream.models.parallel import ALONE, Ranks
from slipstream.models.rope import Rotary
from slipstream.quant.packed import join_rows


def load_target(
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    ops: Ops | None = None,
    ranks: Ranks = ALONE,
) -> LlamaDecoder:
    """Read a Llama-class target, or the part of it that one rank holds.

    Args:
        dtype: of the weights that are stored dense.
        max_position: bounds the rotary table (default: what the model allows).
        ops: the kernels packed weights are laid out for; without them a GGUF's blocks are expanded to `dtype`.
    """
    spec = model_spec(source.config, source.folder)
    with torch.device("meta"):
        model = LlamaDecoder(spec, max_position, ranks)
    names = canonical_names(source.names(), canonical_target_name)
    wanted = {name if name.startswith("lm_head.") else f"model.{name}": place for name, place in places(model).items()}
    shares_table = spec.tie_embeddings and ranks.size == 1
    if spec.tie_embeddings:
        _check_tied_head(source, names)
    if shares_table:
        wanted.pop("lm_head.weight")
    elif spec.tie_embeddings:  # a rank's head is part of the table, and laid out for the kernels on its own
        names["lm_head.weight"] = names["model.embed_tokens.weight"]
    _Filler(source, names, ops, dtype, device).fill(model, wanted)
    if shares_table:
        model.lm_head.weight, model.lm_head.packed = model.embed_tokens.weight, model.embed_tokens.packed
    return model.eval()


def load_draft(
    source: TensorSource,
    target: LlamaDecoder,
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
    _Filler(source, names, ops, dtype, device).fill(draft, wanted)
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


def _check_shared_head(source: TensorSource, target: Ranks, draft: Ranks) -> None:
    if target.size != draft.size:
        raise ConfigError(
            f"{source.folder}: the draft has no head of its own and uses the target's, of which each of the "
            f"{target.size} ranks holds a part. Split the draft as well (draft_tp {target.size})."
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


class _Filler:
    """Checks a checkpoint's accounts, then gives every parameter of a model its memory and its values."""

    def __init__(
        self, source: TensorSource, names: dict[str, str], ops: Ops | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._names = names
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._packs = packed_source(source, ops)
        self._modules = checkpoint_modules(names)

    def fill(self, model: nn.Module, wanted: dict[str, Place]) -> None:
        """Take `wanted` (our tensor names to places) from the checkpoint, and nothing else may be in it."""
        packed = {name: stored for name, place in wanted.items() if (stored := self._stored(name, place)) is not None}
        shapes = {name: place.shape for name, place in wanted.items() if name not in packed}
        for name, stored in packed.items():
            module = name.removesuffix(".weight")
            shapes |= {f"{module}.{suffix}": shape for suffix, shape in stored.items()}
        check_tensors(self._source, self._names, shapes)
        for part in model.modules():
            if isinstance(part, Rotary):
                part.fill(self._device)
        for name, place in wanted.items():
            if name not in packed:
                self._copy(name, place)
        self._pack({name: wanted[name] for name in packed})

    def _stored(self, name: str, place: Place) -> dict[str, tuple[int, ...]] | None:
        """Return what a packed weight is stored as; None for a dense one."""
        module = self._modules.get(name.removesuffix(".weight"))
        if self._packs is None or module is None or place.parameter != "weight" or isinstance(place.module, RMSNorm):
            return None
        return self._packs.stored(module, place.shape)

    def _copy(self, name: str, place: Place) -> None:
        values = self._source.part(self._names[name], place.window)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{self._source.info(self._names[name]).file}: tensor {self._names[name]} holds NaN or infinite "
                "values; the file is damaged or the training run diverged."
            )
        parameter = getattr(place.module, place.parameter)
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=self._dtype, device=self._device)
            parameter = nn.Parameter(empty, requires_grad=False)
            setattr(place.module, place.parameter, parameter)
        parameter[place.start : place.start + len(values)].copy_(values)

    def _pack(self, packed: dict[str, Place]) -> None:
        """Join the parts of each layer in order and hand them over in the kernels' layout."""
        assert self._packs is not None or not packed
        parts: dict[Linear | Embedding, list[str]] = {}
        for name, place in packed.items():
            assert not isinstance(place.module, RMSNorm)
            parts.setdefault(place.module, []).append(name)
        for module, names in parts.items():
            expected = len(module.parts) if isinstance(module, Linear) else 1
            check_uniform(str(self._source.folder), names[0], len(names) == expected)
            assert self._packs is not None
            windows = {name: packed[name].window for name in names}
            read = [self._packs.read(self._modules[name.removesuffix(".weight")], *windows[name]) for name in names]
            joined = join_rows(read).to(self._device)
            module.pack(joined if self._ops is None else self._ops.prepare(joined))
