"""A recipe: one YAML file that says what is compared with what, under which load, and on which server."""

import math
from dataclasses import dataclass, field
from typing import Literal

from slipstream.launch.nodes import Nodes
from slipstream.launch.settings import Draft, FlagValue, ServerName, Speculation, Topology


@dataclass(frozen=True)
class Machine:
    """What the recipe is meant for, each node of it; `gpus: 0` is a CPU, which counts as one device."""

    name: str
    gpus: int

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"gpus is {self.gpus}; a machine has none or more")


@dataclass(frozen=True)
class Target:
    """The model being served.

    Args:
        context: tokens the model can hold; no workload may need more.
        token_range: first and last-but-one token id that random prompts may use (leave special tokens out).
    """

    id: str
    context: int
    precision: str = ""
    revision: str | None = None
    token_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context is {self.context}; it must be a positive number of tokens")
        if self.token_range is not None and not 0 <= self.token_range[0] < self.token_range[1]:
            raise ValueError(f"token_range {list(self.token_range)} is empty or negative")


@dataclass(frozen=True)
class ServerSettings:
    """How one kind of server is started, the same for every arm on it unless an arm declares otherwise.

    Args:
        program: the words before the arguments when they differ from the usual ones (another environment's `vllm`).
        model: the target as this server spells it, when that is not the target's id.
    """

    port: int
    host: str | None = None
    image: str = ""
    context: int | None = None
    model: str | None = None
    program: tuple[str, ...] = ()
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port {self.port} does not exist")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: only what it declares here sets it apart from the other arms.

    Args:
        against: the arm it is compared with, when that is not the recipe's baseline (another server's plain arm).
        optional: leave the arm out when its draft's `path` does not exist.
    """

    server: ServerName | None = None
    draft: str | None = None
    speculation: Speculation | None = None
    image: str | None = None
    context: int | None = None
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    against: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None and self.speculation is None:
            raise ValueError("a draft without 'speculation' would never be used; say how it drafts")
        method = None if self.speculation is None else self.speculation.method
        if method in ("eagle3", "dflash") and self.draft is None:
            raise ValueError(f"speculation method {method} needs a 'draft'")
        if method == "ngram" and self.draft is not None:
            raise ValueError("speculation method ngram takes no 'draft'")


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Args:
        kind: `random` token ids of a given length, or real `prompts` from a JSONL file.
        range_ratio: lengths are drawn evenly from `range_ratio * length` to `length`; 1 means exact.
        path: JSONL with `prompt` or `messages` on each line, relative to the recipe.
        ignore_eos: keep generating to `output_tokens`, so that every arm does the same work.
        context, flags: server settings this workload needs (a longer context, another batch limit).
    """

    kind: Literal["random", "prompts"]
    output_tokens: int
    input_tokens: int | None = None
    range_ratio: float = 1.0
    path: str | None = None
    chat_template: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    context: int | None = None
    flags: dict[str, FlagValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens is {self.output_tokens}; at least one token must come out")
        if not 0 < self.range_ratio <= 1:
            raise ValueError(f"range_ratio is {self.range_ratio}; it lies above 0 and up to 1 (exact lengths)")
        if self.kind == "random" and (self.input_tokens is None or self.input_tokens < 1):
            raise ValueError("a random workload needs 'input_tokens' of at least 1")
        if self.kind == "random" and self.path is not None:
            raise ValueError("a random workload takes no 'path'")
        if self.kind == "prompts" and (self.path is None or self.input_tokens is not None):
            raise ValueError("a prompts workload needs 'path' and takes its input lengths from the file")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it cannot be negative")


@dataclass(frozen=True)
class Traffic:
    """How requests arrive: as many streams as the concurrency, refilled at once, or Poisson at a rate besides.

    Args:
        request_rate: requests a second (Poisson); null sends as soon as a stream is free.
        requests: total requests for a given concurrency, where it is not `requests_per_stream` times as many.
    """

    requests_per_stream: int = 10
    requests: dict[int, int] = field(default_factory=dict)
    warmups_per_stream: int = 2
    request_rate: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.requests_per_stream < 1 or self.warmups_per_stream < 0:
            raise ValueError("requests_per_stream is at least 1 and warmups_per_stream at least 0")
        if self.request_rate is not None and not (math.isfinite(self.request_rate) and self.request_rate > 0):
            raise ValueError(f"request_rate is {self.request_rate}; leave it out to send as fast as streams free up")

    def num_requests(self, concurrency: int) -> int:
        """Return how many requests a point of this concurrency sends."""
        return self.requests.get(concurrency, self.requests_per_stream * concurrency)


@dataclass(frozen=True)
class Schedule:
    """How arms share the machine: servers one after another in each round, or all at once with points interleaved."""

    servers: Literal["in_turn", "together"] = "in_turn"
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; at least 1")


@dataclass(frozen=True)
class Gsm8kTask:
    """How GSM8K is asked on each arm's server, after its points."""

    num_shots: int = 5
    max_tokens: int = 512
    chat: bool = False
    limit: int | None = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        if self.num_shots < 0 or self.max_tokens < 1 or self.concurrency < 1:
            raise ValueError("num_shots is at least 0, max_tokens and concurrency at least 1")


@dataclass(frozen=True)
class Evals:
    """Accuracy runs that belong to the comparison."""

    gsm8k: Gsm8kTask | None = None


@dataclass(frozen=True)
class Recipe:
    """The whole comparison; `load_recipe` also checks what no single part can see.

    Args:
        nodes: the machines every server is spread over; by default each runs on the one that measures.
    """

    name: str
    about: str
    machine: Machine
    target: Target
    servers: dict[ServerName, ServerSettings]
    arms: dict[str, Arm]
    baseline: str
    workloads: dict[str, Workload]
    concurrency: tuple[int, ...]
    seeds: tuple[int, ...]
    source: str = ""
    drafts: dict[str, Draft] = field(default_factory=dict)
    nodes: Nodes | None = None
    topologies: tuple[Topology, ...] = field(default_factory=lambda: (Topology(),))
    traffic: Traffic = Traffic()
    schedule: Schedule = Schedule()
    evals: Evals = Evals()

    def baseline_of(self, arm_name: str) -> str:
        """Return the arm that an arm is compared with."""
        return self.arms[arm_name].against or self.baseline

    def server_of(self, arm: Arm) -> ServerName:
        """Return the server an arm runs on: its own, or the only one there is."""
        return arm.server if arm.server is not None else next(iter(self.servers))
