"""Rounds of decoding in the library's terms: the models, described once, and each call's values.

Models lie a package higher than kernels, so they are read by their attributes (see `slipstream.models`).
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from slipstream.kernels.cpu.draft import DescribedDraft, DescribedEnds, DraftCache, describe_borrowed, readable_ends
from slipstream.kernels.cpu.library import NativeRound, NativeRoundModels
from slipstream.kernels.cpu.stack import DescribedStack, StackCache
from slipstream.kernels.cpu.weights import weight_address
from slipstream.kernels.ops import Cut, Follower, RoundModels, RoundResult, RoundStart


class DescribedModels:
    """The structure, and everything it points into."""

    def __init__(
        self, models: RoundModels, stacks: tuple[DescribedStack, DescribedStack | None], draft: DescribedDraft | None
    ) -> None:
        self._models = models
        self._watched = [(part, weight_address(part)) for part in _watched_parts(models)]
        self._parts = (stacks, draft)
        self._ends = DescribedEnds(models.target)
        self._target = stacks[0].native(models.captured_layers, None)
        self._blocks = None if stacks[1] is None else stacks[1].native((), None)
        self.vocab: int = models.target.embed_tokens.shape[0]
        self.native = NativeRoundModels(
            ctypes.addressof(self._target),
            ctypes.addressof(self._ends.native),
            None if self._blocks is None else ctypes.addressof(self._blocks),
            None if draft is None else ctypes.addressof(draft.native),
        )

    def describes(self, models: RoundModels) -> bool:
        """Tell whether these are the models it was made of, none given other weights as a whole since."""
        same = models is self._models or models == self._models
        return same and all(weight_address(part) == address for part, address in self._watched)


class RoundCache:
    """Models already described; they are forgotten with the target's cache of keys and values."""

    def __init__(self, stacks: StackCache, drafts: DraftCache) -> None:
        self._stacks, self._drafts = stacks, drafts
        self._known: weakref.WeakKeyDictionary[Any, DescribedModels] = weakref.WeakKeyDictionary()

    def find(self, models: RoundModels) -> DescribedModels | None:
        """Return the models' description; None if the library cannot read all of them."""
        known = self._known.get(models.target_kv)
        if known is None or not known.describes(models):
            known = self._describe(models)
            if known is not None:
                self._known[models.target_kv] = known
        return known

    def _describe(self, models: RoundModels) -> DescribedModels | None:
        if not _is_plain(models):
            return None
        target = self._stacks.find(models.target.layers, models.target_kv)
        draft, blocks = None, None
        if models.draft is not None:
            draft = self._drafts.find(models.draft)
            blocks = self._stacks.find(models.draft.layers, models.draft_kv)
            if draft is None:
                return None
        if isinstance(target, str) or isinstance(blocks, str):
            return None
        return DescribedModels(models, (target, blocks), draft)


class RoundCall:
    """One call's values, in and out."""

    def __init__(self, start: RoundStart, page_size: int, depth: int, cut: Cut) -> None:
        requests = len(start.roots)
        columns = max((len(pages) for pages in start.pages), default=0)
        table = [page for pages in start.pages for page in (*pages, *([0] * (columns - len(pages))))]
        self._depth = depth
        self._inputs: tuple[ctypes.Array[Any], ...] = (
            (c_int32 * len(table))(*table),
            (c_int64 * requests)(*start.roots),
            (c_int64 * requests)(*start.lengths),
            (c_float * requests)(*start.temperatures),
            (c_int64 * requests)(*start.seeds),
            (c_int32 * requests)(*start.limits),
        )
        self._followers = tuple(_pointers(part, start.followers) for part in range(3))
        self._borrowed = describe_borrowed(start.borrowed)
        late = (0 if follower is None else follower.late for follower in start.followers)
        self._late = (c_int32 * requests)(*late)
        capacity = max((f.capacity for f in start.followers if f is not None), default=0)
        self._scores = (c_float * (requests * depth))()
        self._checked, self._kept = (c_int32 * requests)(), (c_int32 * requests)()
        self._emitted = (c_int64 * (requests * (depth + 1)))()
        self._seconds = (c_double * 3)()
        outputs: tuple[ctypes.Array[Any], ...] = (
            self._late,
            self._scores,
            self._checked,
            self._kept,
            self._emitted,
            self._seconds,
        )
        self.native = NativeRound(
            *(ctypes.addressof(array) for array in self._inputs),
            None if self._borrowed is None else ctypes.addressof(self._borrowed),
            *(ctypes.addressof(array) for array in (*self._followers, *outputs)),
            columns,
            requests,
            page_size,
            depth,
            cut.floor,
            cut.need,
            start.follow,
            capacity,
        )
        self._start = start

    def result(self) -> RoundResult:
        """Return what the call left, and tell the followers how late they are."""
        for follower, late in zip(self._start.followers, self._late, strict=True):
            if follower is not None:
                follower.late = late
        depth, checked, emitted = self._depth, self._checked[:], self._emitted[:]
        starts = range(0, len(emitted), depth + 1)
        scores = self._scores[:] if any(self._start.limits) else []
        return RoundResult(
            tokens=[emitted[start : start + count + 1] for start, count in zip(starts, self._kept, strict=True)],
            checked=checked,
            scores=[scores[row * depth : (row + 1) * depth] for row in range(len(checked))],
            seconds=(self._seconds[0], self._seconds[1], self._seconds[2]),
        )


def _pointers(part: int, followers: Sequence[Follower | None]) -> "ctypes.Array[c_void_p]":
    addresses = [None if follower is None else follower.addresses[part] for follower in followers]
    return (c_void_p * len(followers))(*addresses)


def _watched_parts(models: RoundModels) -> list[Any]:
    """Return parts that change when a model is repacked, moved or given other weights as a whole."""
    parts = []
    for model in (models.target, models.draft):
        if model is not None:
            first, last = model.layers[0], model.layers[-1]
            parts += [first.self_attn.qkv_proj, first.mlp.down_proj, last.self_attn.o_proj]
            parts += [model.lm_head, model.embed_tokens]
    return parts if models.draft is None else [*parts, models.draft.fc]


def _is_plain(models: RoundModels) -> bool:
    """Tell whether everything between the calls is float32, as the library keeps it, and the target is whole."""
    target, draft = models.target, models.draft
    return (
        readable_ends(target)
        and target.ranks.size == 1
        and target.embed_tokens.dtype == torch.float32
        and sum(target.lm_head.parts.values()) <= target.embed_tokens.shape[0]
        and (draft is None or (draft.ranks.size == 1 and draft.embed_tokens.dtype == torch.float32))
    )
