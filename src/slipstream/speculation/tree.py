"""Draft trees: a chain is a tree of width one, and no draft is a lone root.

Shape letters: R requests, N nodes of a tree with its root (node 0), in an order where parents come before children.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import ConfigError

MAX_NODES = 64
"""Nodes of a tree, its root included: one bit each in an attention mask of 64 bits."""


@dataclass(frozen=True)
class TreeShape:
    """How a drafter grows its trees.

    Args:
        depth: drafted tokens on the longest path.
        width: nodes expanded on each level, and children tried of each (EAGLE-2's top-k).
        budget: drafted nodes kept for the target to check, best cumulative scores first; 0 means all candidates.
        paths: a static tree instead: the path of each node as ranks among its siblings, such as ((0,), (1,), (0, 0)).
    """

    depth: int = 3
    width: int = 1
    budget: int = 0
    paths: tuple[tuple[int, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.paths:
            _check_paths(self.paths)
            object.__setattr__(self, "depth", max(len(path) for path in self.paths))
        if not 1 <= self.depth < MAX_NODES:
            raise ConfigError(f"A tree's depth is {self.depth}; it lies between 1 and {MAX_NODES - 1}.")
        if self.width < 1:
            raise ConfigError(f"A tree's width is {self.width}; it must be at least 1, which is a chain.")
        if self.budget < 0:
            raise ConfigError(f"A tree's budget is {self.budget}; it must be at least 0, which checks every candidate.")
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"The tree would have {self.num_nodes} nodes with its root; at most {MAX_NODES} fit. "
                f"Give a budget of at most {MAX_NODES - 1}."
            )
        if self.scratch > MAX_NODES:
            raise ConfigError(
                f"Drafting {self.depth} levels of width {self.width} needs {self.scratch} drafted keys; at most "
                f"{MAX_NODES} fit. Lower depth or width."
            )

    @staticmethod
    def chain(length: int) -> "TreeShape":
        """Return the shape of a chain of drafted tokens."""
        return TreeShape(depth=length, width=1)

    @property
    def num_candidates(self) -> int:
        """Nodes drafted before the budget picks among them."""
        return len(self.paths) or self.width + (self.depth - 1) * self.width**2

    @property
    def num_nodes(self) -> int:
        """Nodes the target checks, the root included."""
        return 1 + (min(self.budget, self.num_candidates) if self.budget else self.num_candidates)

    @property
    def is_chain(self) -> bool:
        """Tell whether every node has one child at most."""
        return self.num_nodes == self.depth + 1

    @property
    def scratch(self) -> int:
        """Keys the draft writes while it grows a tree, beyond those it keeps."""
        if self.paths:
            return len({path[:-1] for path in self.paths if len(path) > 1})
        return (self.depth - 1) * self.width

    def within(self, most_drafted: int) -> "TreeShape | None":
        """Return the shape with no more drafted nodes than this: its best, or first, ones; None if none is left."""
        if most_drafted >= self.num_nodes - 1:
            return self
        if most_drafted < 1:
            return None
        if self.paths:
            return TreeShape(paths=tuple(sorted(self.paths, key=lambda path: (len(path), path))[:most_drafted]))
        if self.width == 1 or most_drafted <= self.depth:
            return TreeShape.chain(min(self.depth, most_drafted))
        return TreeShape(self.depth, self.width, most_drafted)

    def __str__(self) -> str:
        """Name the shape as people do."""
        if self.paths:
            return f"static tree of {len(self.paths)} nodes, depth {self.depth}"
        if self.width == 1:
            return f"chain of {self.depth}"
        return f"dynamic tree: depth {self.depth}, width {self.width}, {self.num_nodes - 1} nodes"


def _check_paths(paths: tuple[tuple[int, ...], ...]) -> None:
    known = set(paths)
    if len(known) != len(paths) or () in known:
        raise ConfigError("A static tree names each node's path once, and never the empty path (the root).")
    for path in paths:
        if min(path) < 0:
            raise ConfigError(f"A static tree's path {path} has a negative rank.")
        if len(path) > 1 and path[:-1] not in known:
            raise ConfigError(f"A static tree's node {path} has no parent {path[:-1]} in the tree.")


@dataclass(frozen=True)
class TreeBatch:
    """The draft trees of R requests, padded to N nodes.

    Args:
        tokens_RN: int64; node 0 is the root, a token already emitted.
        parents_RN: int64; -1 for the root. Padding nodes have parent -1 too and lie past `sizes_R`.
        sizes_R: int64, nodes in use, the root included.
    """

    tokens_RN: Tensor
    parents_RN: Tensor
    sizes_R: Tensor

    @staticmethod
    def lone_roots(root_tokens: list[int], device: torch.device) -> "TreeBatch":
        """Return trees that draft nothing."""
        tokens_R1 = torch.tensor(root_tokens, dtype=torch.int64, device=device)[:, None]
        return TreeBatch(tokens_R1, torch.full_like(tokens_R1, -1), torch.ones_like(tokens_R1[:, 0]))

    @staticmethod
    def chains(chains: list[list[int]], device: torch.device) -> "TreeBatch":
        """Return one chain for each list of tokens, the root first."""
        longest = max((len(chain) for chain in chains), default=1)
        tokens_RN = torch.tensor([chain + [0] * (longest - len(chain)) for chain in chains], device=device)
        sizes_R = torch.tensor([len(chain) for chain in chains], device=device)
        node_N = torch.arange(longest, device=device)
        parents_RN = torch.where(node_N[None, :] < sizes_R[:, None], node_N - 1, -1)
        return TreeBatch(tokens_RN.reshape(len(chains), longest), parents_RN, sizes_R)

    @staticmethod
    def pack(trees: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> "TreeBatch":
        """Return trees given as the tokens and the parents of their nodes, each from its root (parent -1) on."""
        longest = max((len(tokens) for tokens, _ in trees), default=1)
        tokens_RN = [[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in trees]
        parents_RN = [[*parents, *[-1] * (longest - len(parents))] for _, parents in trees]
        sizes_R = torch.tensor([len(tokens) for tokens, _ in trees], device=device)
        return TreeBatch(torch.tensor(tokens_RN, device=device), torch.tensor(parents_RN, device=device), sizes_R)

    def to(self, device: torch.device) -> "TreeBatch":
        """Return the trees on another device."""
        return TreeBatch(self.tokens_RN.to(device), self.parents_RN.to(device), self.sizes_R.to(device))

    def replace(self, rows: list[int], trees: "TreeBatch") -> "TreeBatch":
        """Return these trees with some rows taken from another batch."""
        num_nodes = max(self.tokens_RN.shape[1], trees.tokens_RN.shape[1])
        out = TreeBatch(
            _widen(self.tokens_RN, num_nodes, 0), _widen(self.parents_RN, num_nodes, -1), self.sizes_R.clone()
        )
        out.tokens_RN[rows] = _widen(trees.tokens_RN, num_nodes, 0)
        out.parents_RN[rows] = _widen(trees.parents_RN, num_nodes, -1)
        out.sizes_R[rows] = trees.sizes_R
        return out

    def in_preorder(self) -> "TreeBatch":
        """Return the same trees with each node's descendants right behind it, siblings in their order.

        A path then goes on from the node before, or begins anew at a sibling.
        """
        before_N = torch.arange(-1, self.tokens_RN.shape[1] - 1, device=self.tokens_RN.device)
        if not bool(((self.parents_RN != before_N) & self.valid_RN).any()):
            return self
        trees = []
        for size, tokens, parents in zip(
            self.sizes_R.tolist(), self.tokens_RN.tolist(), self.parents_RN.tolist(), strict=True
        ):
            order = _preorder(parents[:size])
            place = {node: index for index, node in enumerate(order)}
            trees.append(([tokens[node] for node in order], [place.get(parents[node], -1) for node in order]))
        return TreeBatch.pack(trees, self.tokens_RN.device)

    def unpack(self) -> list["Tree"]:
        """Return the trees as plain values, without padding."""
        columns = zip(self.sizes_R.tolist(), self.tokens_RN.tolist(), self.parents_RN.tolist(), strict=True)
        trees = []
        for size, tokens, parents in columns:
            depths, bits = [0], [-1]  # the root sees all that comes before it
            for node in range(1, size):
                parent = parents[node]
                depths.append(depths[parent] + 1)
                bits.append(1 | bits[parent] << (node - parent))
            trees.append(Tree(tokens[:size], parents[:size], depths, bits))
        return trees

    @property
    def valid_RN(self) -> Tensor:
        """Tell nodes from padding."""
        return torch.arange(self.tokens_RN.shape[1], device=self.tokens_RN.device) < self.sizes_R[:, None]


@dataclass(frozen=True)
class Tree:
    """One tree as plain values, a list entry for each node: token, parent (-1 = none), depth, attention bits."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    bits: list[int]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the drafted tokens from the root's child down to a node; empty for the root."""
        return tuple(self.tokens[above] for above in nodes_to(self.parents, node))

    def paths(self) -> list[range]:
        """Return the nodes of a tree in preorder as stretches, each of which goes on from node to node.

        The first begins at the root; each of the others hangs from an earlier node.
        """
        begins = [node for node, parent in enumerate(self.parents) if node == 0 or parent != node - 1]
        return [range(first, end) for first, end in itertools.pairwise([*begins, len(self.tokens)])]

    def nodes_by_depth(self) -> list[int]:
        """Return how many nodes were drafted at each depth, from the root's children on."""
        counts = [0] * max(self.depths)
        for depth in self.depths[1:]:
            counts[depth - 1] += 1
        return counts


def nodes_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes on the way from the root's child to a node, itself included; nothing for the root."""
    nodes = []
    while node > 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def _preorder(parents: Sequence[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in parents]
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
    order, left = [], [0]
    while left:
        order.append(left.pop())
        left += children[order[-1]]
    return order


def _widen(values_RN: Tensor, num_nodes: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values_RN, (0, num_nodes - values_RN.shape[1]), value=fill)


def relative_bits(sees_RNN: Tensor) -> Tensor:
    """Turn "node i sees node j" into attention's form: bit b of node i says whether it sees node i - b.

    Bits beyond the first node stand for keys that come before the tree, which every node sees.
    """
    num_nodes = sees_RNN.shape[-1]
    node_N = torch.arange(num_nodes, device=sees_RNN.device)
    distance_NN = node_N[:, None] - node_N[None, :]
    seen_RNN = sees_RNN & (distance_NN >= 0)
    inside_RN = (seen_RNN.long() << distance_NN.clamp(min=0)).sum(-1)
    # 1 << 64 would wrap, so the last node's "before the tree" is built from the shift that still fits.
    before_N = torch.where(node_N < 63, -1 << (node_N + 1).clamp(max=63), 0)
    return inside_RN | before_N
