"""One training step's loss: the target in the loop, the draft unrolled, each step against the target's own opinion."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.checkpoint.spec import DraftSpec, ModelSpec, RopeSpec
from slipstream.errors import ConfigError
from slipstream.kernels.training.loss import Labels, Teacher, make_narrow_teacher, make_teacher, soft_cross_entropy
from slipstream.kernels.training.ops import train_ops
from slipstream.kernels.training.seen import Seen
from slipstream.models.eagle3 import DraftHidden, Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.train.data.corpus import DraftVocab
from slipstream.train.draft.packing import Batch, PackedContext, UnrollContext, shift_left, unroll
from slipstream.train.draft.target import SplitTarget, draft_dtype

_NARROWEST = 16


@dataclass(frozen=True)
class DraftShape:
    """What may be chosen about a draft; the rest follows from the target.

    Args:
        captured_layers: k = number of target blocks applied before the capture; None is the target's default.
        feature_norm: `per_layer` and feedback `post_norm` together are EAGLE-3.1.
        window: how many keys the draft's attention shows, the last ones; None shows all, or keeps what a draft to start
            from has, and the target's whole context lifts that.
        renew_vocab: of a draft to start from, choose the vocabulary again by the new data, instead of keeping it.
    """

    vocab_size: int = 12_288
    num_layers: int = 1
    captured_layers: tuple[int, ...] | None = None
    feature_norm: str = "per_layer"
    feedback: str = "post_norm"
    window: int | None = None
    renew_vocab: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.window is not None and self.window < _NARROWEST:
            raise ConfigError(f"window is {self.window}; it must be at least {_NARROWEST}, as long as a chain.")

    def spec(self, target: ModelSpec) -> DraftSpec:
        """Return the draft's full description for a target."""
        captured = self.captured_layers or default_captures(target)
        if any(not 0 <= k <= target.num_layers for k in captured):
            raise ConfigError(f"captured_layers {captured} do not exist in a target of {target.num_layers} blocks.")
        if len(set(captured)) < len(captured):
            raise ConfigError(f"captured_layers {captured} names a layer twice, and a draft learns nothing from that.")
        if self.feature_norm not in ("none", "concat", "per_layer") or self.feedback not in ("pre_norm", "post_norm"):
            raise ConfigError(
                f"feature_norm {self.feature_norm!r} must be none, concat or per_layer, and feedback "
                f"{self.feedback!r} pre_norm or post_norm."
            )
        return DraftSpec(
            architecture="LlamaForCausalLMEagle3",
            vocab_size=target.vocab_size,
            draft_vocab_size=min(self.vocab_size, target.vocab_size),
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_layers=self.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_eps=target.rms_eps,
            rope=_draft_rope(target),
            max_position=target.max_position,
            captured_layers=captured,
            num_features=len(captured),
            sliding_window=self.window,
            feature_norm=self.feature_norm,  # type: ignore[arg-type]  # checked above
            feedback=self.feedback,  # type: ignore[arg-type]  # checked above
        )


def _draft_rope(target: ModelSpec) -> RopeSpec:
    """Return the target's rotary positions, or plain ones where they are made for wider heads than the draft's."""
    return RopeSpec(target.rope.theta, target.head_dim) if target.rope.rotary_dim > target.head_dim else target.rope


