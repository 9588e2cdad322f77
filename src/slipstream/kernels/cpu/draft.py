"""An EAGLE-3 draft as the library's structure, worked out once, for drafting whole chains in one call.

The draft lies a package higher than kernels, so it is read by its attributes (see `slipstream.models.eagle3`).
Shape letters: R requests, V draft vocabulary, D draft width, K tokens of a chain.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import FORMATS, NativeChain, NativeDraft, NativeEmbedding
from slipstream.kernels.cpu.weights import SUFFIX, dense_format, describe_dense, describe_panels, is_dense
from slipstream.kernels.ops import ChainStart

_TABLES = ("q4_1", "q4_0", "q8_0")


class DescribedDraft:
    """The structure, and the tensors it points into."""

    def __init__(self, draft: Any) -> None:
        self._tensors: list[Tensor] = []
        self.witness = _witness(draft)
        token_ids_V = self._keep(draft.token_ids_V.to(torch.int64).contiguous())
        rows = draft.embed_tokens.shape[0]
        if int(token_ids_V.min()) < 0 or int(token_ids_V.max()) >= rows:
            raise KernelError(f"A draft names tokens outside 0 to {rows - 1}, the rows of its table of embeddings.")
        norm_D = self._keep(draft.norm.weight.detach().float().contiguous())
        self.native = NativeDraft(
            self._head(draft.lm_head),
            self._embedding(draft.embed_tokens),
            norm_D.data_ptr(),
            token_ids_V.data_ptr(),
            draft.norm.eps,
            int(draft.spec.feedback == "post_norm"),
        )

    def _head(self, head: Any) -> Any:
        bias_V = None if head.bias is None else self._keep(head.bias.detach().float().contiguous())
        if head.weight is not None:
            return describe_dense(self._keep(head.weight.detach()), bias_V)
        self._tensors.extend([head.packed.codes, *head.packed.scales.values()])
        return describe_panels(head.packed, bias_V)

    def _embedding(self, table: Any) -> NativeEmbedding:
        if table.weight is not None:
            weight = self._keep(table.weight.detach())
            return NativeEmbedding(weight.data_ptr(), dense_format(weight))
        codes = self._keep(table.packed.codes)
        return NativeEmbedding(codes.data_ptr(), FORMATS[table.packed.format.removesuffix(SUFFIX)])

    def _keep(self, tensor: Tensor) -> Tensor:
        self._tensors.append(tensor)
        return tensor


class DraftCache:
    """Drafts already described; one is forgotten with its owner."""

    def __init__(self) -> None:
        self._drafts: weakref.WeakKeyDictionary[Any, DescribedDraft] = weakref.WeakKeyDictionary()

    def find(self, draft: Any) -> DescribedDraft | None:
        """Return a draft's description; None if the library cannot read its head or its table of embeddings."""
        if not _readable(draft.lm_head, None) or not _readable(draft.embed_tokens, _TABLES):
            return None
        known = self._drafts.get(draft)
        if known is None or known.witness != _witness(draft):
            known = self._drafts[draft] = DescribedDraft(draft)
        return known


def describe_chain(start: ChainStart, depth: int, floor: float, outputs: tuple[Tensor, Tensor]) -> NativeChain:
    """Point at what a chain starts from and where its log-probabilities and entries go."""
    pages_RP = start.page_table_RP
    hidden_RD = start.hidden_RD.to(torch.float32, copy=True)
    logits_RV = start.logits_RV.float()
    assert pages_RP.dtype == torch.int32 and start.lengths_R.dtype == start.seed_R.dtype == torch.int64
    native = NativeChain(
        pages_RP.data_ptr(),
        start.lengths_R.data_ptr(),
        start.temperature_R.data_ptr(),
        start.seed_R.data_ptr(),
        logits_RV.data_ptr(),
        hidden_RD.data_ptr(),
        *(output.data_ptr() for output in outputs),
        pages_RP.shape[1],
        len(pages_RP),
        start.page_size,
        depth,
        floor,
    )
    native.keep = (start, hidden_RD, logits_RV, outputs)
    return native


def _readable(part: Any, formats: tuple[str, ...] | None) -> bool:
    """Tell whether a head or a table is dense or, if packed, in panels (of one of some formats)."""
    if part.weight is not None:
        return is_dense(part.weight)
    name, is_panels = part.packed.format.removesuffix(SUFFIX), part.packed.format.endswith(SUFFIX)
    return is_panels and (formats is None or name in formats)


def _witness(draft: Any) -> tuple[int, ...]:
    """Return what changes when a draft is repacked or given another table."""
    return tuple(
        part.weight.data_ptr() if part.weight is not None else part.packed.codes.data_ptr()
        for part in (draft.lm_head, draft.embed_tokens)
    )
