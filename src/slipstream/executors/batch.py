"""From a plan and its trees to the tensors of one pass.

Each row of the batch brings the tokens of its chunk, then the drafted nodes of its tree. The last token of an emitting
chunk is the tree's root. Node i of a tree lies i places after the root in the order of keys; its rotary position is the
root's plus its depth. A tree with siblings is also described path by path, each as plain decoding would have it: a
query's keys are then those of its path, each at its position.

Shape letters: T query tokens, L rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.executors.interface import Work
from slipstream.executors.rows import Row
from slipstream.models.context import PathTokens, QueryTokens
from slipstream.speculation.tree import Tree, nodes_to


@dataclass(frozen=True)
class Batch:
    """One pass over the target.

    Args:
        first_rows: for each planned row of the batch, where its first query token lies.
        logit_rows_L: rows whose logits are wanted: root and nodes of each that emits, in order.
    """

    token_ids_T: Tensor
    queries: QueryTokens
    first_rows: list[int]
    logit_rows_L: Tensor


def build_batch(planned: Sequence[tuple[Row, Work]], trees: Sequence[Tree], device: torch.device) -> Batch:
    """Lay out the pass. `trees` has a tree for each row that emits, in order."""
    tokens: list[int] = []
    index: list[int] = []
    positions: list[int] = []
    ancestors: list[int] = []
    prompt_rows: list[bool] = []
    counts: list[int] = []
    paths: list[PathTokens] = []
    first_rows: list[int] = []
    logit_rows: list[int] = []
    next_tree = iter(trees)
    for request, (row, work) in enumerate(planned):
        first_rows.append(len(tokens))
        start, end = row.num_committed, row.num_committed + work.num_tokens
        tokens += row.tokens[start:end]
        index += range(start, end)
        positions += range(start, end)
        ancestors += [-1] * work.num_tokens
        prompt_rows += [i < row.joined.num_prompt for i in range(start, end)]
        if work.emits:
            tree = next(next_tree)
            root = len(tokens) - 1
            tokens += tree.tokens[1:]
            index += range(end, end + len(tree.tokens) - 1)
            positions += [end - 1 + depth for depth in tree.depths[1:]]
            ancestors += tree.bits[1:]
            prompt_rows += [False] * (len(tree.tokens) - 1)
            logit_rows += range(root, len(tokens))
            first, *others = tree.paths()
            paths.append(PathTokens(request, work.num_tokens - 1 + len(first)))
            paths += [PathTokens(request, len(path), _moved(tree, path, end - 1)) for path in others]
        else:
            paths.append(PathTokens(request, work.num_tokens))
        counts.append(len(tokens) - first_rows[-1])
    index_T, positions_T, ancestors_T = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (index, positions, ancestors)
    )
    return Batch(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        QueryTokens(counts, index_T, positions_T, ancestors_T, prompt_rows, paths if len(paths) > len(counts) else ()),
        first_rows,
        torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def _moved(tree: Tree, path: range, root: int) -> list[tuple[int, int]]:
    """Return, for nodes that a path's last query sees elsewhere than at their own place, position and place."""
    nodes = enumerate(nodes_to(tree.parents, path[-1]), start=1)
    return [(root + depth, root + node) for depth, node in nodes if node != depth]
