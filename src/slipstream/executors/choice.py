"""The one rule at every node of a step: each row's settings in its slot of the sampler, and what its grammar allows.

Processing runs along each node's own path: a penalty at a node counts the tokens on the way to it, and a grammar allows
what may follow them.

Shape letters: L nodes of all trees, R rows, V vocabulary, W words of a mask, M masks, D drafted tokens on a path,
K prompt tokens that are scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.executors.interface import TokenLogprob
from slipstream.executors.rows import Row
from slipstream.kernels import Ops, Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.sampling import num_words
from slipstream.speculation.grammar import DraftedAnswer, fill_masks
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import Tree


@dataclass(frozen=True)
class NodeMasks:
    """What grammars leave at the nodes of a step, on the host.

    Args:
        words_MW: int32, a bit for each token; the last mask leaves nothing.
        row_L: each node's mask; -1 for none.
        failed: what went wrong at nodes whose mask could not be made; they get the mask that leaves nothing.
    """

    words_MW: Tensor
    row_L: Sequence[int]
    failed: Mapping[int, Exception] = field(default_factory=dict)

    def __reduce__(self) -> tuple[object, ...]:
        """Leave out why nodes failed: other processes need to know that they did, which their mask says."""
        return NodeMasks, (self.words_MW, self.row_L)

    def on(self, device: torch.device) -> TokenMasks:
        """Return the masks where the sampler reads them."""
        return TokenMasks(self.words_MW.to(device), torch.tensor(self.row_L, dtype=torch.int64).to(device))


@dataclass(frozen=True)
class Choice:
    """The target's token at every node."""

    sampled: Sampled
    masks: NodeMasks | None

    @property
    def tokens_L(self) -> Tensor:
        """The tokens; -1 where nothing could be chosen."""
        return self.sampled.tokens_L

    def failed(self, tokens: Sequence[int], nodes: Sequence[int], first: int) -> dict[int, Exception]:
        """Return what went wrong along a path of a tree whose nodes begin at `first`, by node."""
        why = {} if self.masks is None else self.masks.failed
        return {
            node: why.get(first + node) or nothing_left()
            for token, node in zip(tokens, nodes, strict=True)
            if token < 0
        }

    def logprobs(self, row: Row, nodes: Sequence[int], first: int) -> dict[int, TokenLogprob]:
        """Return log probabilities at some nodes of one tree, by node, if its row wants them."""
        with row.contained():
            if row.joined.params.logprobs is not None:
                at = [first + node for node in nodes]
                return dict(zip(nodes, read_logprobs(self.sampled, at, row.joined.params.logprobs), strict=True))
        return {}


