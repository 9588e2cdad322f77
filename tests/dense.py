"""A context for one sequence computed in one causal pass."""

import torch

from slipstream.models.context import KvCache, KvShape, PagedContext, QueryTokens, page_table, paged_context
from tiny import OPS


def dense_context(shape: KvShape, num_tokens: int, page_size: int) -> PagedContext:
    """Return a fresh cache's context for tokens 0 .. num_tokens - 1; pages lie in reverse order, to be sure."""
    num_pages = -(-num_tokens // page_size)
    kv = KvCache.allocate(shape, num_pages, page_size, torch.float32, torch.device("cpu"))
    index_T = torch.arange(num_tokens)
    queries = QueryTokens([num_tokens], index_T, index_T, torch.full_like(index_T, -1))
    return paged_context(OPS, kv, page_table([list(range(num_pages))[::-1]], torch.device("cpu")), queries)
