"""Every family on the Triton kernels, interpreted: the reference's logits, and the same bits in chunks and trees."""

import copy
from types import SimpleNamespace

import pytest
import torch

from interpreted import DEVICE
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.executors.batch import build_batch
from slipstream.executors.interface import Work
from slipstream.kernels.triton.ops import TritonOps
from slipstream.models.context import KvCache, page_table, paged_context
from slipstream.models.load import load_target
from slipstream.speculation.tree import TreeBatch
from tiny_families import CONFIGS, folder_of, some_tokens
from tiny_moe import passes

CPU = torch.device("cpu")
# A root, and two branches from it of three nodes each. The text has 14 tokens, so that windows of 7 and 9 have left
# its beginning behind and a chunk of 16 ends inside the tree.
TEXT, BRANCHES = 14, ([0, 1, 2, 3], [0, 4, 5, 6])
PARENTS = [-1, 0, 1, 2, 0, 4, 5]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request, tmp_path_factory):
    folder = folder_of(request.param, tmp_path_factory.mktemp("target"))
    return load_target(open_checkpoint(folder), torch.float32, CPU, ops=TritonOps(DEVICE))


@pytest.mark.long
def test_a_family_has_the_references_logits_and_the_same_bits_in_chunks(target):
    ops = TritonOps(DEVICE)
    tokens_T = some_tokens(20)
    whole, _ = passes(target, tokens_T, [20], True, ops)
    torch.testing.assert_close(whole, passes(target, tokens_T, [20], True)[0], atol=1e-4, rtol=0)
    assert torch.equal(passes(target, tokens_T, [9, 1, 10], True, ops)[0], whole)


@pytest.mark.long
def test_a_node_of_a_tree_has_the_bits_of_a_chain_along_its_path(target):
    ops = TritonOps(DEVICE)
    text, nodes = some_tokens(TEXT).tolist(), some_tokens(len(PARENTS), seed=5).tolist()
    nodes[0] = text[-1]
    empty = KvCache.allocate(target.kv_shape, 12, 4, torch.float32, CPU)
    kept, _ = logits(target, ops, empty, text, TEXT - 1)
    grown = logits(target, ops, kept, text, 1, nodes, PARENTS)[1]
    assert len(grown) == len(PARENTS)
    for branch in BRANCHES:
        chain = [nodes[node] for node in branch]
        alone = logits(target, ops, kept, text, 1, chain, list(range(-1, len(chain) - 1)))[1]
        assert torch.equal(grown[branch], alone)


def logits(target, ops, kv, text, count, nodes=(), parents=()):
    """Compute tokens of a text after what `kv` has, and a tree after the last; return the new keys and the logits."""
    kv = KvCache([copy.deepcopy(layer) for layer in kv.layers], kv.page_size)
    trees = TreeBatch.pack([(nodes, parents)], CPU).in_preorder().unpack() if nodes else []
    done = len(text) - 1 if nodes else 0
    row = SimpleNamespace(num_committed=done, tokens=text, joined=SimpleNamespace(num_prompt=len(text) - 1))
    batch = build_batch([(row, Work(0, count, emits=bool(nodes), drafts=bool(nodes)))], trees, CPU)
    ctx = paged_context(ops, kv, page_table([[11, 3, 5, 0, 7, 2, 9, 1, 4, 10]], CPU), batch.queries)
    with torch.inference_mode():
        return kv, target.logits(target(batch.token_ids_T, ctx).last_TD, ops)
