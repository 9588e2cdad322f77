"""The trees of a step with torch alone: how they grow, paths of nodes, and which path the target goes along.

Shapes follow from shapes, and nothing is asked of the host.

Shape letters: R rows, W nodes of a level, A nodes of the level above, K children tried of each, C candidates, B of them
that are kept, N nodes of a tree with its root (node 0), D drafted tokens on the longest path, E = D + 1.
"""

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.ops import RowSampling
from slipstream.kernels.reference.noise import scattered
from slipstream.kernels.trees import Candidates, Children, Growth, LevelNodes, TreeNodes


class NodePaths(NamedTuple):
    """Each node's way from the root.

    Args:
        depth_RN: int64, 0 for the root.
        nodes_RND: int64, the node at depth 1, 2, ... on the way; from the node's own depth on itself.
        on_path_RND: whether there is a node on the way so deep.
    """

    depth_RN: Tensor
    nodes_RND: Tensor
    on_path_RND: Tensor


class KeptPath(NamedTuple):
    """The path that is kept of each tree, as chains that `accept_chains` takes; past its end tokens are -2.

    Args:
        nodes_RE: the nodes on it, root first; 0 past its end.
        chain_RE: their tokens.
        chosen_RE: the target's tokens at them, 0 past its end; where acceptance is simulated, the next node's.
    """

    nodes_RE: Tensor
    chain_RE: Tensor
    chosen_RE: Tensor


def expand_level(
    growth: Growth, above: LevelNodes | None, children: Children, feedback_LH: Tensor | None
) -> LevelNodes:
    """Note the children of a level's nodes as candidates, and return those that the draft is run on next."""
    plan, rows, made = growth.plan, growth.rows, growth.made
    depth, device = 1 if above is None else above.depth + 1, rows.seed_R.device
    new, first, width = _candidates(growth, above, children), plan.first(depth), plan.widths[depth - 1]
    for field in fields(Candidates):
        values_RC = getattr(new, field.name)
        getattr(made, field.name)[:, first : first + values_RC.shape[1]] = values_RC
    if plan.expanded:
        best_RW = plan.expanded[depth - 1].expand(len(new.tokens_RC), -1)
    else:
        best_RW = new.scores_RC.sort(dim=1, descending=True, stable=True).indices[:, :width]
    parents_RW, written = best_RW // plan.tried, sum(plan.widths[: depth - 1])
    place_W = written + torch.arange(width, device=device)
    first_above = -1 if above is None else written - plan.widths[depth - 2]  # the root's key is not written yet
    bits_RA = torch.full_like(parents_RW[:, :1], -1) if above is None else above.bits_RW
    # A node sees itself, and what its parent sees.
    distance_RW = place_W - first_above - parents_RW
    seen_RW = bits_RA.gather(1, parents_RW) << distance_RW.clamp(max=63)
    index_RW = rows.lengths_R[:, None] + place_W
    column_RW = index_RW // growth.page_size
    slots_RW = rows.pages_RP.gather(1, column_RW).long() * growth.page_size + index_RW % growth.page_size
    num_above = children.tokens_RAK.shape[1]
    above_L = (torch.arange(len(index_RW), device=device)[:, None] * num_above + parents_RW).flatten()

    def each(values_R: Tensor) -> Tensor:
        return values_R[:, None].expand(-1, width).reshape(-1)

    return LevelNodes(
        depth=depth,
        ids_RW=best_RW + first,
        parents_RW=parents_RW,
        tokens_RW=new.tokens_RC.gather(1, best_RW),
        bits_RW=1 | torch.where(distance_RW < 64, seen_RW, 0),
        index_RW=index_RW,
        slots_RW=slots_RW,
        position_RW=(rows.lengths_R[:, None] + depth - 1).expand(-1, width).contiguous(),
        starts_R1=torch.arange(len(index_RW) + 1, dtype=torch.int32, device=device) * width,
        kv_lens_R=(index_RW[:, -1] + 1).int(),
        sampling=RowSampling(each(rows.temperature_R), each(rows.seed_R), each(rows.foretold_R + depth)),
        hidden_LH=None if feedback_LH is None else feedback_LH.index_select(0, above_L),
    )


def kept_candidates(growth: Growth, above: LevelNodes | None, children: Children) -> Candidates:
    """Return what the plan keeps of all candidates, in their order; parents count from the first that is kept."""
    plan, made = growth.plan, growth.made
    last = _candidates(growth, above, children)
    before = plan.num_candidates - last.tokens_RC.shape[1]
    tokens_RC = torch.cat([made.tokens_RC[:, :before], last.tokens_RC], 1)
    parents_RC = torch.cat([made.parents_RC[:, :before], last.parents_RC], 1)
    scores_RC = torch.cat([made.scores_RC[:, :before], last.scores_RC], 1)
    if plan.kept_C is None:
        order_RC = scores_RC.sort(dim=1, descending=True, stable=True).indices
    else:
        order_RC = plan.kept_C.int().sort(descending=True, stable=True).indices.expand_as(tokens_RC)
    kept_RB = order_RC[:, : plan.num_kept].sort(dim=1).values
    old_parents_RB = parents_RC.gather(1, kept_RB)
    parents_RB = torch.searchsorted(kept_RB, old_parents_RB)
    return Candidates(
        tokens_RC.gather(1, kept_RB), torch.where(old_parents_RB < 0, -1, parents_RB), scores_RC.gather(1, kept_RB)
    )


