"""The programs of `benchmarks/cpu.py`: how each is started, and one definition of decoding speed for all."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.peers import llama_worker_file
from slipstream.bench.peers.environments import environments_dir, llama_environment
from slipstream.bench.peers.process import Peer

HERE = Path(__file__).parent
PLAIN = "slipstream"
Event = tuple[float, int, list[int]]
"""Seconds since the run began, the prompt's number, and the tokens that were emitted then."""


@dataclass(frozen=True)
class Arm:
    """One program, set up in one way."""

    name: str
    program: str
    worker: Path
    settings: dict[str, Any]

    def python(self) -> Path:
        """Return the interpreter to run it with; llama.cpp is compiled on first use."""
        return llama_environment() / "python" if self.program == "llama" else Path(sys.executable)


def all_arms(model: Path, draft: Path, depths: Sequence[int], threads: int, context: int, rows: int) -> Iterator[Arm]:
    """Yield the arms over a GGUF, our plain engine first: it also encodes prompts and reads memory."""
    same = {"model": str(model), "threads": threads, "context": context}
    engine = HERE / "slipstream_worker.py"
    for depth in (None, *depths):
        name = PLAIN if depth is None else f"{PLAIN} EAGLE-3{f' K={depth}' if depth else ''}"
        drafted = {"draft": "none" if depth is None else str(draft), "depth": depth or 0, "max_requests": rows}
        yield Arm(name, "slipstream", engine, {**same, **drafted})
    made = environments_dir() / "models"
    made.mkdir(parents=True, exist_ok=True)
    for name, format in (("llama.cpp same file", ""), ("llama.cpp Q4_0", "Q4_0"), ("llama.cpp Q8_0", "Q8_0")):
        yield Arm(name, "llama", llama_worker_file(), {**same, "made": str(made), "format": format})


def start(arm: Arm) -> Peer:
    """Install what the arm needs and load it."""
    return Peer(arm.name, arm.python(), arm.worker, arm.settings, {"OMP_NUM_THREADS": str(arm.settings["threads"])})


@dataclass(frozen=True)
class Decoded:
    """What one turn came to.

    Args:
        num_tokens, seconds: the part of it in which every answer was decoding; see `decoded`.
        num_passes: how often an answer got tokens in that part, of all answers together.
        whole_seconds: from the prompts' arrival to the last token.
    """

    answers: list[list[int]]
    num_tokens: int
    seconds: float
    num_passes: int
    whole_seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second, of all answers together."""
        return self.num_tokens / self.seconds


def decoded(events: Sequence[Event], num_prompts: int, tokens: int) -> Decoded:
    """Count tokens from when every answer has its first until one is complete: prompts and stragglers are left out."""
    answers: list[list[int]] = [[] for _ in range(num_prompts)]
    began = ended = None
    num_tokens = num_passes = 0
    for now, row, emitted in sorted(events, key=lambda event: event[0]):
        if began is not None and now > began and (ended is None or now == ended):
            num_tokens += len(emitted)
            num_passes += 1
        answers[row] += emitted
        if began is None and all(answers):
            began = now
        if ended is None and len(answers[row]) >= tokens:
            ended = now
    assert began is not None and ended is not None and ended > began, "every prompt was answered"
    return Decoded(answers, num_tokens, ended - began, num_passes, max(event[0] for event in events))
