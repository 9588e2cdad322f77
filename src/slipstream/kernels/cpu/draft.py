"""An EAGLE-3 draft as the library's structure, worked out once, for drafting whole chains in one call.

The draft lies a package higher than kernels, so it is read by its attributes (see `slipstream.models.eagle3`).
Shape letters: R requests, V draft vocabulary, D draft width, K tokens of a chain.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import (
    FORMATS,
    NativeBorrowed,
    NativeChain,
    NativeDraft,
    NativeEmbedding,
    NativeEnds,
    NativeLinear,
)
from slipstream.kernels.cpu.weights import SUFFIX, dense_format, describe_linear, is_dense, weight_address
from slipstream.kernels.ops import Borrowed, ChainStart, Cut
from slipstream.quant.gguf_blocks import BLOCK_FORMATS

_NORM_EACH, _NORM_JOINED = 1, 2  # native/abi.h


class DescribedEnds:
    """A model's head, norm and table of embeddings, and the tensors they point into."""

    def __init__(self, model: Any) -> None:
        self._kept: list[object] = []
        self.native = NativeEnds(
            self.linear(model.lm_head),
            self._embedding(model.embed_tokens),
            self.floats(model.norm.weight),
            model.norm.eps,
        )

    def linear(self, linear: Any) -> NativeLinear:
        """Point at a layer's weight and bias, for as long as this lives."""
        return describe_linear(linear, self._kept)

    def floats(self, tensor: Tensor) -> int:
        """Point at a tensor as float32 numbers."""
        return self.keep(tensor.detach().float().contiguous()).data_ptr()

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a tensor for as long as this lives."""
        self._kept.append(tensor)
        return tensor

    def _embedding(self, table: Any) -> NativeEmbedding:
        if table.weight is not None:
            weight = self.keep(table.weight.detach())
            return NativeEmbedding(weight.data_ptr(), dense_format(weight))
        codes = self.keep(table.packed.codes)
        return NativeEmbedding(codes.data_ptr(), FORMATS[table.packed.format.removesuffix(SUFFIX)])


class DescribedDraft:
    """The structure, and the tensors it points into."""

    def __init__(self, draft: Any) -> None:
        self.witness = _witness(draft)
        self._ends = ends = DescribedEnds(draft)
        token_ids_V = ends.keep(draft.token_ids_V.to(torch.int64).contiguous())
        rows = draft.embed_tokens.shape[0]
        if int(token_ids_V.min()) < 0 or int(token_ids_V.max()) >= rows:
            raise KernelError(f"A draft names tokens outside 0 to {rows - 1}, the rows of its table of embeddings.")
        norms = [draft.input_norm] if draft.input_norm is not None else list(draft.fc_norm)
        self.native = NativeDraft(
            ends.native,
            ends.linear(draft.fc),
            ends.floats(torch.cat([norm.weight for norm in norms])) if norms else None,
            token_ids_V.data_ptr(),
            norms[0].eps if norms else 0.0,
            _NORM_JOINED if draft.input_norm is not None else _NORM_EACH if norms else 0,
            int(draft.spec.feedback == "post_norm"),
        )


class DraftCache:
    """Drafts already described; one is forgotten with its owner."""

    def __init__(self) -> None:
        self._drafts: weakref.WeakKeyDictionary[Any, DescribedDraft] = weakref.WeakKeyDictionary()

    def find(self, draft: Any) -> DescribedDraft | None:
        """Return a draft's description; None if the library cannot read its head, its fusion or its embeddings."""
        if not readable_ends(draft) or not _readable(draft.fc, None):
            return None
        known = self._drafts.get(draft)
        if known is None or known.witness != _witness(draft):
            known = self._drafts[draft] = DescribedDraft(draft)
        return known


def describe_chain(start: ChainStart, depth: int, cut: Cut, outputs: tuple[Tensor, Tensor]) -> NativeChain:
    """Point at what a chain starts from and where its log-probabilities and tokens go."""
    pages_RP = start.page_table_RP
    hidden_RD = start.hidden_RD.to(torch.float32, copy=True)
    logits_RV = start.logits_RV.float()
    borrowed = describe_borrowed(start.borrowed)
    assert pages_RP.dtype == torch.int32 and start.lengths_R.dtype == start.seed_R.dtype == torch.int64
    native = NativeChain(
        pages_RP.data_ptr(),
        start.lengths_R.data_ptr(),
        start.temperature_R.data_ptr(),
        start.seed_R.data_ptr(),
        logits_RV.data_ptr(),
        hidden_RD.data_ptr(),
        None if borrowed is None else ctypes.addressof(borrowed),
        None,
        *(output.data_ptr() for output in outputs),
        pages_RP.shape[1],
        len(pages_RP),
        start.page_size,
        depth,
        cut.floor,
        cut.need,
        cut.trust,
    )
    native.keep = (start, hidden_RD, logits_RV, borrowed, outputs)
    return native


def describe_borrowed(borrowed: Sequence[Borrowed | None]) -> "ctypes.Array[NativeBorrowed] | None":
    """Point at what each request has borrowed; None if nobody has. It must outlive the description."""
    if not any(borrowed):
        return None
    each = (
        NativeBorrowed() if own is None else NativeBorrowed(*own.addresses, own.count, own.bonus) for own in borrowed
    )
    return (NativeBorrowed * len(borrowed))(*each)


def readable_ends(model: Any) -> bool:
    """Tell whether the library can read a model's head and its table of embeddings."""
    return _readable(model.lm_head, None) and _readable(model.embed_tokens, tuple(BLOCK_FORMATS))


def _readable(part: Any, formats: tuple[str, ...] | None) -> bool:
    """Tell whether a weight or a table is dense or, if packed, in panels (of one of some formats)."""
    if part.weight is not None:
        return is_dense(part.weight)
    name, is_panels = part.packed.format.removesuffix(SUFFIX), part.packed.format.endswith(SUFFIX)
    return is_panels and (formats is None or name in formats)


def _witness(draft: Any) -> tuple[int, ...]:
    """Return what changes when a draft is repacked or given another table."""
    parts = (draft.lm_head, draft.embed_tokens, draft.fc)
    return tuple(map(weight_address, parts))
