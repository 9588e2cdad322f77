"""Sampling a token per row with temperature and top-p, without sorting the vocabulary.

Three tokens are drawn from the whole distribution; the first that lies inside the top-p nucleus is taken, so that the
result follows the nucleus's own distribution. A row whose three draws all fall outside (a chance of (1 - top_p)^3)
takes the most likely token.
"""

import torch
from torch import Tensor

NUM_DRAWS = 3


def sample(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B3: Tensor) -> Tensor:
    """Return a token per row; temperature 0 is the most likely one. `uniform_B3` is noise in [0, 1)."""
    best_B = logits_BV.argmax(-1)
    warm_B = temperature_B > 0
    scaled_BV = logits_BV.float() / torch.where(warm_B, temperature_B, 1.0)[:, None]
    weight_BV = (scaled_BV - scaled_BV.amax(-1, keepdim=True)).exp()
    cumulative_BV = weight_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    drawn_B3 = torch.searchsorted(cumulative_BV, uniform_B3 * total_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    drawn_weight_B3 = weight_BV.gather(1, drawn_B3)
    inside = [
        (weight_BV * (weight_BV > drawn_weight_B3[:, i : i + 1])).sum(-1) < top_p_B * total_B1[:, 0]
        for i in range(NUM_DRAWS)
    ]
    token_B = best_B
    for i in reversed(range(NUM_DRAWS)):
        token_B = torch.where(inside[i], drawn_B3[:, i], token_B)
    return torch.where(warm_B, token_B, best_B)
