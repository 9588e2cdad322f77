"""Tokens a request borrows: those of its own text that the draft does not know get rows of the draft's head.

A draft that knows a part of the target's tokens can never propose the others, and an answer often repeats such a token
of its prompt. Trained rows of a draft's head are close to an affine image of the target's rows for the same tokens, so
a row for any other token is made of the target's. Only what is proposed changes, never what is accepted.

Shape letters: N known tokens, B borrowed ones, C target width, D draft width.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

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
_RIDGE = 1e-6
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lender:
    """Makes rows of a draft's head for tokens the draft does not know.

    Args:
        unknown: for every token of the target whether the draft does not know it, a byte each.
    """

    unknown: bytes
    _head: Linear
    _ops: Ops
    _mean_C: Tensor
    _map_CD: Tensor
    _offset_D: Tensor

    @staticmethod
    def fit(draft: Eagle3Draft, target: Target, ops: Ops) -> "Lender | None":
        """Fit the affine map on tokens the draft knows; None, with a line that says why, if nothing can be lent."""
        known_V = draft.token_ids_V
        if len(known_V) == target.spec.vocab_size:
            return None
        entries_N = torch.arange(len(known_V))[:: -(-len(known_V) // (_MOST_FITTED + _MOST_FITTED // 8))]
        judged_N = torch.arange(len(entries_N)) % 9 == 8  # every ninth judges the fit
        if int((~judged_N).sum()) < 2 * (1 + target.spec.hidden_size):
            _log.info("Nothing is borrowed: %d known tokens are too few to fit rows by.", len(known_V))
            return None
        try:
            x_NC = target.lm_head.read_rows(known_V[entries_N], ops)
            y_ND = draft.lm_head.read_rows(entries_N, ops)
        except KernelError as error:
            _log.info("Nothing is borrowed: %s", error)
            return None
        mean_C, offset_D = x_NC[~judged_N].mean(0), y_ND[~judged_N].mean(0)
        map_CD = _least_squares(x_NC[~judged_N] - mean_C, y_ND[~judged_N] - offset_D)
        rest_ND = y_ND[judged_N] - offset_D
        explained = 1 - float(((x_NC[judged_N] - mean_C) @ map_CD - rest_ND).square().sum() / rest_ND.square().sum())
        if not explained >= _LEAST_EXPLAINED:  # also where it is not a number
            _log.info(
                "Nothing is borrowed: the target's rows explain %.0f%% of the variance of the draft's, so rows made "
                "of them would mislead.",
                100 * explained,
            )
            return None
        unknown = bytearray(b"\1") * target.spec.vocab_size
        for token in known_V.tolist():
            unknown[token] = 0
        return Lender(bytes(unknown), target.lm_head, ops, mean_C, map_CD, offset_D)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self._offset_D)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Return rows [B, D] for tokens."""
        rows_BC = self._head.read_rows(torch.tensor(tokens), self._ops)
        return torch.addmm(self._offset_D, rows_BC - self._mean_C, self._map_CD)


class Borrowers:
    """What each request has borrowed: the latest of its text's unknown tokens, at most `capacity` of them."""

    def __init__(self, lender: Lender, capacity: int) -> None:
        self._lender, self._capacity = lender, capacity
        self._texts: dict[int, _Text] = {}

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
