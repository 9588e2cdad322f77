"""How a server is started, in words that every engine's launcher shares: what drafts, how, and over which devices."""

from dataclasses import dataclass, field
from typing import Literal

ServerName = Literal["slipstream", "vllm", "sglang"]
FlagValue = bool | int | float | str | tuple[str, ...] | tuple[int, ...] | None
"""True: the bare flag. False or null: an inherited flag is dropped. A list: several values after one flag."""


@dataclass(frozen=True)
class Draft:
    """A draft model; `path` is where it lies when that is not its id; "embedded" is the one that ships."""

    id: str
    precision: str
    revision: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Speculation:
    """How an arm drafts, in the words of the published commands.

    Args:
        num_steps: levels the draft looks ahead; for a chain, the number of drafted tokens (vLLM's K).
        num_draft_tokens: positions in one verify pass, the root included; a chain has `num_steps + 1`.
        draft_tp: tensor parallel size of the draft, where the server can set it (vLLM, slipstream).
    """

    method: Literal["eagle3", "dflash", "ngram"]
    num_steps: int
    topk: int = 1
    num_draft_tokens: int | None = None
    draft_tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_draft_tokens is not None and self.num_draft_tokens < 2:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}; with the root it is at least 2")

    def positions(self) -> int:
        """Return the positions verified at once, the root included."""
        return self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens


@dataclass(frozen=True)
class Topology:
    """How the target is spread over devices, and the environment that this spread needs on every arm.

    Args:
        tp: devices that every layer is split over.
        ep: groups of them that experts are dealt to.
        pp: pipeline stages of `tp` devices each.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1:
            raise ValueError(f"tp {self.tp} and ep {self.ep} must be at least 1")
        if self.pp < 1:
            raise ValueError(f"pp {self.pp} must be at least 1")
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}, so experts cannot be spread evenly")

    def name(self) -> str:
        """Return the name used in file names and tables."""
        parts = {"tp": self.tp, **{name: size for name, size in (("pp", self.pp), ("ep", self.ep)) if size > 1}}
        return "-".join(f"{name}{size}" for name, size in parts.items())

    def devices(self) -> int:
        """Return how many devices the target takes."""
        return self.tp * self.pp
