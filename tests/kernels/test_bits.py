"""Do a row's bits depend on what else shares its pass? Measured for every kernel path, compared with its promise."""

import dataclasses

import pytest
import torch

from slipstream.kernels import select
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from tiny import DEVICE, TARGET_SPEC, tiny_target

SPEC = dataclasses.replace(TARGET_SPEC, hidden_size=96, intermediate_size=160, num_heads=6, num_kv_heads=2, head_dim=16)
TARGET = tiny_target(**{f.name: getattr(SPEC, f.name) for f in dataclasses.fields(SPEC)})
PATHS = ["auto", "reference"]


def logits(path: str, layout: list[list[list[int]]], page_size: int) -> dict[int, torch.Tensor]:
    """Run several requests through passes of so many tokens each; return each request's last row of logits.

    `layout[p][r]` are the tokens request r brings to pass p.
    """
    ops = select(DEVICE, path)
    num_requests = len(layout[0])
    pages_each = -(-64 // page_size)
    kv = KvCache.allocate(TARGET.kv_shape, num_requests * pages_each, page_size, torch.float32, DEVICE)
    table = page_table([range(r * pages_each, (r + 1) * pages_each) for r in range(num_requests)], DEVICE)
    done = [0] * num_requests
    last = {}
    for tokens in layout:
        active = [r for r in range(num_requests) if tokens[r]]
        index = torch.cat([torch.arange(done[r], done[r] + len(tokens[r]), device=DEVICE) for r in active])
        queries = QueryTokens([len(tokens[r]) for r in active], index, index, torch.full_like(index, -1))
        ctx = paged_context(ops, kv, table[active], queries)
        with torch.inference_mode():
            hidden = TARGET(torch.tensor([t for r in active for t in tokens[r]], device=DEVICE), ctx)
            rows = TARGET.logits(hidden.last_TD, ops)
        end = 0
        for r in active:
            end += len(tokens[r])
            last[r] = rows[end - 1]
            done[r] += len(tokens[r])
    return last


TEXT = [(7 * i + 3) % 61 for i in range(24)]
OTHER = [(5 * i + 1) % 61 for i in range(24)]
ALONE = [[TEXT[:20]], *([[t]] for t in TEXT[20:])]
VARIANTS = {
    "four nodes at once": ([[TEXT[:20]], [TEXT[20:]]], 16),
    "beside another request": (
        [[TEXT[:20], OTHER[:20]], *([[a], [b]] for a, b in zip(TEXT[20:], OTHER[20:], strict=True))],
        16,
    ),
    "pages of 4": (ALONE, 4),
    "pages of 64": (ALONE, 64),
    "prefill in chunks": ([[TEXT[:7]], [TEXT[7:20]], *([[t]] for t in TEXT[20:])], 16),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_paths_promise_about_bits_is_kept(path, record_property):
    """A path that says it is row-invariant must be, in every variant; what the others do is recorded."""
    expected = logits(path, ALONE, 16)[0]
    same = {}
    for name, (layout, page_size) in VARIANTS.items():
        got = logits(path, layout, page_size)[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        same[name] = torch.equal(got, expected)
        record_property(name, "same bits" if same[name] else "bits differ")
    ops = select(DEVICE, path)
    assert ops.promise
    if ops.row_invariant:
        assert all(same.values()), same
