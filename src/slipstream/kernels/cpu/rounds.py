"""Rounds of decoding in the library's terms: the models, described once, and each call's values.

Models lie a package higher than kernels, so they are read by their attributes (see `slipstream.models`).
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.draft import DescribedDraft, DescribedEnds, DraftCache, describe_borrowed, readable_ends
from slipstream.kernels.cpu.library import NativeRoundModels, NativeRounds
from slipstream.kernels.cpu.slots import MaskCallback, NativeSampleOut, describe_slots
from slipstream.kernels.cpu.stack import DescribedStack, StackCache
from slipstream.kernels.cpu.text import NativeText
from slipstream.kernels.cpu.weights import weight_address
from slipstream.kernels.ops import Cut
from slipstream.kernels.rounds import (
    Copying,
    DraftedNodes,
    Follower,
    MaskFiller,
    Onward,
    RoundModels,
    RoundResult,
    RoundStart,
)
from slipstream.kernels.sampling import MAX_TOP, Sampled, num_words


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


class RoundsCall:
    """One call's values, in and out."""

    def __init__(self, start: RoundStart, page_size: int, depth: int, cut: Cut) -> None:
        requests = len(start.roots)
        copying = start.copying or Copying([None] * requests, [0] * requests)
        room = start.room or [0] * requests
        nodes = max(depth + max(copying.limits, default=0), *room, 0)
        onward = start.onward or Onward(1, 0.0, [1 + nodes] * requests, [()] * requests)
        rounds = onward.rounds
        columns = max((len(pages) for pages in start.pages), default=0)
        self._depth, self._nodes = depth, nodes
        self._texts = None if start.copying is None else _texts(copying)
        self._copies, self._room = (c_int32 * requests)(*copying.limits), (c_int32 * requests)(*room)
        self._inputs = _inputs(start, onward, page_size, columns)
        self._slots, self._limits = (c_int64 * requests)(*start.slots), (c_int32 * requests)(*start.limits)
        self._masks = _Masks(self, start.masks, requests, nodes, start.sampling.vocab_size)
        self._followers = tuple(_pointers(part, start.followers) for part in range(3))
        self._borrowed = describe_borrowed(start.borrowed)
        late = (0 if follower is None else follower.late for follower in start.followers)
        self._late = (c_int32 * requests)(*late)
        capacity = max((f.capacity for f in start.followers if f is not None), default=0)
        outputs = self._outputs(rounds * requests)
        self._scored = not start.sampling.scored_slots.isdisjoint(start.slots)
        places = len(self._emitted) if self._scored else 0
        self._logprob, self._top_logprobs = torch.empty(places), torch.empty(places, MAX_TOP)
        self._top_ids = torch.empty(places, MAX_TOP, dtype=torch.int64)
        scored = (part.data_ptr() for part in (self._logprob, self._top_ids, self._top_logprobs))
        self._seconds = (c_double * (3 * rounds))()
        self._ran = (c_int32 * 1)()
        self.native = NativeRounds(
            *(ctypes.addressof(array) for array in self._inputs),
            None if onward.hurry is None else onward.hurry.address,
            describe_slots(start.sampling),
            ctypes.addressof(self._slots),
            *self._masks.native,
            ctypes.addressof(self._limits),
            None if self._borrowed is None else ctypes.addressof(self._borrowed),
            *(ctypes.addressof(array) for array in self._followers),
            ctypes.addressof(self._late),
            None if self._texts is None else ctypes.addressof(self._texts),
            ctypes.addressof(self._copies),
            ctypes.addressof(self._room),
            None,
            *(ctypes.addressof(array) for array in outputs),
            NativeSampleOut(None, *scored),
            *(ctypes.addressof(array) for array in (self._seconds, self._ran)),
            onward.patience_s,
            columns,
            requests,
            page_size,
            depth,
            nodes,
            cut.floor,
            cut.need,
            cut.trust,
            cut.least,
            cut.row,
            start.follow,
            capacity,
            rounds,
        )
        self._start = start

    def _outputs(self, places: int) -> "tuple[ctypes.Array[Any], ...]":
        """Allocate what the call leaves for each request in each round; return it in the library's order."""
        self._scores = (c_float * (places * self._depth))()
        self._drafted, self._parents = (c_int64 * (places * self._nodes))(), (c_int32 * (places * self._nodes))()
        self._guessed, self._checked, self._kept, self._foretold = ((c_int32 * places)() for _ in range(4))
        self._emitted = (c_int64 * (places * (self._nodes + 1)))()
        counts = (self._guessed, self._checked, self._kept, self._foretold)
        return self._scores, self._drafted, self._parents, *counts, self._emitted

    def fill_masks(self, fill: MaskFiller, number: int, words_MW: Tensor) -> Sequence[Sequence[int]] | None:
        """Let masks be made for a round, which is drafted, and other nodes take the place of those."""
        requests = len(self._start.roots)
        emitted: list[list[int]] = [[] for _ in range(requests)]
        for earlier in range(number):
            for request, tokens in enumerate(self._tokens(earlier)):
                emitted[request] += tokens
        drafted = self._nodes_of(number)
        allowed = fill(emitted, drafted, words_MW)
        if allowed is None:
            return None
        for request, (before, after) in enumerate(zip(drafted, allowed, strict=True)):
            if after.nodes is not before:
                self._put(number * requests + request, after.nodes)
        return [one.masks for one in allowed]

    def results(self) -> list[RoundResult]:
        """Return what the call left, round by round, and tell the followers how late they are."""
        self._masks.raise_failure()
        for follower, late in zip(self._start.followers, self._late, strict=True):
            if follower is not None:
                follower.late = late
        return [self._round(number) for number in range(self._ran[0])]

    def _nodes_of(self, number: int) -> list[DraftedNodes]:
        """Return what was drafted and copied for each request in a round."""
        drafted, requests = [], len(self._start.roots)
        for at in range(number * requests, (number + 1) * requests):
            part = slice(at * self._nodes, at * self._nodes + self._checked[at])
            drafted.append(DraftedNodes(self._drafted[part], self._parents[part], self._guessed[at]))
        return drafted

    def _put(self, at: int, nodes: DraftedNodes) -> None:
        """Let other nodes be checked in a request's round; the library looks at what they are."""
        part = slice(at * self._nodes, at * self._nodes + len(nodes.tokens))
        self._drafted[part], self._parents[part] = list(nodes.tokens), list(nodes.parents)
        self._checked[at], self._guessed[at] = len(nodes.tokens), nodes.guessed

    def _tokens(self, number: int) -> list[list[int]]:
        """Return what each request emitted in a round."""
        place, first = self._nodes + 1, number * len(self._start.roots)
        kept = self._kept[first : first + len(self._start.roots)]
        return [self._emitted[at * place : at * place + count + 1] for at, count in enumerate(kept, start=first)]

    def _round(self, number: int) -> RoundResult:
        depth, requests, place = self._depth, len(self._start.roots), self._nodes + 1
        first, last = number * requests, (number + 1) * requests
        scores = self._scores[first * depth : last * depth] if any(self._start.limits) else []
        return RoundResult(
            tokens=self._tokens(number),
            drafted=self._nodes_of(number),
            foretold=self._foretold[first:last],
            scores=[scores[row * depth : (row + 1) * depth] for row in range(requests)],
            seconds=(self._seconds[3 * number], self._seconds[3 * number + 1], self._seconds[3 * number + 2]),
            sampled=self._sampled() if self._scored else None,
            places=range(first * place, last * place, place),
        )

    def _sampled(self) -> Sampled:
        tokens = torch.frombuffer(self._emitted, dtype=torch.int64)
        return Sampled(tokens, self._logprob, self._top_ids, self._top_logprobs)


