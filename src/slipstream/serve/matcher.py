"""llguidance's matcher, walked along the paths of drafted trees.

A tree is walked as chains: the first follows first children from the root down, and every other child begins one of
its own. llguidance makes the masks of a chain in one call, for many answers at once, in threads of its own.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.serve.grammar_trial import reason
from slipstream.speculation.grammar import DraftedAnswer, FilledMasks, fill_singly


class Matcher:
    """Where an answer stands; paths are tried and taken back. Where a limit stops it, that is a RequestError."""

    def __init__(self, beginning: LLMatcher, vocab_size: int, field: str, executor: LLExecutor) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []
        self._vocab_size = vocab_size
        self._field = field
        self._executor = executor

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow a path; None if the path itself breaks the grammar or ends it."""
        taken = self._matcher.try_consume_tokens(list(path))
        possible = taken == len(path) and not (path and self.finished)
        bits = np.frombuffer(self._matcher.compute_bitmask() if possible else b"", dtype=np.uint8)
        if self._matcher.is_error():
            error = self._error()
            self._restart()
            raise error
        self._matcher.rollback(taken)
        if not possible:
            return None
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def draft(self, guess: Sequence[int], most: int) -> list[int]:
        """Return a guess as far as the grammar allows it, and wherever only one text can follow, that text."""
        matcher, drafted = self._matcher, list[int]()
        while len(drafted) < most and not matcher.is_stopped():
            on_guess = drafted == list(guess[: len(drafted)])
            more = matcher.compute_ff_tokens() or (guess[len(drafted) : len(drafted) + 1] if on_guess else [])
            taken = matcher.try_consume_tokens(list(more)[: most - len(drafted)])
            drafted += more[:taken]
            if taken == 0:
                break
        if matcher.is_error():
            self._restart()
        else:
            matcher.rollback(len(drafted))
        return drafted

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens."""
        for token in tokens:
            if not self.finished:
                self._matcher.consume_token(token)
                self._taken.append(token)
                if self._matcher.is_error():
                    raise self._error()

    @classmethod
    def fill_masks(cls, answers: Sequence[DraftedAnswer], words_MW: Tensor) -> FilledMasks:
        """Write the masks of all nodes of all answers, as `speculation.grammar.fill_masks` promises."""
        words_MW.fill_(-1)  # llguidance leaves a chain's masks alone from the first token on that breaks the grammar
        filled = FilledMasks()
        walks = [_chains(answer, filled.rows) for answer in answers]
        for together in itertools.zip_longest(*walks):  # an answer's matcher walks one chain at a time
            _fill_chains([chain for chain in together if chain is not None], words_MW)
        first = 0
        for answer in answers:
            state, stop = cast(Matcher, answer.state), first + len(answer.tokens)
            if state._matcher.is_error():
                state._restart()
                alone = fill_singly([answer], words_MW[first:stop])
                filled.rows[first:stop] = [row + first if row >= 0 else row for row in alone.rows]
                filled.failed.update({node + first: error for node, error in alone.failed.items()})
            first = stop
        return filled

    def _restart(self) -> None:
        """Leave an error state: llguidance's stay, and this one may lie on a path that the target does not take."""
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._taken)

    def _error(self) -> RequestError:
        return RequestError(f"{self._field} cannot be followed any further: {reason(self._matcher)}")


class _Chain(NamedTuple):
    """Nodes that follow one another: the path to the first, the tokens of the others, and the first one's mask."""

    state: Matcher
    path: list[int]
    others: list[int]
    row: int


def _chains(answer: DraftedAnswer, rows: list[int]) -> list[_Chain]:
    """Cut an answer's tree into chains; append the rows of its nodes' masks, which follow one another in a chain."""
    chain_of: list[int] = []  # by node
    chains: list[list[int]] = []
    for node, parent in enumerate(answer.parents):
        if node and chains[chain_of[parent]][-1] == parent:
            chain_of.append(chain_of[parent])
            chains[chain_of[node]].append(node)
        else:
            chain_of.append(len(chains))
            chains.append([node])
    first = len(rows)
    rows += itertools.repeat(first, len(chain_of))
    for row, node in enumerate(itertools.chain(*chains), start=first):
        rows[first + node] = row
    state, tokens = cast(Matcher, answer.state), answer.tokens
    return [
        _Chain(state, answer.path(nodes[0]), [tokens[node] for node in nodes[1:]], rows[first + nodes[0]])
        for nodes in chains
    ]


def _fill_chains(chains: Sequence[_Chain], words_MW: Tensor) -> None:
    """Write the masks of chains of different answers, up to the token of each that breaks its grammar."""
    entered: list[_Chain] = []
    for chain in chains:
        matcher = chain.state._matcher
        taken = matcher.try_consume_tokens(chain.path)
        if taken == len(chain.path) and not (taken and matcher.is_stopped()):
            entered.append(chain)
        else:
            matcher.rollback(taken)
    if not entered:
        return
    executor, target = entered[0].state._executor, (words_MW.data_ptr(), 4 * words_MW.shape[1], len(words_MW))
    if longer := [(chain.state._matcher, chain.row, chain.others) for chain in entered if chain.others]:
        executor.unsafe_compute_mask_ptr_with_draft_token(longer, *target)
    if single := [(chain.state._matcher, chain.row) for chain in entered if not chain.others]:
        executor.unsafe_compute_mask_ptr(single, *target)
    for chain in entered:
        chain.state._matcher.rollback(len(chain.path))
