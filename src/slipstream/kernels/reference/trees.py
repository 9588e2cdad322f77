"""A captured step's bookkeeping for trees with torch alone: paths of nodes, and which path the target goes along.

Shapes follow from shapes, and nothing is asked of the host.

Shape letters: R rows, N nodes of a tree with its root (node 0), D drafted tokens on the longest path, E = D + 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.reference.noise import scattered


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
        chosen_RE: the target's tokens at them; where acceptance is simulated, the next node's.
    """

    nodes_RE: Tensor
    chain_RE: Tensor
    chosen_RE: Tensor


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
    chosen_RE[:, :-1] = torch.where(node_RD > 0, chain_RE[:, 1:], chosen_RE[:, :-1])
    return KeptPath(nodes_RE, chain_RE, chosen_RE)


def simulated_lengths(seed_R: Tensor, committed_R: Tensor, thresholds_K: Tensor) -> Tensor:
    """Return how many drafted tokens simulated acceptance keeps of each row; -1 where the target decides."""
    word_R = scattered(seed_R, committed_R + 1)
    counts_R = (word_R[:, None] < thresholds_K).sum(1)
    return torch.where((thresholds_K >= 0).any(), counts_R, -1)
