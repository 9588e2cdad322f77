"""A drafter that knows the answers and hides them in random trees: acceptance without training."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.speculation.drafter import DraftView, Observed
from slipstream.speculation.tree import TreeBatch
from tiny import DEVICE, VOCAB


class OracleDrafter:
    """Draws random trees in which the true continuation is present with a given probability at each node."""

    name = "oracle"
    captured_layers: tuple[int, ...] = ()
    scratch = 0
    has_kv = False
    window = None

    def __init__(
        self,
        texts: Sequence[tuple[int, ...]],
        num_nodes: int,
        hit_rate: float,
        seed: int,
        device: torch.device = DEVICE,
    ) -> None:
        self._texts = texts
        self._hit_rate = hit_rate
        self._random = random.Random(seed)
        self.max_nodes = num_nodes
        self.device = device

    def propose(self, views: Sequence[DraftView]) -> TreeBatch:
        """Return random trees of random sizes."""
        rows = [self._tree(tuple(view.tokens)) for view in views]
        widest = max(len(tokens) for tokens, _ in rows)
        return TreeBatch(
            torch.tensor([tokens + [0] * (widest - len(tokens)) for tokens, _ in rows], device=self.device),
            torch.tensor([parents + [-1] * (widest - len(parents)) for _, parents in rows], device=self.device),
            torch.tensor([len(tokens) for tokens, _ in rows], device=self.device),
        )

    def observe(self, observed: Sequence[Observed], captured: tuple[Tensor, ...]) -> None:
        """Learn nothing."""

    def forget(self, request_id: int, num_reusable: int = 0) -> None:
        """Keep nothing."""

    def lose_page(self, page: int) -> None:
        """Keep nothing."""

    def _tree(self, known: tuple[int, ...]) -> tuple[list[int], list[int]]:
        truth = next((text[len(known) :] for text in self._texts if text[: len(known)] == known), ())
        tokens, parents, depths = [known[-1]], [-1], [0]
        right = 0
        for _ in range(1, self._random.randint(1, self.max_nodes)):
            parent = right if self._random.random() < 0.6 else self._random.randrange(len(tokens))
            depth = depths[parent] + 1
            hit = parent == right and depth <= len(truth) and self._random.random() < self._hit_rate
            token = truth[depth - 1] if hit else self._random.randrange(VOCAB)
            if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            if hit:
                right = len(tokens) - 1
        return tokens, parents
