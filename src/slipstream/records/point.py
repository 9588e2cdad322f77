"""One measured point: an arm, a topology, a workload, a concurrency and a seed, with all that a rerun needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

SCHEMA_VERSION = 1


@dataclass(frozen=True, order=True)
class PointKey:
    """What makes a point unique inside one run folder."""

    arm: str
    topology: str
    workload: str
    concurrency: int
    seed: int

    def file_name(self) -> str:
        """Return the record's file name, which sorts by workload and concurrency rather than by arm."""
        return f"{self.topology}.{self.workload}.c{self.concurrency:04d}.s{self.seed:04d}.{self.arm}.json"


@dataclass(frozen=True)
class Distribution:
    """Summary of a sample; percentiles interpolate linearly, as numpy, vLLM and SGLang do."""

    count: int
    mean: float
    std: float
    median: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """Summarise `values`, or return None when there are none."""
        if not values:
            return None
        sample = np.asarray(values, dtype=np.float64)
        median, p90, p95, p99 = (float(x) for x in np.percentile(sample, (50, 90, 95, 99)))
        return cls(len(values), float(sample.mean()), float(sample.std()), median, p90, p95, p99)


@dataclass(frozen=True)
class RequestResult:
    """One request as the client saw it; times in seconds from the moment it was sent."""

    sent_at_s: float
    latency_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    num_chunks: int = 0
    text_sha256: str = ""
    repetition: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Latency:
    """Latency in milliseconds.

    `itl_ms` is the gap between streamed chunks (vLLM's definition, what a reader sees); `itl_token_ms` divides each gap
    by the tokens that came in the chunk (SGLang's definition). Without speculation they are equal.
    """

    ttft_ms: Distribution
    e2e_ms: Distribution
    tpot_ms: Distribution | None = None
    itl_ms: Distribution | None = None
    itl_token_ms: Distribution | None = None


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over the whole window, first request sent to last token received."""

    duration_s: float
    requests_per_s: float
    output_tok_s: float
    total_tok_s: float
    output_tok_s_per_device: float
    total_tok_s_per_device: float


@dataclass(frozen=True)
class Acceptance:
    """What the server itself counted between the start and the end of the point.

    Args:
        length: emitted tokens for each target pass, the target's own token included.
        accepted_by_position: accepted drafts at depth 1, 2, ...; empty where the server does not count them.
        drafted_by_position: proposals at each depth; where the server has no such counter, one for each draft.
        source: the metric names used, so that a reader can tell a counter from a gauge.
    """

    length: float
    source: str
    num_drafts: float | None = None
    num_draft_tokens: float | None = None
    num_accepted_tokens: float | None = None
    accepted_by_position: tuple[float, ...] = ()
    drafted_by_position: tuple[float, ...] = ()


@dataclass(frozen=True)
class ContextCost:
    """Passes of the target that only decoded, at contexts of up to `context` tokens, within the point."""

    context: int
    passes: float
    rows: float
    tokens: float
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Phases:
    """Seconds of step time by phase, measured by the engine within the point; together they are its busy time.

    Args:
        prefill_s: prompts alone, in target and draft.
        mixed_s: passes of the target that prompts and drafted tokens share.
        by_context: what decoding took at each context length.
    """

    draft_s: float
    verify_s: float
    host_s: float
    prefill_s: float = 0.0
    mixed_s: float = 0.0
    by_context: tuple[ContextCost, ...] = ()

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.prefill_s + self.draft_s + self.verify_s + self.mixed_s + self.host_s


@dataclass(frozen=True)
class Hardware:
    """The machine that ran the client, and the devices found on it."""

    machine: str
    cpu: str
    num_cpus: int
    memory_gib: float
    devices: tuple[str, ...] = ()
    driver: str = ""


@dataclass(frozen=True)
class Provenance:
    """Everything needed to run the point again, and to know that it is the same point.

    Args:
        config: the resolved settings of this point: server, target, draft, speculation, workload, traffic.
        config_sha256: hash of config, command, environment and image; a changed recipe gives another hash.
        argv: the server's command line; empty when the server was already running.
        versions: client, server (as it reports itself) and Python.
    """

    recipe: str
    recipe_sha256: str
    config: dict[str, object]
    config_sha256: str
    argv: tuple[str, ...]
    env: dict[str, str]
    image: str
    url: str
    versions: dict[str, str]
    hardware: Hardware
    started_at: str
    finished_at: str


@dataclass(frozen=True)
class PointRecord:
    """One point; figures are absent when it is invalid, and `reasons` then says why."""

    key: PointKey
    baseline_arm: str
    status: Literal["valid", "invalid"]
    num_devices: int
    provenance: Provenance
    input_tokens: int = 0
    output_tokens: int = 0
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    num_requests: int = 0
    num_failed: int = 0
    throughput: Throughput | None = None
    latency: Latency | None = None
    acceptance: Acceptance | None = None
    phases: Phases | None = None
    repetition: float | None = None
    requests: tuple[RequestResult, ...] = field(default=(), repr=False)
    kind: Literal["bench"] = "bench"
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema != SCHEMA_VERSION:
            raise ValueError(f"this slipstream reads record schema {SCHEMA_VERSION}, the file has {self.schema}")
        if self.status == "invalid" and not self.reasons:
            raise ValueError("an invalid point must say why in 'reasons'")