class Chooser:
    """Chooses at nodes, with a slot of the sampler for every row of the batch."""

    def __init__(self, ops: Ops, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._ops = ops
        self.state = SamplingState(num_rows, vocab_size, device)

    def load(self, row: Row) -> None:
        """Take a row's settings; what is wrong with them is the row's own failure."""
        joined = row.joined
        with row.contained():
            prompt, output = row.tokens[: joined.num_prompt], row.tokens[joined.num_prompt :]
            self.state.load(joined.row, joined.params, joined.seed, prompt, output, joined.end_tokens)
        if row.failure is not None:
            self.state.clear(joined.row)

    def masks(self, rows: Sequence[Row], trees: Sequence[Tree]) -> NodeMasks | None:
        """Return what grammars leave at the nodes of the rows' trees; None if no row has one."""
        answers = [
            DraftedAnswer(row.grammar, tree.tokens, tree.parents)
            for row, tree in zip(rows, trees, strict=True)
            if row.grammar is not None
        ]
        if not answers:
            return None
        num_nodes = sum(len(answer.tokens) for answer in answers)
        words_MW = torch.zeros(num_nodes + 1, num_words(self.state.vocab_size), dtype=torch.int32)
        filled = fill_masks(answers, words_MW[:-1])
        row_L: list[int] = []
        failed: dict[int, Exception] = {}
        seen = 0
        for row, tree in zip(rows, trees, strict=True):
            if row.grammar is None:
                row_L += [-1] * len(tree.tokens)
                continue
            for node in range(seen, seen + len(tree.tokens)):
                if node in filled.failed:
                    failed[len(row_L)] = filled.failed[node]
                row_L.append(num_nodes if node in filled.failed else filled.rows[node])
            seen += len(tree.tokens)
        return NodeMasks(words_MW, row_L, failed)

    def choose(self, logits_LV: Tensor, rows: Sequence[Row], trees: Sequence[Tree], masks: NodeMasks | None) -> Choice:
        """Return the target's token at every node of the rows' trees."""
        device = logits_LV.device
        slots, positions, paths = [], [], []
        for row, tree in zip(rows, trees, strict=True):
            slots += [row.number] * len(tree.tokens)
            positions += [len(row.tokens) + depth for depth in tree.depths]
            looks_back = row.joined.params.counts_tokens
            paths += [tree.path(node) if looks_back else () for node in range(len(tree.tokens))]
        longest = max(map(len, paths), default=0)
        padded = [[*path, *[-1] * (longest - len(path))] for path in paths]
        at = SampleRows(
            torch.tensor(slots, dtype=torch.int64).to(device),
            torch.tensor(positions, dtype=torch.int64).to(device),
            torch.tensor(padded, dtype=torch.int64).reshape(len(paths), longest).to(device),
        )
        sampled = self._ops.sample(logits_LV, at, self.state, None if masks is None else masks.on(device))
        return Choice(sampled, masks)

    def score_prompt(self, row: Row, logits_KV: Tensor) -> None:
        """Give a row the log probabilities of its next prompt tokens, which these logits foretell."""
        with row.contained():
            first, num_top = len(row.prompt_logprobs), row.joined.params.prompt_logprobs
            assert num_top is not None, "scored prompts were asked for"
            row.prompt_logprobs += self._scored(logits_KV, row.tokens[first : first + len(logits_KV)], num_top)

    def _scored(self, logits_KV: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Return the log probability and the rank of a token of each row, with so many of the likeliest.

        It is what an answer has where a mask leaves only that token: the same definition, and the same bits.
        """
        device = logits_KV.device
        token_K1 = torch.tensor(tokens, dtype=torch.int64, device=device)[:, None]
        words_KW = torch.zeros(len(tokens), num_words(self.state.vocab_size), dtype=torch.int32, device=device)
        words_KW.scatter_(1, token_K1 // 32, (1 << token_K1 % 32).int())  # the last of a word is its sign
        state = SamplingState(1, self.state.vocab_size, device)
        state.load(0, SamplingParams(logprobs=num_top), 0, (), (), ())
        row_K = torch.arange(len(tokens), device=device)
        nobody_K = torch.zeros_like(row_K)
        at = SampleRows(nobody_K, nobody_K, nobody_K.new_empty(len(tokens), 0))
        sampled = self._ops.sample(logits_KV, at, state, TokenMasks(words_KW, row_K))
        logits_KV = logits_KV.float()
        own_K1 = logits_KV.gather(1, token_K1).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        rank_K = 1 + (logits_KV > own_K1).sum(1)  # what is no number is not above anything
        pairs = zip(read_logprobs(sampled, range(len(tokens)), num_top), tokens, rank_K.tolist(), strict=True)
        return [found._replace(token_id=token, rank=rank) for found, token, rank in pairs]

    def count(self, rows: Sequence[Row], tokens_RE: Tensor, counts_R: Tensor) -> None:
        """Take note of what rows emit, where penalties look back on it."""
        if any(row.joined.params.counts_tokens for row in rows):
            slot_R = torch.tensor([row.number for row in rows], dtype=torch.int64).to(tokens_RE.device)
            self._ops.count(self.state, slot_R, tokens_RE, counts_R)


def read_logprobs(sampled: Sampled, rows: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return log probabilities of the tokens sampled at some rows, with so many of the likeliest each."""
    at = torch.tensor(list(rows), dtype=torch.int64, device=sampled.tokens_L.device)
    columns = (sampled.tokens_L[at], sampled.logprob_L[at], sampled.top_ids_LK[at], sampled.top_logprobs_LK[at])
    found = []
    for token, logprob, ids, logprobs in zip(*(column.tolist() for column in columns), strict=True):
        top = tuple((i, value) for i, value in zip(ids[:num_top], logprobs[:num_top], strict=True) if i >= 0)
        found.append(TokenLogprob(token, logprob, top))
    return found


def nothing_left() -> RequestError:
    """Return what ends a request for which nothing can be chosen."""
    return RequestError("The grammar of this answer leaves no token that could follow.")
