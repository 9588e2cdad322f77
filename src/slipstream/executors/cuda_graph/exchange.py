"""Exchanging the weights of two drafts in place: graphs hold the tensors of the draft in use."""

import torch
from torch import Tensor

from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear


@torch.no_grad()
def exchange_weights(one: Eagle3Draft, other: Eagle3Draft) -> None:
    """Give each of two drafts the other's numbers; tables and heads that are the target's own stay."""
    mine, others = _numbers(one), _numbers(other)
    assert [x.shape for x in mine] == [x.shape for x in others], "`DraftShelf` looked"
    for x, y in zip(mine, others, strict=True):
        if x.data_ptr() != y.data_ptr():
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)


def _numbers(draft: Eagle3Draft) -> list[Tensor]:
    """Return all tensors that make a draft's guesses."""
    packed = [module.packed for module in draft.modules() if isinstance(module, Linear) and module.packed is not None]
    codes = [x for weight in packed for run in weight.runs for x in (run.codes, *run.scales.values())]
    own = [draft.token_ids_V, *([] if draft.mask_features_C is None else [draft.mask_features_C])]
    return [*own, *(parameter.data for parameter in draft.parameters()), *codes]
