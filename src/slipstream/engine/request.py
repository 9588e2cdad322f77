"""A request as the engine keeps it: its tokens, how many of them are committed, its pages. Plain values, no torch."""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.speculation.sampling import SamplingParams


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass
class Request:
    """One prompt being answered.

    `tokens` is prompt and answer together, as far as it was read. The first `num_committed` have their keys in the
    cache; the executor was told to compute `num_sent`. `unread` has an entry for each of its steps that will give a
    token and was not read yet: the most that it may give. `row` is its place in the executor's batch while it runs
    there, and `epoch` tells apart who had it when. `page_keys` names its first pages for the prefix cache, and
    `text_key` the text up to the end of the last of them. The first `num_behind` of its pages lie behind every layer's
    window and are no longer its own. What lies in the pages of one that was taken for `computed` (measurements) is not
    its text, so they are not named.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_tokens: tuple[int, ...] = ()
    speculate: bool = True
    tokens: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_sent: int = 0
    unread: deque[int] = field(default_factory=deque)
    row: int | None = None
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    num_behind: int = 0
    num_pages_sent: int = 0
    num_registered: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    text_key: bytes = b""
    num_cached: int = 0
    computed: bool = False
    num_preempted: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> Sequence[int]:
        """The answer so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_unread(self) -> int:
        """Steps that will give tokens and were not read yet."""
        return len(self.unread)

    @property
    def decodes(self) -> bool:
        """Whether its next token follows from the last one: nothing else is to be computed."""
        return self.num_unread > 0 or len(self.tokens) - self.num_sent == 1

    @property
    def least_length(self) -> int:
        """Tokens it has at least, those not read yet included."""
        return len(self.tokens) + self.num_unread

    @property
    def most_length(self) -> int:
        """Tokens it has at most, with those not read yet."""
        return len(self.tokens) + sum(self.unread)

    @property
    def held_pages(self) -> list[int]:
        """The pages that are its own."""
        return self.pages[self.num_behind :]

    def restart(self) -> None:
        """Give up the cache: everything known is to be computed again."""
        self.pages, self.num_behind = [], 0
        self.num_committed = self.num_sent = 0
        self.unread.clear()
        self.num_registered = 0
        self.computed = False
        self.status = Status.WAITING
        self.num_preempted += 1
