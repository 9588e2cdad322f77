"""What attention is given: a layer's keys and values by slot, and which of them each query token of a pass may see.

Shape letters: T query tokens of a pass, R requests, P pages of a request, S slots of a cache, G key/value heads, d head
width, C width of a latent, D depth of a tree, K keys of a request.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class KvLayer:
    """One layer's keys and values, by slot; slot = page * page_size + offset (offsets are 64-bit throughout).

    Latent attention keeps one latent per token: keys are [S, 1, C], and values a view of the keys' first columns, in
    the same memory.

    Args:
        scales: of keys and values kept in FP8 (E4M3), uint8 [S, G] each: a key is its codes times 2^(scale - 127). One
            tensor twice where values are a view of the keys. Any strides will do, the same for both.
    """

    keys_SGd: Tensor
    values_SGd: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def scale_strides(self) -> tuple[int, int]:
        """How far apart the scales of slots and of heads are."""
        if self.scales is None:
            return 0, 0
        slots, heads = self.scales[0].stride()
        return slots, heads


@dataclass(frozen=True)
class TreePaths:
    """Where the keys of drafted nodes lie, where query tokens are the nodes of trees, as many in every request.

    Args:
        root_R: int32, the index of each request's root among its keys: keys up to it lie where the page table says.
        slots_TD: int32 [T, D], the slot of a node's ancestor at depth 1, 2, ...; from the node's own depth on its own.
    """

    root_R: Tensor
    slots_TD: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Which keys each query token of a pass may see; the same for every layer.

    A token's key has an index in its request's sequence of keys (`kv_index_T`), which the page table turns into a
    slot. A token sees the key `b` places before its own if `b > 63` or bit `b` of its `ancestors_T` is set: all ones
    is causal, and a draft tree clears the bits of nodes that are not ancestors. So prefill, decoding, chains and
    trees of up to 64 nodes are one rule.

    Args:
        query_starts_R1: int32 [R + 1], where each request's query tokens start.
        kv_lens_R: int32 [R], keys a request has once this pass has written its own.
        page_table_RP: int32 [R, P], page numbers; entries past the last used one are never read.
        max_queries: no request has more query tokens; known on the host, for kernels that may not ask the device.
        max_keys: no request has more keys, likewise.
        tree: a node's keys are then those of its own path, each at its position, as plain decoding has them:
            `kv_index_T` is the node's position, and all bits of `ancestors_T` are set.
    """

    query_starts_R1: Tensor
    kv_lens_R: Tensor
    page_table_RP: Tensor
    kv_index_T: Tensor
    ancestors_T: Tensor
    page_size: int
    max_queries: int | None = None
    max_keys: int | None = None
    tree: TreePaths | None = None

    @cached_property
    def by_node(self) -> "AttentionBatch":
        """The same attention with every node a request of its own, its keys found slot by slot.

        For kernels that do not read the keys before a tree once for all its nodes. Shapes follow from shapes.
        """
        assert self.tree is not None, "only trees have nodes"
        root_R, slots_TD = self.tree.root_R, self.tree.slots_TD
        num_nodes, num_tokens = len(slots_TD) // len(root_R), len(slots_TD)
        offset_O = torch.arange(self.page_size, dtype=torch.int32, device=root_R.device)
        slots_RK = (self.page_table_RP[:, :, None] * self.page_size + offset_O).flatten(1)
        beyond_RK = torch.arange(slots_RK.shape[1], device=root_R.device) - 1 - root_R[:, None]
        beyond_TK = beyond_RK[:, None].expand(-1, num_nodes, -1).reshape(num_tokens, -1)
        before_TK = slots_RK[:, None].expand(-1, num_nodes, -1).reshape(num_tokens, -1)
        drafted_TK = slots_TD.gather(1, beyond_TK.clamp(0, slots_TD.shape[1] - 1))
        return AttentionBatch(
            query_starts_R1=torch.arange(num_tokens + 1, dtype=torch.int32, device=root_R.device),
            kv_lens_R=(self.kv_index_T + 1).int(),
            page_table_RP=torch.where(beyond_TK < 0, before_TK, drafted_TK),
            kv_index_T=self.kv_index_T,
            ancestors_T=self.ancestors_T,
            page_size=1,
            max_queries=1,
            max_keys=slots_RK.shape[1],
        )
