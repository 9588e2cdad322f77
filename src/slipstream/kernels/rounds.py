"""Rounds of decoding in one call, as a backend may offer them: the plain values they take and leave.

Shape letters: D draft width, L tokens a draft is late with, F captured features of a token.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.kernels.ops import Borrowed, Cut
from slipstream.kernels.sampling import Sampled, SamplingState
from slipstream.kernels.texts import CopyText


@dataclass(frozen=True)
class RoundModels:
    """The models of a round, which lie a package higher: a target and its cache, and a draft and its cache if any."""

    target: Any
    target_kv: Any
    captured_layers: Sequence[int] = ()
    draft: Any | None = None
    draft_kv: Any | None = None


@dataclass
class Follower:
    """How far a draft has followed a request between rounds; a round changes it.

    Args:
        feedback_D: what the draft left at the request's last slot, float32.
        late_states_LF: the target's captured states of tokens it has not followed yet, side by side; room for L.
        late_tokens_L: the token after each of them.
        late: how many there are.
    """

    feedback_D: Tensor
    late_states_LF: Tensor
    late_tokens_L: Tensor
    late: int = 0

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where the three tensors lie; they are written to, never replaced."""
        return self.feedback_D.data_ptr(), self.late_states_LF.data_ptr(), self.late_tokens_L.data_ptr()

    @cached_property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return len(self.late_tokens_L)

    @staticmethod
    def start(feedback_D: Tensor, num_features: int, capacity: int) -> "Follower":
        """Return a draft's follower that is late with nothing, and has room for `capacity` tokens."""
        return Follower(feedback_D, torch.empty(capacity, num_features), torch.empty(capacity, dtype=torch.int64))


class Hurry:
    """Asks rounds under way, from another thread, to end with the one they are at."""

    def __init__(self) -> None:
        self._flag = array("i", [0])
        self.address: int = self._flag.buffer_info()[0]

    def ask(self) -> None:
        """Ask; rounds that begin before it is taken back end after the first."""
        self._flag[0] = 1

    def take_back(self) -> None:
        """Stop asking."""
        self._flag[0] = 0


@dataclass(frozen=True)
class Onward:
    """How rounds go on by themselves: until an answer ends, pages are full, or one of these is reached.

    Args:
        rounds: so many.
        patience_s: no round is begun that would end later, by what the one before took.
        wanted: tokens each request may still emit.
        ends: tokens that end each request's answer.
    """

    rounds: int
    patience_s: float
    wanted: Sequence[int]
    ends: Sequence[Sequence[int]]
    hurry: Hurry | None = None


@dataclass(frozen=True)
class Copying:
    """What requests copy from, beside what a draft proposes.

    Args:
        texts: each request's, up to its root; a round adds what it emits. None: nothing is copied.
        limits: copied nodes each may have.
    """

    texts: Sequence[CopyText | None]
    limits: Sequence[int]


@dataclass(frozen=True)
class DraftedNodes:
    """The tree of one request in a round: the tokens of its nodes, numbered from 1, and their parents; 0 is the root.

    Args:
        guessed: how many, the first, are the draft's chain; the others were copied.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    guessed: int = 0

    def by_depth(self) -> list[int]:
        """Return how many nodes there are at each depth, from the root's children on."""
        if self.guessed == len(self.tokens):
            return [1] * self.guessed
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        counts = [0] * max(depths)
        for depth in depths[1:]:
            counts[depth - 1] += 1
        return counts


@dataclass(frozen=True)
class AllowedNodes:
    """What a grammar makes of a request's tree: the nodes to check, and the mask of the root and of each of them."""

    nodes: DraftedNodes
    masks: Sequence[int]


