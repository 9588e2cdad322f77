"""The chains of a step as tensors: the rows of a batch, where their nodes lie, what came of them.

Shape letters: R rows, N nodes of a row's chain (the root and what is drafted behind it), P pages of a row, E = N + 1
values handed out per row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChainRows:
    """The batch of a step, int64 [R] each unless said; `executors.cuda_graph.state.Loaded` says what they mean.

    Args:
        temperature_R: float32.
        pages_RP: int32; the rows may lie apart.
    """

    committed_R: Tensor
    root_R: Tensor
    active_R: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    drafts_until_R: Tensor
    pages_RP: Tensor


@dataclass(frozen=True)
class ChainPlaces:
    """Where the nodes of a step lie, the root at each row's committed end; contiguous, written by `place_chains`.

    Args:
        chain_RN: the tokens; `place_chains` writes the roots, the drafts follow.
        index_RN: the nodes' places among their rows' keys.
        position_RN: the position of the token each node foretells; also how many keys there are up to the node.
        index_NR: as `index_RN`, node by node, for the passes over one node of every row; the next two likewise.
        kv_lens_NR: `position_NR` as int32.
    """

    chain_RN: Tensor
    index_RN: Tensor
    slots_RN: Tensor
    position_RN: Tensor
    index_NR: Tensor
    slots_NR: Tensor
    position_NR: Tensor
    kv_lens_NR: Tensor

    @staticmethod
    def allocate(num_rows: int, num_nodes: int, device: torch.device) -> "ChainPlaces":
        """Return room for the places of a batch."""

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        by_row, by_node = (num_rows, num_nodes), (num_nodes, num_rows)
        return ChainPlaces(
            chain_RN=empty(torch.int64, *by_row),
            index_RN=empty(torch.int64, *by_row),
            slots_RN=empty(torch.int64, *by_row),
            position_RN=empty(torch.int64, *by_row),
            index_NR=empty(torch.int64, *by_node),
            slots_NR=empty(torch.int64, *by_node),
            position_NR=empty(torch.int64, *by_node),
            kv_lens_NR=empty(torch.int32, *by_node),
        )


@dataclass(frozen=True)
class ChainOutcome:
    """What a step came to; contiguous but for `out_RE`, int64 unless said, written by `accept_chains`.

    Args:
        emitted_RN: the tokens each row emits; those past its last mean nothing.
        last_R: the last accepted node of each row, among the R * N nodes.
        last_index_R: that node's place among its row's keys.
        last_keys_R: int32, how many keys there are up to it.
        out_RE: how many tokens each row emits, then the tokens; the rows may lie apart.
    """

    emitted_RN: Tensor
    last_R: Tensor
    last_index_R: Tensor
    last_keys_R: Tensor
    out_RE: Tensor

    @staticmethod
    def allocate(num_rows: int, num_nodes: int, device: torch.device) -> "ChainOutcome":
        """Return room for what a batch comes to."""
        emitted_RN = torch.zeros(num_rows, num_nodes, dtype=torch.int64, device=device)
        out_RE = torch.zeros(num_rows, num_nodes + 1, dtype=torch.int64, device=device)
        last_R, index_R = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        return ChainOutcome(emitted_RN, last_R, index_R, torch.zeros_like(last_R, dtype=torch.int32), out_RE)
