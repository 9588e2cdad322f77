"""A step between its launch and the moment the host reads it: who takes part, and what is on its way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.executors.choice import nothing_left, read_logprobs
from slipstream.executors.cuda_graph.transfer import Arrival, read
from slipstream.executors.interface import RowOutput, TokenLogprob, Work
from slipstream.executors.rows import Row
from slipstream.executors.stopwatch import Lap
from slipstream.kernels import Sampled


class Decoding(NamedTuple):
    """A row's part of a step of the decoding batch: its place there, and until which length it drafts."""

    row: Row
    place: int
    drafts_until: int

    @property
    def drafts(self) -> bool:
        """Whether the row drafts in the step that is to be read next."""
        return len(self.row.tokens) - 1 < self.drafts_until and goes_on(self.row)


@dataclass
class Flight:
    """A submitted step.

    Args:
        order: the rows' places in the step, which outputs keep.
        unmasked: what went wrong with masks of grammars, by row and node.
        learn: is told how many tokens were drafted, and how many of each row's were kept.
        finished: what has been read.
    """

    lap: Lap
    order: dict[int, int]
    rows: list[Decoding] = field(default_factory=list)
    num_drafted: int = 0
    out: Arrival | None = None
    logprobs: Arrival | None = None
    parts: list[tuple[Row, Work]] = field(default_factory=list)
    first: Arrival | None = None
    unmasked: dict[tuple[int, int], Exception] = field(default_factory=dict)
    learn: Callable[[int, Sequence[int]], None] | None = None
    finished: list[RowOutput] = field(default_factory=list)

    def land(self) -> None:
        """Read what the step gave, once, and move its rows on."""
        if self.out is not None:
            (out_RE,) = self.out.wait()
            outputs = out_RE.tolist()
            sampled = None if self.logprobs is None else read(self.logprobs)
            if self.learn is not None:
                self.learn(self.num_drafted, [outputs[one.place][0] - 1 for one in self.rows if one.drafts])
            decoded = [
                self._decoded(decoding, outputs[decoding.place], sampled)
                for decoding in self.rows
                if goes_on(decoding.row)
            ]
            self.lap.end_pass(sum(len(output.tokens) for output in decoded))
            self.finished += decoded
            self.out = None
        if self.parts:
            sampled = None if self.first is None else read(self.first)
            seen = 0
            for row, work in self.parts:
                self.finished.append(_begun(row, work, sampled, seen, self.unmasked.get((row.number, 0))))
                seen += work.emits
            self.parts = []

    def _decoded(self, decoding: Decoding, values: Sequence[int], sampled: Sampled | None) -> RowOutput:
        """Move a row on by what a step of the decoding batch gave it."""
        row, place, drafts_until = decoding
        count, *tokens = values
        path = [(token, node) for node, token in enumerate(tokens[:count])]
        failed = {}
        if count <= self.num_drafted and tokens[count] < 0:
            path.append((-1, count))
            failed = {count: self.unmasked.get((row.number, count)) or nothing_left()}
        drafted = [1] * self.num_drafted if len(row.tokens) - 1 < drafts_until else []
        logprobs: dict[int, TokenLogprob] = {}
        num_top = row.joined.params.logprobs
        if num_top is not None and sampled is not None:
            first = place * (self.num_drafted + 1)
            logprobs = dict(enumerate(read_logprobs(sampled, range(first, first + count), num_top)))
        return row.emit(1, path, drafted, logprobs, failed)


def goes_on(row: Row) -> bool:
    """Tell whether a row may still say something; one that has said all is only waiting to leave."""
    return row.failure is not None or len(row.tokens) < row.joined.limit


def _begun(row: Row, work: Work, sampled: Sampled | None, at: int, error: Exception | None) -> RowOutput:
    """Move a row on by a part of its prompt, and the first token if that was its end."""
    if not work.emits:
        return row.emit(work.num_tokens, (), (), {}, {})
    assert sampled is not None, "prompts that end give a token"
    token = int(sampled.tokens_L[at])
    num_top = row.joined.params.logprobs
    logprobs = {} if num_top is None else {0: read_logprobs(sampled, [at], num_top)[0]}
    return row.emit(work.num_tokens, [(token, 0)], (), logprobs, {0: error or nothing_left()} if token < 0 else {})