def default_captures(target: ModelSpec) -> tuple[int, ...]:
    """Return the layers a new draft captures: EAGLE-3's, or three others where those coincide in a small target."""
    usual, last = target.default_captured_layers(), target.num_layers
    if usual[0] < usual[1] < usual[2]:
        return usual
    if last < 2:
        raise ConfigError(
            f"A target of {last} block has no three layers to capture; name what to capture, as in "
            f"draft.captured_layers=[0, {last}] (0 is the embedding)."
        )
    return {2: (0, 1, 2), 3: (1, 2, 3)}.get(last, (1, last // 2, last - 1))


def new_draft(spec: DraftSpec, target: Target | SplitTarget, vocab: DraftVocab, seed: int) -> Eagle3Draft:
    """Return a fresh draft on the target's device: small random blocks, the target's own rows as its head."""
    device = target.embed_tokens.device
    draft = Eagle3Draft(spec, max_position=target.rotary.cos_Pr.shape[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embed_tokens"):
                parameter.normal_(0.0, 0.02, generator=generator)
        assert target.lm_head.weight is not None and draft.lm_head.weight is not None
        draft.lm_head.weight.copy_(target.lm_head.weight[vocab.token_ids_V.to(device)].float())
    draft.token_ids_V = vocab.token_ids_V
    draft.share_embedding(target.embed_tokens)
    target.requires_grad_(False)
    return draft.to(device)


@torch.no_grad()
def renew_vocab(draft: Eagle3Draft, target: Target | SplitTarget, vocab: DraftVocab) -> None:
    """Give a trained draft another vocabulary.

    Tokens it knew keep their rows of the head. Those of new ones are the target's rows, moved as training has moved
    the known tokens' from the target's (the affine map that fits those best).
    """
    assert target.lm_head.weight is not None and draft.lm_head.weight is not None
    known_V, head_VD = draft.token_ids_V, draft.lm_head.weight.float()
    all_XD = torch.nn.functional.pad(target.lm_head.weight.float(), (0, 1), value=1.0)
    map_DD = torch.linalg.lstsq(all_XD[known_V].double(), head_VD.double()).solution
    rows_XD = (all_XD.double() @ map_DD).float()
    rows_XD[known_V] = head_VD
    draft.token_ids_V = vocab.token_ids_V.to(head_VD.device)
    draft.lm_head = Linear(draft.spec.hidden_size, {"lm_head": len(draft.token_ids_V)})
    draft.lm_head.weight = torch.nn.Parameter(rows_XD[draft.token_ids_V])
    draft.spec = replace(draft.spec, draft_vocab_size=len(draft.token_ids_V))


@dataclass(frozen=True)
class StepOutput:
    """The loss to differentiate, and per unrolled step its loss, agreeing slots and supervised slots."""

    loss: Tensor
    loss_J: Tensor
    agreed_J: Tensor
    count_J: Tensor


@dataclass(frozen=True)
class Emphasis:
    """How the loss weighs what it sees.

    Args:
        decay: weight of an unrolled step over that of the one before.
        hard_share: share of each label that is the target's best token alone.
        overlap: see `slipstream.kernels.training.loss.Labels`.
        whole_vocabulary: see `slipstream.train.run.recipe.TrainConfig`.
    """

    decay: float = 0.8
    hard_share: float = 0.0
    whole_vocabulary: bool = True
    overlap: float | None = None


class Objective:
    """Computes the loss of a batch; holds the target, the draft and the maps between their vocabularies.

    The target runs in the precision of its weights, the draft in `dtype`: states are converted on the way to it.
    """

    def __init__(
        self,
        target: Target | SplitTarget,
        draft: Eagle3Draft,
        vocab: DraftVocab,
        emphasis: Emphasis | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        assert draft.spec.captured_layers is not None
        self.target, self.draft = target, draft
        self._captured, self._emphasis = draft.spec.captured_layers, emphasis or Emphasis()
        self._device = target.embed_tokens.device
        self.dtype = dtype or draft_dtype(self._device)
        self.ops = train_ops(self._device)
        self._draft_index = vocab.draft_index().to(self._device)
        self._narrow_head: Tensor | None = None

    @torch.no_grad()
    def features(self, ids_BT: Tensor, positions_BT: Tensor, seen: Seen) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the target; return its normed last states and the captured ones, in its precision."""
        hidden = self.target(ids_BT, PackedContext(self.ops, positions_BT, seen), self._captured)
        return self.target.norm(hidden.last_TD, self.ops), hidden.captured

    def teacher(self, last_BTD: Tensor, slots_N: Tensor, ids_BT: Tensor) -> Teacher:
        """Return the target's opinion at flat positions of the texts `ids_BT`."""
        assert self.target.lm_head.weight is not None
        rows_ND = last_BTD.flatten(0, 1).index_select(0, slots_N)
        head = self.target.lm_head.weight
        if self._emphasis.whole_vocabulary:
            return make_teacher(rows_ND, head, self.draft.token_ids_V, self._draft_index, self.ops)
        if self._narrow_head is None:
            self._narrow_head = head.detach()[self.draft.token_ids_V]
        next_N = self._draft_index[shift_left(ids_BT, 1).flatten().index_select(0, slots_N)]
        return make_narrow_teacher(rows_ND, self._narrow_head, next_N)

    def head(self) -> Tensor:
        """Return the draft's head in the precision of its states."""
        assert self.draft.lm_head.weight is not None
        return self.draft.lm_head.weight.to(self.dtype)

    def unroll(
        self, captured: tuple[Tensor, ...], ids_BT: Tensor, ctx: UnrollContext, steps: int, slots_BS: Tensor
    ) -> Iterator[DraftHidden]:
        """Unroll the draft over the target's captured states; yield the states of some slots of each row."""
        return unroll(self.draft, tuple(states.to(self.dtype) for states in captured), ids_BT, ctx, steps, slots_BS)

    def __call__(self, batch: Batch, total: Callable[[Tensor], Tensor] = lambda count_J: count_J) -> StepOutput:
        """Return the loss; `total` adds supervised slots up over processes, so that all divide alike."""
        seen = Seen(batch.text_BT)
        if batch.states_LBTD is None:
            last_BTD, captured = self.features(batch.ids_BT, batch.positions_BT, seen)
        else:
            *stored, last_BTD = batch.states_LBTD.unbind()
            captured = tuple(stored)
        teacher = self.teacher(last_BTD, batch.teacher_slots_N, batch.ids_BT)
        count_J = total(torch.stack([teacher.inside_N[rows.teacher_N].sum() for rows in batch.steps]))
        assert self.draft.lm_head.weight is not None
        ctx = UnrollContext(self.ops, batch.positions_BT, seen)
        losses, agreed = [], []
        hidden_steps = self.unroll(captured, batch.ids_BT, ctx, len(batch.steps), batch.slots_BS)
        for step, (rows, hidden) in enumerate(zip(batch.steps, hidden_steps, strict=True)):
            normed_ND = hidden.normed_TD.flatten(0, 1).index_select(0, rows.slots_N)
            scale = self._emphasis.decay**step / count_J[step].clamp(min=1)
            weight_N = scale.expand(len(rows.slots_N))
            labels = Labels(rows.teacher_N, weight_N, self._emphasis.hard_share, self._emphasis.overlap)
            result = soft_cross_entropy(normed_ND, self.draft.lm_head.weight, teacher, labels, self.ops)
            losses.append(result.loss)
            agreed.append(result.agreed_N.sum())
        loss_J = torch.stack(losses)
        return StepOutput(loss_J.sum(), loss_J.detach(), torch.stack(agreed), count_J)
