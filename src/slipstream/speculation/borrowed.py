"""Tokens a request borrows: those of its own text that the draft does not know get rows of the draft's head.

A draft that knows a part of the target's tokens can never propose the others, and an answer often repeats such a token
of its prompt. Trained rows of a draft's head are close to an affine image of the target's rows for the same tokens, so
a row for any other token is made of the target's. Only what is proposed changes, never what is accepted.

Shape letters: N known tokens, B borrowed ones, C target width, D draft width.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels import Borrowed, Ops
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.target import Target

_COMES_AGAIN = 2.0  # added to a borrowed token's logit: what stood in the text is likelier than its row says
_LEAST_EXPLAINED = 0.3  # of the variance of rows that were not fitted; below that a made row would mislead
_MOST_FITTED = 8192  # known tokens; more explain little more
_AS_WELL = 0.01  # less of the variance explained: then a map is fitted anew
_RIDGE = 1e-6
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Affine:
    """A map of the target's rows to the draft's.

    Args:
        explained: share of the variance of rows it was not fitted by.
    """

    mean_C: Tensor
    map_CD: Tensor
    offset_D: Tensor
    explained: float = 0.0

    @staticmethod
    def fit(x_NC: Tensor, y_ND: Tensor) -> "_Affine":
        """Return the map that fits rows best."""
        mean_C, offset_D = x_NC.mean(0), y_ND.mean(0)
        return _Affine(mean_C, _least_squares(x_NC - mean_C, y_ND - offset_D), offset_D)

    def of(self, x_NC: Tensor) -> Tensor:
        """Return rows [N, D] made of the target's."""
        return torch.addmm(self.offset_D, x_NC - self.mean_C, self.map_CD)

    def explains(self, x_NC: Tensor, y_ND: Tensor) -> float:
        """Return which share of the variance of rows it explains."""
        return 1 - float((self.of(x_NC) - y_ND).square().sum() / (y_ND - self.offset_D).square().sum())


@dataclass(frozen=True)
class Lender:
    """Makes rows of a draft's head for tokens the draft does not know.

    Args:
        unknown: for every token of the target whether the draft does not know it, a byte each.
    """

    unknown: bytes
    _head: Linear
    _ops: Ops
    _affine: _Affine

    @staticmethod
    def fit(draft: Eagle3Draft, target: Target, ops: Ops, like: "Lender | None" = None) -> "Lender | None":
        """Fit the affine map on tokens the draft knows; None, with a line that says why, if nothing can be lent.

        Args:
            like: what lends for a draft that this one was trained on from; its map stays where it explains this
                draft's rows as well, for fitting is most of what it takes to make a draft ready.
        """
        known_V = draft.token_ids_V
        if len(known_V) == target.spec.vocab_size:
            return None
        entries_N = torch.arange(len(known_V))[:: -(-len(known_V) // (_MOST_FITTED + _MOST_FITTED // 8))]
        judged_N = torch.arange(len(entries_N)) % 9 == 8  # every ninth judges the fit
        if int((~judged_N).sum()) < 2 * (1 + target.spec.hidden_size):
            _log.info("Nothing is borrowed: %d known tokens are too few to fit rows by.", len(known_V))
            return None

        def rows(entries: Tensor) -> tuple[Tensor, Tensor]:
            return target.lm_head.read_rows(known_V[entries], ops), draft.lm_head.read_rows(entries, ops)

        try:
            judged = rows(entries_N[judged_N])
            affine = None if like is None else like._affine
            if affine is None or not affine.explains(*judged) >= affine.explained - _AS_WELL:
                affine = _Affine.fit(*rows(entries_N[~judged_N]))
                affine = replace(affine, explained=affine.explains(*judged))
        except KernelError as error:
            _log.info("Nothing is borrowed: %s", error)
            return None
        if not affine.explained >= _LEAST_EXPLAINED:  # also where it is not a number
            _log.info(
                "Nothing is borrowed: the target's rows explain %.0f%% of the variance of the draft's, so rows made "
                "of them would mislead.",
                100 * affine.explained,
            )
            return None
        unknown = bytearray(b"\1") * target.spec.vocab_size
        for token in known_V.tolist():
            unknown[token] = 0
        return Lender(bytes(unknown), target.lm_head, ops, affine)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self._affine.offset_D)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Return rows [B, D] for tokens."""
        return self._affine.of(self._head.read_rows(torch.tensor(tokens), self._ops))


class Borrowers:
    """What each request has borrowed: the latest of its text's unknown tokens, at most `capacity` of them."""

    def __init__(self, lender: Lender, capacity: int) -> None:
        self._lender, self._capacity = lender, capacity
        self._texts: dict[int, _Text] = {}

    @property
    def lender(self) -> Lender:
        """What makes the rows."""
        return self._lender

    def see(self, request_id: int, tokens: Sequence[int]) -> Borrowed | None:
        """Take in what a request's text has grown by; return what it has borrowed, None if nothing."""
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text()
        unknown = self._lender.unknown
        found = [token for token in tokens[text.num_seen :] if unknown[token]]
        text.num_seen = len(tokens)
        if found:
            self._borrow(text, found)
        return text.borrowed

    def forget(self, request_id: int) -> None:
        """Drop what a request has borrowed."""
        self._texts.pop(request_id, None)

    def forget_all(self) -> None:
        """Drop what every request has borrowed: somebody else will see their texts grow."""
        self._texts.clear()

    def _borrow(self, text: "_Text", found: Sequence[int]) -> None:
        fresh: dict[int, int] = {}
        for token in found:
            place = text.places.pop(token, None)
            if place is None:
                full = len(text.places) == self._capacity
                place = text.places.pop(next(iter(text.places))) if full else len(text.places)
                fresh[place] = token
            text.places[token] = place  # at the end: the first is the one longest not seen
        if not fresh:
            return
        if text.borrowed is None:
            tokens_B = torch.zeros(self._capacity, dtype=torch.int64)
            text.borrowed = Borrowed(tokens_B, torch.zeros(self._capacity, self._lender.width), _COMES_AGAIN)
        places = torch.tensor(list(fresh))
        text.borrowed.tokens_B[places] = torch.tensor(list(fresh.values()))
        text.borrowed.rows_BD[places] = self._lender.rows(list(fresh.values()))
        text.borrowed.count = len(text.places)


@dataclass
class _Text:
    """How much of a request's text was seen, and where each borrowed token lies, the longest not seen first."""

    num_seen: int = 0
    places: dict[int, int] = field(default_factory=dict)
    borrowed: Borrowed | None = None


def _least_squares(x_NC: Tensor, y_ND: Tensor) -> Tensor:
    """Return the map [C, D] that takes centred rows to centred rows best."""
    gram_CC = x_NC.T @ x_NC
    gram_CC.diagonal().add_(_RIDGE * float(gram_CC.diagonal().mean()))
    solved: Tensor = torch.linalg.solve_ex(gram_CC, x_NC.T @ y_ND).result
    return solved
