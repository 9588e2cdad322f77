"""Tiny random targets and drafts, and passes over them by the kernels at hand."""

import torch

from interpreted import DEVICE
from slipstream.checkpoint.spec import DraftSpec, ModelSpec, RopeSpec
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target

SHAPE = dict(  # noqa: C408
    vocab_size=90,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    rope=RopeSpec(10000.0, 16),
    max_position=256,
)


def make_target(generator, **changes) -> Target:
    model = Target(ModelSpec(architecture="llama", tie_embeddings=False, **{**SHAPE, **changes}))
    return randomize(model, generator)


def make_draft(generator, **changes) -> Eagle3Draft:
    spec = DraftSpec(architecture="eagle3", draft_vocab_size=90, target_hidden_size=64, **{**SHAPE, **changes})
    return randomize(Eagle3Draft(spec), generator)


def randomize(model, generator):
    for parameter in model.parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def run(model, ops, passes, page_size=16, others=0, keys=None):
    """Run passes of so many tokens of one sequence; `others` requests of one token each share every pass."""
    pages = -(-64 // page_size)
    dtype = next(model.parameters()).dtype
    kv = KvCache.allocate(model.kv_shape, (1 + others) * pages, page_size, keys or dtype, DEVICE)
    table = page_table([range(r * pages, (r + 1) * pages) for r in reversed(range(1 + others))], DEVICE)
    states, done = [], 0
    for step, count in enumerate(passes):
        index = torch.cat([torch.arange(done, done + count), torch.full((others,), step)]).to(DEVICE)
        queries = QueryTokens([count] + [1] * others, index, index, torch.full_like(index, -1))
        tokens = (index * 7 + 3) % 61
        ctx = paged_context(ops, kv, table, queries)
        if hasattr(model, "fuse"):
            features = torch.sin(index[:, None] * torch.arange(1, 65, device=DEVICE)).to(dtype)
            states.append(model(features, tokens, ctx).normed_TD[:count])
        else:
            hidden = model(tokens, ctx, (0, 1))
            states.append(torch.cat([hidden.last_TD, *hidden.captured], dim=-1)[:count])
        done += count
    return torch.cat(states)