class MaskFiller(Protocol):
    """Says what grammars leave, in the middle of each round: when it is drafted and before it is checked."""

    def __call__(
        self, emitted: Sequence[Sequence[int]], drafted: Sequence[DraftedNodes], words_MW: Tensor
    ) -> Sequence[AllowedNodes] | None:
        """Write masks; return each request's nodes, these or others in their place, and which mask each node has.

        None ends the call before this round. What it raises is raised once the call has ended, before this round too.

        Args:
            emitted: what each request has emitted since the call began.
            drafted: what would be checked after each root.
            words_MW: int32, a bit for each token, to write to: a mask for every node there can be, and the last, which
                leaves nothing. A node's mask may be any of them, or -1 for none.
        """
        ...


@dataclass(frozen=True)
class RoundStart:
    """Requests at the beginning of a round, each with one token to compute: its last, the root.

    Args:
        lengths: keys before the root.
        sampling: how tokens are sampled; what is emitted is counted where penalties look back on it.
        slots: each request's in `sampling`.
        limits: how many tokens may be drafted after the root.
        followers: None for a request the draft does not follow; all others have the same room.
        follow: let the draft follow at the end of this round; otherwise it does so when it next drafts.
        borrowed: as for chains.
        onward: how rounds follow this one; None: none does.
        copying: what is copied beside what is drafted; None: nothing.
        masks: makes the masks of requests with a grammar; None if nobody has one.
        room: how many nodes that may put into each request's tree; nothing: it leaves all as they are.
    """

    pages: Sequence[Sequence[int]]
    roots: Sequence[int]
    lengths: Sequence[int]
    sampling: SamplingState
    slots: Sequence[int]
    limits: Sequence[int]
    followers: Sequence[Follower | None]
    follow: bool = True
    borrowed: Sequence[Borrowed | None] = ()
    onward: Onward | None = None
    copying: Copying | None = None
    masks: MaskFiller | None = None
    room: Sequence[int] = ()


@dataclass(frozen=True)
class RoundResult:
    """What became of each request in a round: its emitted tokens, what was checked, and the draft's scores.

    Args:
        tokens: nothing for a request that has none to choose from at its root; where that happens further on, it is met
            again when that node is the root.
        drafted: the nodes that were checked.
        foretold: of the tokens that were kept, those that copying or a grammar alone would have had.
        scores: cumulative log-probabilities of a chain's tokens, whether checked or not; none if nobody might draft.
        seconds: what drafting, checking and following took.
        sampled: the emitted tokens with log probabilities, for requests that want them; None if nobody does.
        places: where in `sampled` each request's begin.
    """

    tokens: Sequence[Sequence[int]]
    drafted: Sequence[DraftedNodes]
    foretold: Sequence[int]
    scores: Sequence[Sequence[float]]
    seconds: tuple[float, float, float]
    sampled: Sampled | None = None
    places: Sequence[int] = ()

    def of(self, rows: Sequence[int]) -> "RoundResult":
        """Return what became of some of the requests."""
        return RoundResult(
            [self.tokens[row] for row in rows],
            [self.drafted[row] for row in rows],
            [self.foretold[row] for row in rows],
            [self.scores[row] for row in rows],
            self.seconds,
            self.sampled,
            [self.places[row] for row in rows],
        )

    def foretelling(self, texts: Sequence[Sequence[int]]) -> "RoundResult":
        """Return what became of each request, where such texts were known beforehand to follow their roots."""
        pairs = (zip(text, kept[:-1], strict=False) for text, kept in zip(texts, self.tokens, strict=True))
        known = (sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)) for both in pairs)
        return replace(self, foretold=[max(both) for both in zip(self.foretold, known, strict=True)])


@runtime_checkable
class RoundOps(Protocol):
    """A backend that can also run whole rounds in one call: draft, check, keep what agrees, follow."""

    def run_rounds(self, models: RoundModels, start: RoundStart, depth: int, cut: Cut) -> list[RoundResult] | None:
        """Return what the parts of each round would, one after the other; None if the call cannot run these models.

        In further rounds limits shrink with what is wanted; what is borrowed stays as it was.

        Args:
            depth: no chain is longer.
            cut: where chains end before that.
        """
        ...
