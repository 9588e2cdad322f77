"""A node of a tree has the bits of plain decoding along its path, on every kernel that attends to trees."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from interpreted import DEVICE
from slipstream.executors.batch import build_batch
from slipstream.executors.interface import Work
from slipstream.kernels import TreePaths
from slipstream.kernels.triton.ops import TritonOps
from slipstream.models.context import KvCache, KvShape, QueryTokens, page_table, paged_context
from slipstream.speculation.tree import TreeBatch, nodes_to

PAGE, PAGES = 4, 10
# Node 0 is the root. Children of one node are not neighbours, as EAGLE-2 makes them level by level.
TREES = {
    "siblings": [-1, 0, 0],
    "levels": [-1, 0, 0, 1, 1, 2, 3, 6],
    "a chain beside a chain": [-1, 0, 1, 2, 0, 4, 5, 6],
    "a chain": [-1, 0, 1, 2],
}
HEADS, GROUPS, WIDTH = 4, 2, 16


def rows_of(count, heads, width, dtype, seed):
    return torch.randn(count, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


class Dense:
    """Attention over keys and values by head."""

    shape = KvShape(((GROUPS, WIDTH),))

    def __init__(self, dtype, window=None):
        self._dtype, self._window = dtype, window

    def run(self, ctx, seeds):
        q, k, v = (
            torch.cat([rows_of(1, heads, WIDTH, self._dtype, 3 * seed + part) for seed in seeds])
            for part, heads in enumerate((HEADS, GROUPS, GROUPS))
        )
        return ctx.attend(0, q, k, v, WIDTH**-0.5, self._window)


class Latent:
    """Attention over latents as they are (absorbed)."""

    shape = KvShape(((1, 64 + 16),), 64)

    def __init__(self, dtype):
        self._dtype = dtype

    def run(self, ctx, seeds):
        q = torch.cat([rows_of(1, 16, 80, self._dtype, 2 * seed) for seed in seeds])
        latent = torch.cat([rows_of(1, 1, 80, self._dtype, 2 * seed + 1) for seed in seeds])
        layer = ctx.kv.layers[0]
        ctx.ops.write_kv(layer, latent, latent[..., :64], ctx.slots_T)
        return ctx.ops.latent_attention(q, layer, ctx.batch, 0.1, 64)


KINDS = {
    "float32": lambda: (Dense(torch.float32), torch.float32),
    "bfloat16": lambda: (Dense(torch.bfloat16), torch.bfloat16),
    "window": lambda: (Dense(torch.float32, window=9), torch.float32),
    "latent": lambda: (Latent(torch.float32), torch.float32),
}


def with_paths(ctx, tree, root):
    """Return a pass's attention as captured steps have it: the keys of each node's path by slot."""
    depth = max(tree.depths)
    ways = [[*nodes_to(tree.parents, node), *[node] * (depth - tree.depths[node])] for node in range(len(tree.tokens))]
    paths = TreePaths(torch.tensor([root], dtype=torch.int32, device=DEVICE), ctx.slots_T[torch.tensor(ways)].int())
    every = torch.full_like(ctx.positions_T, -1)
    return replace(ctx.batch, kv_index_T=ctx.positions_T, ancestors_T=every, tree=paths)


def passes(kind, dtype, text, parents):
    """Return each node's output: over the tree path by path and node by node, and a token at a time along its path."""
    ops = TritonOps(DEVICE)
    pages = list(range(PAGES))[::-1]

    table_RP = page_table([pages], DEVICE)
    nothing = KvCache.allocate(kind.shape, PAGES, PAGE, dtype, DEVICE)
    index = torch.arange(text - 1, device=DEVICE)
    before = QueryTokens([text - 1], index, index, torch.full_like(index, -1))
    kind.run(paged_context(ops, nothing, table_RP, before), list(range(text - 1)))

    def after_text():
        return KvCache([copy.deepcopy(layer) for layer in nothing.layers], PAGE)

    trees = TreeBatch.pack([(list(range(100, 100 + len(parents))), parents)], torch.device("cpu")).in_preorder()
    (tree,) = trees.unpack()
    row = SimpleNamespace(num_committed=text - 1, tokens=[0] * text, joined=SimpleNamespace(num_prompt=0))
    batch = build_batch([(row, Work(0, 1, emits=True, drafts=True))], [tree], DEVICE)
    together = kind.run(paged_context(ops, after_text(), table_RP, batch.queries), tree.tokens)
    ctx = paged_context(ops, after_text(), table_RP, replace(batch.queries, paths=()))
    fixed = kind.run(replace(ctx, batch=with_paths(ctx, tree, text - 1)), tree.tokens)
    alone = [None] * len(tree.tokens)
    for leaf in (node for node in range(len(tree.tokens)) if node not in tree.parents):
        kv = after_text()
        for depth, node in enumerate([0, *nodes_to(tree.parents, leaf)]):
            index = torch.tensor([text - 1 + depth], device=DEVICE)
            queries = QueryTokens([1], index, index, torch.full_like(index, -1))
            alone[node] = kind.run(paged_context(ops, kv, table_RP, queries), [tree.tokens[node]])[0]
    return together, fixed, torch.stack(alone)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in TREES if kind != "latent" or name == "levels"]
)
def test_a_node_has_the_bits_of_plain_decoding_along_its_path(kind, name):
    attention, dtype = KINDS[kind]()
    together, fixed, alone = passes(attention, dtype, 13, TREES[name])  # keys on both sides of an instruction's end
    assert torch.equal(together, alone)
    assert torch.equal(fixed, alone)
