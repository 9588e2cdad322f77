"""A request as the engine keeps it: its tokens, how many of them are committed, its pages. Plain values, no torch."""

import enum
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

    `tokens` is prompt and answer together. The first `num_committed` have their keys in the cache; the rest (at least
    one while it runs) are still to be computed. `page_keys` names the request's first pages for the
    prefix cache, and `text_key` the text up to the end of the last of them.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_tokens: tuple[int, ...] = ()
    speculate: bool = True
    tokens: list[int] = field(default_factory=list)
    num_committed: int = 0
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    text_key: bytes = b""
    num_cached: int = 0
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
    def num_pending(self) -> int:
        """Known tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.num_committed

    def restart(self) -> None:
        """Give up the cache: everything known is to be computed again."""
        self.pages = []
        self.num_committed = 0
        self.num_registered = 0
        self.status = Status.WAITING
        self.num_preempted += 1