class _Masks:
    """The masks of a call's rounds, and the way back into Python to have them made."""

    def __init__(self, call: RoundsCall, fill: MaskFiller | None, requests: int, drafted: int, vocab: int) -> None:
        self._failure: Exception | None = None
        self.native: tuple[Any, ...] = (MaskCallback(), None, None, 0, 0)
        if fill is None:
            return
        nodes = requests * (drafted + 1)
        self._words_MW = torch.zeros(nodes + 1, num_words(vocab), dtype=torch.int32)
        self._rows = (c_int64 * nodes)()

        def filled(number: int) -> int:
            try:
                rows = call.fill_masks(fill, number, self._words_MW)
            except Exception as error:  # noqa: BLE001 (C++ lies between here and whoever handles it)
                self._failure = error
                return 1
            if rows is None:
                return 1
            for at, own in enumerate(rows):
                self._rows[at * (drafted + 1) : at * (drafted + 1) + len(own)] = list(own)
            return 0

        self._callback = MaskCallback(filled)
        shape = self._words_MW.shape
        self.native = (self._callback, self._words_MW.data_ptr(), ctypes.addressof(self._rows), *shape)

    def raise_failure(self) -> None:
        """Raise what making masks raised."""
        if self._failure is not None:
            raise self._failure


def _inputs(start: RoundStart, onward: Onward, page_size: int, columns: int) -> "tuple[ctypes.Array[Any], ...]":
    """Return the pages, roots and lengths of requests, and where their answers end, in the library's order."""
    requests = len(start.roots)
    table = [page for pages in start.pages for page in (*pages, *([0] * (columns - len(pages))))]
    ends = [token for tokens in onward.ends for token in tokens]
    return (
        (c_int32 * len(table))(*table),
        (c_int64 * requests)(*(page_size * len(pages) for pages in start.pages)),
        (c_int64 * requests)(*start.roots),
        (c_int64 * requests)(*start.lengths),
        (c_int64 * requests)(*onward.wanted),
        (c_int64 * len(ends))(*ends),
        (c_int32 * (requests + 1))(*accumulate((len(tokens) for tokens in onward.ends), initial=0)),
    )


def _texts(copying: Copying) -> "ctypes.Array[c_void_p]":
    handles = []
    for text in copying.texts:
        assert text is None or isinstance(text, NativeText), "rounds read texts of their own library"
        handles.append(None if text is None else text.handle)
    return (c_void_p * len(handles))(*handles)


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
        and target.spec.embedding_scale is None
        and target.spec.logit_cap is None
        and target.embed_tokens.dtype == torch.float32
        and sum(target.lm_head.parts.values()) <= target.embed_tokens.shape[0]
        and (draft is None or (draft.ranks.size == 1 and draft.embed_tokens.dtype == torch.float32))
    )
