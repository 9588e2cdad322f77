"""The one rule: at every node the target's token is argmax(processed logits / T + noise(seed, position)).

Processing runs along each node's own path: a penalty at a node counts the tokens on the way to it. Every row is
processed alone, so what else shares the step cannot change its bits.

Shape letters: L rows of logits, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.kernels import Ops
from slipstream.speculation.grammar import GrammarState
from slipstream.speculation.sampling import SamplingParams


@dataclass
class TokenHistory:
    """What a request has said so far, for the settings that look back. Updated as tokens are committed."""

    prompt_V: Tensor
    output_counts_V: Tensor
    num_output: int = 0

    @staticmethod
    def start(prompt: Sequence[int], vocab_size: int, device: torch.device) -> "TokenHistory":
        """Return the history of a request that has only its prompt."""
        prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        prompt_V[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        return TokenHistory(prompt_V, torch.zeros(vocab_size, dtype=torch.float32, device=device))

    def extend(self, tokens: Sequence[int]) -> None:
        """Count emitted tokens."""
        self.num_output += len(tokens)
        for token in tokens:
            self.output_counts_V[token] += 1


@dataclass(frozen=True)
class Row:
    """One row of logits: whose it is, where, and the drafted tokens on its path (the root's own excluded)."""

    params: SamplingParams
    seed: int
    position: int
    history: TokenHistory | None = None
    path: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = field(default=())
    grammar: GrammarState | None = None


@dataclass(frozen=True)
class Chosen:
    """The target's token at each row, and the logits [V] of those rows whose log probabilities are wanted.

    `failed` holds what went wrong at rows whose own settings could not be applied; their tokens mean nothing.
    """

    tokens_L: Tensor
    logits: Mapping[int, Tensor]
    failed: Mapping[int, Exception] = field(default_factory=dict)

    def at_nodes(self, first_row: int, num_nodes: int) -> "Chosen":
        """Return the part that belongs to one tree, by node."""
        rows = range(first_row, first_row + num_nodes)
        return Chosen(
            self.tokens_L[first_row : rows.stop],
            {node: self.logits[row] for node, row in enumerate(rows) if row in self.logits},
            {node: self.failed[row] for node, row in enumerate(rows) if row in self.failed},
        )


def choose(logits_LV: Tensor, rows: Sequence[Row], ops: Ops) -> Chosen:
    """Return the target's token for each row. `position` is the absolute position of the token being chosen."""
    wanted = {index: logits_LV[index] for index, row in enumerate(rows) if row.params.logprobs is not None}
    logits_LV, failed = _process_rows(logits_LV, rows)
    device = logits_LV.device
    tokens_L = ops.choose(
        logits_LV,
        torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device),
        torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
        torch.tensor([row.position for row in rows], dtype=torch.int64, device=device),
    )
    return Chosen(tokens_L, wanted, failed)


def _process_rows(logits_LV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, dict[int, Exception]]:
    """Apply each row's settings to its logits; also return what went wrong, by row."""
    shaped = [index for index, row in enumerate(rows) if row.params.shapes_logits]
    failed: dict[int, Exception] = {}
    if not shaped:
        return logits_LV, failed
    logits_LV = logits_LV.float().clone()
    for index in shaped:
        try:
            logits_LV[index] = process(logits_LV[index], rows[index])
        except Exception as error:  # noqa: BLE001 (a request's own data may fail that request only)
            failed[index] = error
    return logits_LV, failed


def process(logits_V: Tensor, row: Row) -> Tensor:
    """Apply penalties, bias and minimum length, then rule out what the grammar, top-k, top-p and min-p rule out."""
    params = row.params
    if params.counts_tokens:
        logits_V = _penalise(logits_V, row)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits_V.device)
        logits_V = logits_V.index_add(0, ids, biases)
    if (allowed_V := _allowed(row, len(logits_V))) is not None:
        logits_V = logits_V.masked_fill(~allowed_V.to(logits_V.device), -torch.inf)
    return _truncate(logits_V, params) if params.truncates else logits_V


def _allowed(row: Row, vocab_size: int) -> Tensor | None:
    """Return which tokens the grammar and the minimum length leave; None if they rule nothing out."""
    allowed_V = None if row.grammar is None else row.grammar.allowed(row.path)
    if allowed_V is not None and not allowed_V.any():
        raise RequestError("The grammar of this answer leaves no token that could follow.")
    num_output = (row.history.num_output if row.history else 0) + len(row.path)
    if num_output >= row.params.min_tokens or not row.end_tokens:
        return allowed_V
    everything_V = torch.ones(vocab_size, dtype=torch.bool) if allowed_V is None else allowed_V
    longer_V = everything_V.index_fill(0, torch.tensor(row.end_tokens), False)
    # An answer that its grammar has completed cannot be made longer: there, and only there, min_tokens gives way.
    return longer_V if longer_V.any() else allowed_V


def _penalise(logits_V: Tensor, row: Row) -> Tensor:
    params, history = row.params, row.history
    assert history is not None, "penalties need the request's history"
    counts_V = history.output_counts_V
    if row.path:
        counts_V = counts_V.clone()
        for token in row.path:
            counts_V[token] += 1
    if params.repetition_penalty != 1:
        seen_V = history.prompt_V | (counts_V > 0)
        penalised_V = torch.where(
            logits_V > 0, logits_V / params.repetition_penalty, logits_V * params.repetition_penalty
        )
        logits_V = torch.where(seen_V, penalised_V, logits_V)
    return logits_V - params.frequency_penalty * counts_V - params.presence_penalty * (counts_V > 0)


def _truncate(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Set tokens to -inf that top-k, then top-p, then min-p rule out, at the request's temperature."""
    sorted_V, order_V = torch.sort(logits_V, descending=True, stable=True)
    keep = len(sorted_V) if params.top_k == 0 else min(params.top_k, len(sorted_V))
    probs_V = torch.softmax(sorted_V[:keep] / params.temperature, dim=0)
    if params.top_p < 1:
        before_V = torch.cumsum(probs_V, 0) - probs_V
        keep = max(1, int((before_V < params.top_p).sum()))
    if params.min_p > 0:
        keep = min(keep, max(1, int((probs_V[:keep] >= params.min_p * probs_V[0]).sum())))
    out_V = torch.full_like(logits_V, -torch.inf)
    out_V[order_V[:keep]] = sorted_V[:keep]
    return out_V
