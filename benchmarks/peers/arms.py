"""The programs of `benchmarks/cpu.py`: how each is started, and one definition of decoding speed for all."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.bench.peers import environments, llama_worker_file
from slipstream.bench.peers.process import Peer
from slipstream.checkpoint.embedded import GGUF_FILE

HERE = Path(__file__).parent
SAME_FILE = "llama.cpp same file"
PLAIN = "slipstream"
Event = tuple[float, int, list[int]]
"""Seconds since the run began, the prompt's number, and the tokens that were emitted then."""


@dataclass(frozen=True)
class Arm:
    """One program, set up in one way.

    Args:
        python: returns the interpreter to run it with, installing what it needs.
        weight_bytes: what a token has to read at least; None leaves it to the worker to say.
        alone: it answers one prompt at a time, and takes no part where there are more.
    """

    name: str
    program: str
    worker: Path
    settings: dict[str, Any]
    python: Callable[[], Path] = lambda: Path(sys.executable)
    environ: dict[str, str] = field(default_factory=dict)
    weight_bytes: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Models:
    """What is decoded: the target as a folder (with its GGUF inside), the draft as it ships and in vLLM's dialect.

    Args:
        older_draft: an EAGLE-3 draft without what EAGLE-3.1 added, which llama.cpp does not compute: a folder and the
            same as a GGUF. None: llama.cpp decodes without one.
    """

    folder: Path
    draft: Path
    draft_for_vllm: Path
    older_draft: tuple[Path, Path] | None = None

    @property
    def gguf(self) -> str:
        """The target's GGUF."""
        return str(self.folder / GGUF_FILE)

    @property
    def num_parameters(self) -> int:
        """The target's parameters; the folder holds them in float32."""
        return (self.folder / "model.safetensors").stat().st_size // 4


@dataclass(frozen=True)
class Limits:
    """What every program is given alike."""

    threads: int
    context: int
    max_requests: int


def all_arms(models: Models, limits: Limits, depths: Sequence[int], vllm_dtypes: Sequence[str]) -> Iterator[Arm]:
    """Yield the arms, our plain engine first: it also encodes prompts and reads memory."""
    threads, room = {"threads": limits.threads}, {"context": limits.context, "max_requests": limits.max_requests}
    omp = {"OMP_NUM_THREADS": str(limits.threads)}
    ours = {"model": models.gguf, **threads, **room}
    engine = HERE / "slipstream_worker.py"
    yield Arm(PLAIN, "slipstream", engine, {**ours, "draft": "none", "depth": 1}, environ=omp)
    for depth in depths:
        settings = {**ours, "draft": str(models.draft), "depth": depth}
        name = f"slipstream EAGLE-3 K={depth}" if depth else "slipstream EAGLE-3"
        yield Arm(name, "slipstream", engine, settings, environ=omp)

    def llama_python() -> Path:
        return environments.llama_environment() / "python"

    theirs = {"model": models.gguf, "made": str(models.draft_for_vllm.parent), **threads, "context": limits.context}
    for name, format in ((SAME_FILE, ""), ("llama.cpp Q4_0", "Q4_0"), ("llama.cpp Q8_0", "Q8_0")):
        yield Arm(name, "llama", llama_worker_file(), {**theirs, "format": format}, llama_python, omp)

    if models.older_draft is not None:
        folder, file = models.older_draft
        settings = {**ours, "draft": str(folder), "depth": 0}
        yield Arm("slipstream EAGLE-3, llama.cpp's draft", "slipstream", engine, settings, environ=omp)
        program = environments.environments_dir() / "llama/bin" / environments.LLAMA_DRAFTS
        drafted = {"program": str(program), "model": models.gguf, "draft": str(file), "depth": 3, **threads}
        yield Arm(
            "llama.cpp EAGLE-3 K=3", "llama", HERE / "llama_draft_worker.py",
            {**drafted, "context": limits.context}, llama_python, omp, alone=True,
        )  # fmt: skip

    def vllm_python() -> Path:
        return environments.vllm_environment() / "python"

    # In one process, so that a step costs no message; without logs, which would cost time.
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    alone = {**quiet, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for dtype in vllm_dtypes:
        nbytes = models.num_parameters * (4 if dtype == "float32" else 2)
        for name, draft in ((f"vLLM {dtype}", ""), (f"vLLM {dtype} EAGLE-3 K=3", str(models.draft_for_vllm))):
            settings = {"model": str(models.folder), "dtype": dtype, "draft": draft, "depth": 3, **room}
            yield Arm(name, "vllm", HERE / "vllm_worker.py", settings, vllm_python, alone, nbytes)
    yield Arm(
        "transformers float32", "transformers", HERE / "transformers_worker.py",
        {"model": str(models.folder), **threads}, environ=omp, weight_bytes=4 * models.num_parameters,
    )  # fmt: skip


def start(arm: Arm) -> Peer:
    """Install what the arm needs and load it."""
    return Peer(arm.name, arm.python(), arm.worker, arm.settings, arm.environ)


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
