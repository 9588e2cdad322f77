"""A request's companion at run time: what its sampling looks back on, its text so far, its acceptance statistics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.engine.output import Detokenizer, Emission, EmittedToken, StopMatcher, TokenLogprob
from slipstream.engine.request import FinishReason, Request
from slipstream.speculation.choose import Row, TokenHistory
from slipstream.speculation.drafter import DraftView
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import Tree


class Session:
    """What the engine keeps beside a request's plain values.

    What a request brings with it (grammar, stop strings, settings, tokenizer) is used here; if that raises, `failure`
    holds the error, the request's next emission is its last, and the other requests of the step go on.
    """

    def __init__(
        self, request: Request, vocab_size: int, device: torch.device, detokenizer: Detokenizer | None
    ) -> None:
        self.request = request
        self.stats = AcceptanceStats()
        self.failure: Exception | None = None
        self._detokenizer = detokenizer
        self._stop = StopMatcher(request.params.stop)
        looks_back = request.params.counts_tokens or request.params.min_tokens > 0
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._grammar = None if request.params.grammar is None else request.params.grammar.start()
        self._history = TokenHistory.start(request.prompt, vocab_size, device) if looks_back else None

    def view(self) -> DraftView:
        """Return the request as a drafter sees it."""
        request = self.request
        return DraftView(request.request_id, request.tokens, request.pages, request.params.temperature, request.seed)

    def rows(self, tree: Tree) -> list[Row]:
        """Return what decides the target's token at each node of the request's tree."""
        request = self.request
        looks_back = self._history is not None or self._grammar is not None
        return [
            Row(
                request.params,
                request.seed,
                len(request.tokens) + depth,
                self._history,
                tree.path(node) if looks_back else (),
                request.end_tokens,
                self._grammar,
            )
            for node, depth in enumerate(tree.depths)
        ]

    def wanted_prompt_rows(self, start: int, num_tokens: int) -> range:
        """Return which tokens of a chunk foretell a prompt token whose log probability is wanted and not known yet."""
        if self.request.params.prompt_logprobs is None:
            return range(0)
        first = max(start, len(self._prompt_logprobs) - 1)  # a restarted request computes its prompt again
        return range(first - start, min(start + num_tokens, len(self.request.prompt) - 1) - start)

    def score_prompt(self, logits_KV: Tensor) -> None:
        """Take in the logits that foretell the next prompt tokens."""
        num_top = self.request.params.prompt_logprobs
        assert num_top is not None, "scored prompts were asked for"
        first = len(self._prompt_logprobs)
        with self._contained():
            for token, logits_V in zip(self.request.prompt[first : first + len(logits_KV)], logits_KV, strict=True):
                self._prompt_logprobs.append(_logprob(logits_V, token, num_top))

    def sound(self, path: Sequence[tuple[int, int]], failed: Mapping[int, Exception]) -> Sequence[tuple[int, int]]:
        """Return a path up to the first node whose choice failed: plain decoding would have come so far, too.

        A failure at the root is the request's; one further on is met again when that node is the root.
        """
        first = next((index for index, (_, node) in enumerate(path) if node in failed), len(path))
        if first == 0:
            self.failure = self.failure or failed[path[0][1]]
        return path[:first]

    def emit(
        self,
        tree: Tree,
        path: Sequence[tuple[int, int]],
        logits: Mapping[int, Tensor],
        room: int,
        totals: AcceptanceStats,
    ) -> Emission:
        """Turn a step's accepted tokens into what the reader gets; a request that fails gets its last emission."""
        if self.failure is None:
            with self._contained():
                return self._emit(tree, path, logits, room, totals)
        return self.failed()

    def failed(self) -> Emission:
        """Return the last emission of a request that failed: no tokens, and why."""
        assert self.failure is not None, "the request failed"
        request = self.request
        return Emission(
            request.request_id, request.prompt, request.seed, (), self.stats, FinishReason.ERROR, error=self.failure
        )

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Keep what goes wrong with this request's own data to this request."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (kept as the request's failure, and handed to whoever asked for it)
            self.failure = self.failure or error

    def _emit(
        self,
        tree: Tree,
        path: Sequence[tuple[int, int]],
        logits: Mapping[int, Tensor],
        room: int,
        totals: AcceptanceStats,
    ) -> Emission:
        """Turn a step's accepted tokens into what the reader gets, cut where the answer ends.

        Args:
            path: each token with the node it was chosen at.
            logits: the target's logits [V] by node, where log probabilities are wanted.
            room: tokens that still fit the context.
            totals: the engine's own statistics, which count this pass too.
        """
        params = self.request.params
        allowed = min(params.max_tokens - self.request.num_output, room)
        emitted: list[EmittedToken] = []
        reason: FinishReason | None = None
        for position, (token, node) in enumerate(path, start=1):
            text = self._text(token)
            drafted = position if position < len(path) else 0
            logprob = None if params.logprobs is None else _logprob(logits[node], token, params.logprobs)
            emitted.append(EmittedToken(token, text, drafted, logprob))
            if self._grammar is not None:
                self._grammar.advance([token])
            if token in self.request.end_tokens or self._stop.stopped or self._grammar_is_finished():
                reason = FinishReason.STOP
            elif len(emitted) == allowed:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        tail = "" if reason is None or self._detokenizer is None else self._finish_text()
        if self._history is not None:
            self._history.extend([token.token_id for token in emitted])
        accepted = sum(token.draft_position > 0 for token in emitted)
        request = self.request
        nodes_by_depth = tree.nodes_by_depth()
        for stats in (self.stats, totals):
            stats.record(nodes_by_depth, len(emitted), accepted, first=request.num_output == 0)
        scored = params.prompt_logprobs is not None and request.num_output == 0
        return Emission(
            request.request_id,
            request.prompt,
            request.seed,
            tuple(emitted),
            self.stats,
            reason,
            tail,
            tuple(self._prompt_logprobs) if scored else None,
            stop=self._stop.found,
            num_cached=min(request.num_cached, len(request.prompt)),
            num_preempted=request.num_preempted,
        )

    def _grammar_is_finished(self) -> bool:
        return self._grammar is not None and self._grammar.finished

    def _text(self, token: int) -> str:
        """Return the text a token lets out; an end token has none."""
        if self._detokenizer is None or token in self.request.end_tokens:
            return ""
        return self._stop.feed(self._detokenizer.push([token]))

    def _finish_text(self) -> str:
        assert self._detokenizer is not None
        if self._stop.stopped:
            return ""
        return self._stop.feed(self._detokenizer.finish()) + ("" if self._stop.stopped else self._stop.finish())


def _logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
    top = logprobs_V.topk(num_top) if num_top else None
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else ()
    return TokenLogprob(token, float(logprobs_V[token]), pairs)
