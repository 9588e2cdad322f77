"""The seam between planning and running: what an executor is told of a step, and what it says came of it.

The engine plans and commits; an executor runs. A step goes down as *changes*: requests that took a row of the batch
or left it, pages they were given since the last step, and which tokens to compute. Tokens, log probabilities and
times come up. All of it is plain values, so the same step can be sent to other processes; no tensor of one side is
ever read by the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

from slipstream.errors import RankLostError
from slipstream.speculation.drafter import Drafter
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

Phase = Literal["prefill", "draft", "verify", "mixed", "host"]
"""What a step's time goes to.

`prefill` is prompts alone, in target and draft; `draft` is drafting and draft extend; `verify` is the target's pass
over drafted tokens and the choice of its own; `mixed` is a pass of the target that prompts and drafted tokens share,
whose parts cannot be told apart; `host` is all other time of a step.
"""


@dataclass(frozen=True)
class Joined:
    """A request that takes a row, with everything an executor needs to know of it.

    Args:
        epoch: tells the requests apart that have the same row one after another; outputs name it.
        tokens: all that is known of its text: the prompt, and the answer so far if it starts over.
        num_cached: so many of them have their keys in its pages already.
        limit: it never has more tokens than this, prompt and answer together.
        computed: take all but its last token for computed, whatever its pages hold (measurements).
    """

    row: int
    epoch: int
    tokens: Sequence[int]
    num_prompt: int
    num_cached: int
    pages: Sequence[int]
    params: SamplingParams
    seed: int
    end_tokens: tuple[int, ...]
    speculate: bool
    limit: int
    computed: bool = False


@dataclass(frozen=True)
class Left:
    """A row whose request ended or was preempted; keys of its first `num_reusable` positions may serve others."""

    row: int
    num_reusable: int = 0


@dataclass(frozen=True)
class Work:
    """A row's part of a step: compute its next `num_tokens`; `emits` if that reaches the last one that is known.

    The last known token is then the root of a draft tree, if it `drafts`, and at least one token comes of it. Where an
    executor runs ahead of what was read, it knows more tokens than the engine; the next one is then its own last.
    """

    row: int
    num_tokens: int
    emits: bool
    drafts: bool


@dataclass(frozen=True)
class StepInput:
    """What changed since the last step, and what this one computes.

    Args:
        lost_pages: pages whose content is nobody's any more: they were given to others.
        pages: pages that rows were given beside those they have.
        simulated: rates by position that decide what is kept of drafts, in place of the target (measurements).
        patience_s: an executor that can run several steps in one call may go on for so long.
        ahead: rows have pages for so many tokens beyond those this step may give.
    """

    left: Sequence[Left] = ()
    lost_pages: Sequence[int] = ()
    joined: Sequence[Joined] = ()
    pages: Mapping[int, Sequence[int]] = field(default_factory=dict)
    work: Sequence[Work] = ()
    simulated: tuple[float, ...] = ()
    patience_s: float = 0.0
    ahead: int = 0


class TokenLogprob(NamedTuple):
    """A token's log probability under the target itself (before penalties and temperature), and the likeliest ones.

    `rank` is one more than the number of likelier tokens; it is known of a prompt's tokens only.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class RowOutput:
    """What a step gave one row.

    Args:
        num_tokens: how many known tokens it computed.
        tokens: what it emits; empty for a part of a prompt. All but the last were drafted.
        drafted: how many nodes were checked at each depth, from the root's children on.
        logprobs: one for each emitted token, if asked for.
        prompt_logprobs: one for each token of the prompt (None for the first), with the first emission, if asked for.
        finished: nothing can follow the last token (a grammar is at its end).
        failure: what ended the request; something about the request itself, which no other row noticed.
    """

    row: int
    epoch: int
    num_tokens: int
    tokens: Sequence[int] = ()
    drafted: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finished: bool = False
    failure: Exception | None = None


@dataclass(frozen=True)
class DecodePass:
    """A pass of the target over decoding rows alone, with the drafting for it and after it.

    Args:
        context: tokens of a row's text when it began, the mean of its rows.
        num_emitted: tokens that came of it, of all rows.
    """

    context: float
    num_rows: int
    num_emitted: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class StepOutput:
    """What came of a step: outputs by row, in the order they were made, and what the time went to.

    Times are measured, and told when the device is past what they time: on a GPU that may be with a later step.

    Args:
        num_untold: steps read so far whose times are still to be told.
    """

    rows: Sequence[RowOutput]
    seconds: Mapping[Phase, float] = field(default_factory=dict)
    steps: int = 1
    passes: Sequence[DecodePass] = ()
    num_untold: int = 0


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in seconds.

    Args:
        step_s: decoding alone.
        beside_s: how much more with so many tokens of prompts in the same pass.
        prompt_s: each token of a long prompt, in a pass of its own.
    """

    step_s: float
    beside_s: Mapping[int, float]
    prompt_s: float


class Executor(Protocol):
    """Runs steps. One thread calls it; `hurry` alone may come from another."""

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        ...

    @property
    def drafter(self) -> Drafter:
        """What drafts."""
        ...

    def explain(self) -> dict[str, object]:
        """Say what decides how far is drafted, and what it knows; nothing where nothing does."""
        ...

    @property
    def lookahead(self) -> int:
        """How many submitted steps it can hold unread while the next is submitted."""
        ...

    @property
    def in_flight(self) -> int:
        """How many submitted steps were not collected yet."""
        ...

    def submit(self, step: StepInput) -> None:
        """Take the changes in and start the step; what it raises ends the requests of the step."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight and return what came of it."""
        ...

    def ahead(self, patience_s: float) -> int:
        """Return for how many tokens of every row, beyond a step's own, it could use pages in one call; 0: none."""
        ...

    def costs(self, num_decoding: int) -> StepCosts | None:
        """Return what a step of so many decoding rows costs, if it was measured for contexts like theirs."""
        ...

    def reshape(self, shape: TreeShape) -> bool:
        """Draft trees of another shape; True if every row must start over for it. ConfigError if it cannot."""
        ...

    def reset(self) -> None:
        """Forget every row and every step in flight, after a failure."""
        ...

    def warm_up(self) -> list[str]:
        """Make ready what steps can need; return what that took, in sentences."""
        ...

    def when_lost(self, callback: Callable[[RankLostError], None]) -> None:
        """Call back, from another thread, when a rank that holds part of the model is lost."""
        ...

    def rest(self) -> StepOutput:
        """Wait until the device is past all that was launched, and tell what it took; no rows."""
        ...

    def hurry(self) -> None:
        """Let a patient call end soon; any thread may ask."""
        ...
