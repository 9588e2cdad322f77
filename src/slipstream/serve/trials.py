"""The server's side of trials: start their process, ask it about grammars, and let slow ones hold up no quick ones."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.serve import grammar_trial
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar_trial import (
    LENGTH_BYTES,
    MAX_CPU_S,
    MAX_MASK_S,
    MAX_MEMORY,
    MAX_STACK,
    MAX_WALL_S,
    GrammarSource,
)

logger = logging.getLogger(__name__)

_QUICK_CPU_S = 0.15
_PATIENCE_S = MAX_WALL_S + 5.0  # a trial ends itself; whoever does not answer even then is not there any more
_RETRY_S = 2
_START_S = 60.0  # for the process to start and read the tokenizer


@dataclass(frozen=True)
class Verdict:
    """How a trial ended.

    Args:
        problem: why the grammar is refused; None if it may be compiled.
        lasting: whether another trial would end in the same way (a busy machine may be why one was ended).
        compile_s: what compiling took.
        num_bytes: memory that the compiled grammar and some steps of an answer took.
    """

    problem: str | None = None
    lasting: bool = True
    compile_s: float = 0.0
    num_bytes: int = 0


class Trials:
    """Tries grammars in a process of its own, which starts with the first and ends with `close`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._setup = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids)}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._quick = _Lane(_QUICK_CPU_S, num_places=2, max_waiting=64)
        self._slow = _Lane(MAX_CPU_S, num_places=2, max_waiting=8)

    async def attempt(self, source: GrammarSource) -> Verdict:
        """Return whether a grammar can be compiled and followed; raises HttpError when too many are being tried.

        A grammar first gets a fraction of the CPU time it may have, and waits only for others that get no more; the few
        that need all of it are tried again among themselves. So hostile grammars keep honest ones waiting but shortly.
        """
        for lane in (self._quick, self._slow):
            verdict = await self._tried(source, lane)
            if verdict is not _OUT_OF_TIME:
                break
        return verdict

    async def _tried(self, source: GrammarSource, lane: "_Lane") -> Verdict:
        async with lane.place():
            for _ in range(2):  # the process may have been killed meanwhile; then there is a new one
                verdict = await _ask(await self._started(), source, lane.cpu_s)
                if verdict is _OUT_OF_PATIENCE:
                    raise busy()
                if verdict is not None:
                    return verdict
        raise busy()

    def close(self) -> None:
        """End the process."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _started(self) -> socket.socket:
        async with self._starting:
            if self._control is not None and self._process is not None and self._process.poll() is None:
                return self._control
            self.close()
            self._process, control = await asyncio.to_thread(self._start)
            self._control = control
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_START_S):
                    if await asyncio.get_running_loop().sock_recv(control, 1):
                        return control
            self.close()
            raise HttpError(500, "The process that tries grammars does not start; the server's log says why.")

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            json.dump(self._setup, file)
            file.seek(0)
            command = [sys.executable, "-P", str(Path(grammar_trial.__file__)), str(theirs.fileno())]
            process = subprocess.Popen(
                command, stdin=file, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        ours.setblocking(False)
        logger.info("grammars are tried in process %d", process.pid)
        return process, ours


class _Lane:
    """Trials of a kind: so many at once, and so many that wait."""

    def __init__(self, cpu_s: float, num_places: int, max_waiting: int) -> None:
        self.cpu_s = cpu_s
        self._places = asyncio.Semaphore(num_places)
        self._num_open = 0
        self._max_open = num_places + max_waiting

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and have it; raises HttpError if too many wait already."""
        if self._num_open >= self._max_open:
            raise busy()
        self._num_open += 1
        try:
            async with self._places:
                yield
        finally:
            self._num_open -= 1


async def _ask(control: socket.socket, source: GrammarSource, cpu_s: float) -> Verdict | None:
    """Have a grammar tried; None if nobody answers. Cancelling this ends the trial."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"t"], [theirs.fileno()])
        except OSError:
            ours.close()
            return None
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    content = json.dumps({"grammar": dataclasses.asdict(source), "cpu_s": cpu_s}).encode()
    try:
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        async with asyncio.timeout(_PATIENCE_S):
            await writer.drain()
            reply = await reader.read()
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()
    return _verdict(json.loads(reply)) if reply else None


def busy() -> HttpError:
    """Return the answer to a grammar that comes while others, or other programs, take the time it needs."""
    return HttpError(
        429, "The server is too busy to compile a schema or grammar now; try again.", retry_after_s=_RETRY_S
    )


def _verdict(reply: dict[str, Any]) -> Verdict:  # JSON of our own process
    if "error" in reply:
        return Verdict(f"cannot be followed: {reply['error']}")
    if "mask_s" in reply:
        return Verdict(f"is too complex: one step of an answer along it takes over {MAX_MASK_S:g} s.")
    if "signal" not in reply:
        return Verdict(compile_s=reply["compile_s"], num_bytes=reply["bytes"])
    return _BY_SIGNAL.get(reply["signal"], Verdict("makes the grammar library fail."))


_TOO_DEEP = Verdict(f"is too deep: compiling it takes over {MAX_STACK >> 20} MiB of stack. Flatten its references.")
_TOO_LARGE = f"is too complex: compiling it takes over {MAX_MEMORY >> 20} MiB of memory."
_OUT_OF_TIME = Verdict(f"is too complex: compiling it takes over {MAX_CPU_S:g} s.")
_OUT_OF_PATIENCE = Verdict(f"got less than {MAX_CPU_S:g} s of a processor in {MAX_WALL_S:g} s.", lasting=False)
_BY_SIGNAL = {
    signal.SIGPROF: _OUT_OF_TIME,
    signal.SIGALRM: _OUT_OF_PATIENCE,
    signal.SIGABRT: Verdict(_TOO_LARGE),
    signal.SIGKILL: Verdict(_TOO_LARGE, lasting=False),
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
}
