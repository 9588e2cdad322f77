"""Records of accuracy runs: GSM8K answers item by item, texts' log probabilities, token-for-token comparisons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.records.point import SCHEMA_VERSION, Hardware

Filter = Literal["flexible", "strict"]
FILTERS: tuple[Filter, ...] = ("flexible", "strict")


@dataclass(frozen=True)
class Gsm8kItem:
    """One question: what the model wrote, what each filter took from it, and whether that was right."""

    index: int
    answer: str
    strict_extracted: str
    flexible_extracted: str
    strict: bool
    flexible: bool


@dataclass(frozen=True)
class Gsm8kRecord:
    """One arm's answers to the same questions in the same order.

    `config_sha256` is of the server and of how it was asked, in a sweep; a changed recipe gives another.
    """

    arm: str
    url: str
    model: str
    num_shots: int
    chat: bool
    scorer: Literal["slipstream", "lm-eval"]
    versions: dict[str, str]
    hardware: Hardware
    started_at: str
    finished_at: str
    data_sha256: str
    items: tuple[Gsm8kItem, ...] = field(repr=False)
    config_sha256: str = ""
    kind: Literal["gsm8k"] = "gsm8k"
    schema: int = SCHEMA_VERSION

    def score(self, which: Filter) -> float:
        """Return the share of right answers under one filter."""
        return sum(getattr(item, which) for item in self.items) / len(self.items) if self.items else 0.0


@dataclass(frozen=True)
class Changes:
    """Questions whose verdict changed from the baseline to an arm."""

    num_pairs: int
    to_right: tuple[int, ...]
    to_wrong: tuple[int, ...]


def changed(baseline: Sequence[Gsm8kItem], arm: Sequence[Gsm8kItem], which: Filter) -> Changes:
    """Pair two arms' answers by question."""
    theirs = {item.index: getattr(item, which) for item in arm}
    pairs = [(item.index, getattr(item, which), theirs[item.index]) for item in baseline if item.index in theirs]
    return Changes(
        num_pairs=len(pairs),
        to_right=tuple(index for index, before, after in pairs if after and not before),
        to_wrong=tuple(index for index, before, after in pairs if before and not after),
    )


@dataclass(frozen=True)
class TextScore:
    """The log probability of a text's tokens (natural log), by an arm and by the baseline arm if there is one."""

    num_tokens: int
    logprob: float
    baseline_logprob: float | None = None


@dataclass(frozen=True)
class PerplexityRecord:
    """How well an arm foretells texts, and a baseline arm the same texts."""

    arm: str
    baseline_arm: str | None
    url: str
    model: str
    versions: dict[str, str]
    hardware: Hardware
    started_at: str
    finished_at: str
    items: tuple[TextScore, ...] = field(repr=False)
    kind: Literal["perplexity"] = "perplexity"
    schema: int = SCHEMA_VERSION

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        return sum(item.num_tokens for item in self.items)

    def perplexity(self) -> float:
        """Return the arm's perplexity over all tokens."""
        return math.exp(-sum(item.logprob for item in self.items) / self.num_tokens)

    def change(self) -> tuple[float, float]:
        """Return the mean change of a token's log probability from the baseline, and its standard error over texts."""
        pairs = [(item.logprob - item.baseline_logprob, item.num_tokens) for item in self.items
                 if item.baseline_logprob is not None]  # fmt: skip
        mean = sum(change for change, _ in pairs) / self.num_tokens
        spread = sum((change - mean * count) ** 2 for change, count in pairs)
        return mean, math.sqrt(spread * len(pairs) / max(len(pairs) - 1, 1)) / self.num_tokens


@dataclass(frozen=True)
class FirstDifference:
    """Where two outputs part, and how close the baseline's two best tokens were there (natural log)."""

    position: int
    baseline_token: str
    token: str
    top_two_margin: float | None


@dataclass(frozen=True)
class LosslessCase:
    """One prompt under one sampling setting."""

    prompt: int
    temperature: float
    seed: int
    num_tokens: int
    difference: FirstDifference | None = None


@dataclass(frozen=True)
class LosslessRecord:
    """An arm compared token for token with the baseline arm."""

    arm: str
    baseline_arm: str
    url: str
    baseline_url: str
    model: str
    versions: dict[str, str]
    hardware: Hardware
    started_at: str
    finished_at: str
    cases: tuple[LosslessCase, ...]
    kind: Literal["lossless"] = "lossless"
    schema: int = SCHEMA_VERSION

    def num_identical(self) -> int:
        """Return how many cases gave the same tokens throughout."""
        return sum(case.difference is None for case in self.cases)
