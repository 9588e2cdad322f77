"""A step between its launch and the moment the host reads it: who takes part, and what is on its way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.executors.choice import nothing_left, read_logprobs
from slipstream.executors.cuda_graph.step import RowValues, StepKind
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
        kind: of the step of the decoding batch, if there is one.
        unmasked: what went wrong with masks of grammars, by row and node.
        learn: is told how many drafted tokens of each row were kept.
        finished: what has been read.
    """

    lap: Lap
    order: dict[int, int]
    rows: list[Decoding] = field(default_factory=list)
    kind: StepKind | None = None
    out: Arrival | None = None
    logprobs: Arrival | None = None
    parts: list[tuple[Row, Work]] = field(default_factory=list)
    first: Arrival | None = None
    unmasked: dict[tuple[int, int], Exception] = field(default_factory=dict)
    learn: Callable[[Sequence[int]], None] | None = None
    finished: list[RowOutput] = field(default_factory=list)

    @property
    def most_given(self) -> int:
        """The most tokens that it may give a row."""
        return 1 if self.kind is None else self.kind.num_drafted + 1

    def land(self) -> None:
        """Read what the step gave, once, and move its rows on."""
        if self.out is not None:
            (out_RE,) = self.out.wait()
            assert self.kind is not None, "a batch decoded"
            outputs = [self.kind.read(values) for values in out_RE.tolist()]
            sampled = None if self.logprobs is None else read(self.logprobs)
            if self.learn is not None:
                self.learn([outputs[one.place].count - 1 for one in self.rows if one.drafts])
            decoded = [
                self._decoded(decoding, outputs[decoding.place], self.kind.num_drafted + 1, sampled)
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

    def _decoded(self, decoding: Decoding, values: RowValues, num_nodes: int, sampled: Sampled | None) -> RowOutput:
        """Move a row on by what a step of the decoding batch gave it."""
        row, place, drafts_until = decoding
        count = values.count
        path = list(zip(values.tokens[:count], values.nodes[:count], strict=True))
        failed = {}
        if count < len(values.tokens) and values.tokens[count] < 0:
            node = values.nodes[count]
            path.append((-1, node))
            failed = {node: self.unmasked.get((row.number, node)) or nothing_left()}
        drafted = values.by_depth if len(row.tokens) - 1 < drafts_until else []
        logprobs: dict[int, TokenLogprob] = {}
        num_top = row.joined.params.logprobs
        if num_top is not None and sampled is not None:
            nodes = values.nodes[:count]
            at = [place * num_nodes + node for node in nodes]
            logprobs = dict(zip(nodes, read_logprobs(sampled, at, num_top), strict=True))
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
