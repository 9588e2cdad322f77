"""A request as an executor keeps it: its text, its pages, and what its sampling looks back on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from slipstream.executors.interface import Joined, RowOutput, TokenLogprob
from slipstream.speculation.drafter import DraftView
from slipstream.speculation.grammar import GrammarState


class Row:
    """One row of the batch.

    What a request brings with it (a grammar, settings) is used here; if that raises, `failure` holds the error, the
    row's next output is its last, and the other rows go on.
    """

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.tokens = list(joined.tokens)
        self.pages = list(joined.pages)
        self.num_committed = len(self.tokens) - 1 if joined.computed else joined.num_cached
        self.failure: Exception | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.grammar: GrammarState | None = None
        with self.contained():
            self.grammar = None if joined.params.grammar is None else joined.params.grammar.start()
            if self.grammar is not None:
                self.grammar.advance(self.tokens[joined.num_prompt :])

    @property
    def number(self) -> int:
        """Its place in the batch."""
        return self.joined.row

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.joined.num_prompt

    def view(self) -> DraftView:
        """Return the row as a drafter sees it."""
        joined = self.joined
        wanted = joined.limit - len(self.tokens)
        return DraftView(joined.row, self.tokens, self.pages, joined.params.temperature, joined.seed, wanted)

    def wanted_prompt_rows(self, start: int, num_tokens: int) -> range:
        """Return which tokens of a chunk foretell a prompt token whose log probability is wanted, by place in it."""
        if self.joined.params.prompt_logprobs is None:
            return range(0)
        return range(min(num_tokens, max(self.joined.num_prompt - 1 - start, 0)))

    def emit(
        self,
        num_tokens: int,
        path: Sequence[tuple[int, int]],
        drafted: Sequence[int],
        logprobs: Mapping[int, TokenLogprob],
        failed: Mapping[int, Exception],
    ) -> RowOutput:
        """Move on by what a step came to, and say it: known tokens computed, then tokens with their nodes.

        A node whose choice failed ends the path before it, as plain decoding would; a root that failed ends the row.

        Args:
            drafted: nodes checked at each depth.
            logprobs: by node, if they were asked for.
        """
        first = next((index for index, (_, node) in enumerate(path) if node in failed), len(path))
        if first == 0 and path:
            self.failure = self.failure or failed[path[0][1]]
        is_first, kept = self.num_output == 0, path[:first]
        self.num_committed += num_tokens + max(len(kept) - 1, 0)
        self.tokens += [token for token, _ in kept]
        said, finished = self._followed(kept)
        if self.failure is not None:
            return RowOutput(self.number, self.joined.epoch, num_tokens, failure=self.failure)
        params = self.joined.params
        return RowOutput(
            self.number,
            self.joined.epoch,
            num_tokens,
            [token for token, _ in said],
            drafted,
            [logprobs[node] for _, node in said] if params.logprobs is not None else None,
            self.prompt_logprobs if params.prompt_logprobs is not None and said and is_first else None,
            finished,
        )

    def _followed(self, path: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], bool]:
        """Let the grammar follow a path; return it up to where the answer ends, and whether it ends there."""
        if self.grammar is None:
            return path, False
        with self.contained():
            for count, (token, _) in enumerate(path, start=1):
                self.grammar.advance([token])
                if token in self.joined.end_tokens or self.grammar.finished:
                    return path[:count], True
        return path, False

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Keep what goes wrong with this row's own data to this row."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (kept as the row's failure, and handed to whoever asked for it)
            self.failure = self.failure or error
