"""Run what a checkpoint brings along (templates, patterns, tokenizers) in a child process with limits.

Jinja's sandbox keeps a template from the machine, but not from its time and memory: a few nested loops, or one product
of a string, are enough. No list of forbidden words is complete, so the operating system draws the line: a child has a
limit of processor time for each call and of memory altogether, and is ended when it reaches one. It knows nothing of
the engine, starts in a tenth of a second at the first call, and ends with the process that started it.
"""

import contextlib
import importlib
import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_LENGTH = struct.Struct("<I")
_WALL_PER_CPU = 20.0
"""How many seconds by the clock a second of processor time may take: the machine may be busy."""
_START_S = 20.0
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from slipstream.checkpoint.confined import serve; serve(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))"
)


class LimitError(Exception):
    """The child took more than it may, and was ended; the message says what of."""


@dataclass(frozen=True)
class Limits:
    """What one call may take.

    Args:
        memory_bytes: of the child's address space, for as long as it lives.
        answer_bytes: of the answer, written as JSON.
    """

    cpu_s: float
    memory_bytes: int
    answer_bytes: int


class Confined:
    """A module with a function `handle`, called in a child process; requests and answers are JSON values.

    Threads may share one; calls take turns. After a call that went over a limit the next one starts a new child.
    """

    def __init__(self, module: str, limits: Limits) -> None:
        self._module = module
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def call(self, request: Any) -> Any:  # JSON
        """Return what `handle` returns; LimitError if it took too much, or ended the child in another way."""
        message = json.dumps(request).encode()
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                self.close()  # it was ended from outside since the last call, which is not this call's fault
            child = self._child or self._start()
            deadline = time.monotonic() + _START_S + _WALL_PER_CPU * self._limits.cpu_s
            try:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(_LENGTH.pack(len(message)) + message)
                child.stdin.flush()
                (length,) = _LENGTH.unpack(_read(child.stdout, _LENGTH.size, deadline))
                if length > self._limits.answer_bytes:
                    raise LimitError(f"it makes more than {self._limits.answer_bytes >> 20} MB of text")
                return json.loads(_read(child.stdout, length, deadline))
            except (OSError, EOFError) as error:
                raise LimitError(self._cause(child)) from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the child, if there is one."""
        if self._end is not None:
            self._end()
        self._child = self._end = None

    def _start(self) -> "subprocess.Popen[bytes]":
        ours = str(Path(__file__).parents[2])
        limits = self._limits
        arguments = [json.dumps([ours, *sys.path]), self._module, str(limits.cpu_s), str(limits.memory_bytes)]
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-S", "-c", _START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, self._child)
        return self._child

    def _cause(self, child: "subprocess.Popen[bytes]") -> str:
        try:
            code = child.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None or code == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_s:g} s of processor time"
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"its process ended by {name}; it may need more than {self._limits.memory_bytes >> 20} MB of memory"


def serve(module: str, cpu_s: float, memory_bytes: int) -> None:
    """Be the child: answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the child ends when its input does
    _limit_memory(memory_bytes)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not get between the answers
    handle = importlib.import_module(module).handle
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        request = json.loads(requests.read(*_LENGTH.unpack(head)))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process, even inside a library's loop
        answer = json.dumps(handle(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _limit_memory(memory_bytes: int) -> None:
    import resource  # POSIX only, as are the signals above

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a limit already lower than this, or a system without
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _read(stream: IO[bytes], count: int, deadline: float) -> bytes:
    """Return `count` bytes; EOFError if the child ends, or has not answered by the deadline."""
    parts = io.BytesIO()
    while parts.tell() < count:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(stream.fileno(), min(count - parts.tell(), 1 << 20)) if ready else b""
        if not part:
            raise EOFError
        parts.write(part)
    return parts.getvalue()


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent bytes for a child that is gone
                stream.close()