def rerank_trees(growth: Growth, above: LevelNodes | None, children: Children, nodes: TreeNodes) -> None:
    """Keep what the plan says of all candidates, and write the nodes."""
    kept = kept_candidates(growth, above, children)
    nodes.tokens_RN[:, 1:] = kept.tokens_RC
    nodes.parents_RN[:, 0].fill_(-1)
    nodes.parents_RN[:, 1:] = kept.parents_RC + 1
    paths = node_paths(nodes.parents_RN, nodes.nodes_RND.shape[-1])
    nodes.depth_RN.copy_(paths.depth_RN)
    nodes.position_RN.copy_(growth.rows.lengths_R[:, None] + paths.depth_RN)
    nodes.foretold_RN.copy_(nodes.position_RN + 1)
    nodes.nodes_RND.copy_(paths.nodes_RND)
    nodes.path_RND.copy_(torch.where(paths.on_path_RND, _along(nodes.tokens_RN, paths.nodes_RND), -1))
    nodes.slots_RND.copy_(_along(nodes.slots_RN, paths.nodes_RND))
    nodes.root_R.copy_(growth.rows.lengths_R)


def _candidates(growth: Growth, above: LevelNodes | None, children: Children) -> Candidates:
    """Return the children of the nodes above as candidates."""
    scores_RAK, tokens_RC = children.scores_RAK.clamp(max=0), children.tokens_RAK.flatten(1)
    scores_RAK = torch.where(scores_RAK.isnan(), -torch.inf, scores_RAK)
    if above is None:
        return Candidates(tokens_RC, torch.full_like(tokens_RC, -1), scores_RAK.flatten(1))
    scores_RA = growth.made.scores_RC.gather(1, above.ids_RW)
    parents_RC = above.ids_RW.repeat_interleave(growth.plan.tried, dim=1)
    return Candidates(tokens_RC, parents_RC, (scores_RA[..., None] + scores_RAK).flatten(1))


def _along(values_RN: Tensor, nodes_RND: Tensor) -> Tensor:
    """Return what the nodes on each node's path have, [R, N, D]."""
    return values_RN[:, None].expand(-1, values_RN.shape[1], -1).gather(2, nodes_RND)


def node_paths(parents_RN: Tensor, depth: int) -> NodePaths:
    """Return the ways to all nodes of trees no deeper than `depth`; the root's parent is -1."""
    up_RN = parents_RN.clamp(min=0)
    node_RN = torch.arange(up_RN.shape[1], device=up_RN.device).expand_as(up_RN)
    ways = [node_RN]
    for _ in range(depth - 1):
        ways.append(up_RN.gather(1, ways[-1]))
    way_RND = torch.stack(ways, -1)  # from the node up; the root's parent is the root
    depth_RN = (way_RND > 0).sum(-1)
    level_D = torch.arange(depth, device=up_RN.device)
    back_RND = depth_RN[..., None] - 1 - level_D
    return NodePaths(depth_RN, way_RND.gather(2, back_RND.clamp(min=0)), back_RND >= 0)


def kept_path(
    tokens_RN: Tensor, parents_RN: Tensor, paths: NodePaths, chosen_RN: Tensor, simulated_R: Tensor
) -> KeptPath:
    """Walk each tree from its root along the target's tokens, or so far along first children.

    Siblings have different tokens, so at most one node of a depth is on the way.

    Args:
        simulated_R: how many drafted tokens are kept whatever the target says; -1 lets it decide.
    """
    up_RN = parents_RN.clamp(min=0)
    agrees_RN = tokens_RN == chosen_RN.gather(1, up_RN)
    node_N = torch.arange(up_RN.shape[1], device=up_RN.device)
    earlier_NN = node_N[:, None] > node_N
    same_RNN = parents_RN[:, :, None] == parents_RN[:, None, :]
    is_first_RN = ~(same_RNN & earlier_NN).any(-1)
    simulated_R1 = simulated_R[:, None]
    first_RN = is_first_RN & (paths.depth_RN <= simulated_R1)
    follows_RN = torch.where(simulated_R1 >= 0, first_RN, agrees_RN)
    all_RND = follows_RN[:, None].expand(-1, len(node_N), -1).gather(2, paths.nodes_RND)
    kept_RN = (all_RND | ~paths.on_path_RND).all(-1) & (node_N > 0)
    level_D = torch.arange(1, paths.nodes_RND.shape[-1] + 1, device=up_RN.device)
    here_RND = kept_RN[..., None] & (paths.depth_RN[..., None] == level_D)
    node_RD = (here_RND * node_N[:, None]).amax(1)
    nodes_RE = torch.nn.functional.pad(node_RD, (1, 0))
    chain_RE = tokens_RN.gather(1, nodes_RE)
    chain_RE[:, 1:].masked_fill_(node_RD == 0, -2)
    chosen_RE = chosen_RN.gather(1, nodes_RE)
    chosen_RE[:, 1:].masked_fill_(node_RD == 0, 0)
    chosen_RE[:, :-1] = torch.where(node_RD > 0, chain_RE[:, 1:], chosen_RE[:, :-1])
    return KeptPath(nodes_RE, chain_RE, chosen_RE)


def simulated_lengths(seed_R: Tensor, committed_R: Tensor, thresholds_K: Tensor) -> Tensor:
    """Return how many drafted tokens simulated acceptance keeps of each row; -1 where the target decides."""
    word_R = scattered(seed_R, committed_R + 1)
    counts_R = (word_R[:, None] < thresholds_K).sum(1)
    return torch.where((thresholds_K >= 0).any(), counts_R, -1)
