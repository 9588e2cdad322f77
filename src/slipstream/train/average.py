"""Averaging two drafts' weights: what each learnt, in a draft of the same cost."""

import torch

from slipstream.errors import ConfigError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.train.output import round_weights


@torch.no_grad()
def average_with(draft: Eagle3Draft, other: Eagle3Draft) -> None:
    """Move the draft halfway to another one of the same shape and vocabulary, in place.

    Worth trying when one was trained on from the other: weights that were never close average to nothing useful. The
    draft's weights are first rounded to bfloat16, as a folder would hold them, so that the result does not depend on
    whether it was written and read back in between.
    """
    mine, others = _weights(draft), _weights(other)
    alike = _wiring(draft) == _wiring(other) and draft.token_ids_V.equal(other.token_ids_V)
    if not alike or {name: p.shape for name, p in mine.items()} != {name: p.shape for name, p in others.items()}:
        raise ConfigError(
            "The two drafts differ in shape or vocabulary, so their weights do not correspond. Average a draft with "
            "the one it was trained on from (--init-from), or with another trained on from that."
        )
    round_weights(draft)
    for name, parameter in mine.items():
        parameter.copy_(0.5 * parameter.float() + 0.5 * others[name].float())


def _weights(draft: Eagle3Draft) -> dict[str, torch.nn.Parameter]:
    """Return the draft's own weights; the embedding is the target's."""
    return {name: p for name, p in draft.named_parameters() if not name.startswith("embed_tokens.")}


def _wiring(draft: Eagle3Draft) -> tuple[object, ...]:
    """Return what weights of equal shapes may still disagree on."""
    spec = draft.spec
    return spec.captured_layers, spec.num_heads, spec.feature_norm, spec.feedback, spec.residual, spec.rope
