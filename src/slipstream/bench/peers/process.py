"""A peer: another program, loaded once in a process and an environment of its own, and asked one thing at a time."""

import json
import subprocess
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, Any

from slipstream.errors import SlipstreamError

HOST = Path(__file__).parent / "host.py"
_KEPT_LINES = 30


class PeerError(SlipstreamError):
    """A peer cannot be installed, does not start, or failed at what it was asked."""


class Peer:
    """A worker behind two pipes; `ask` waits for its answer, so that one peer computes at a time.

    Args:
        python: the interpreter of the peer's environment.
        worker: a file that defines `Worker`; see `host`.
        settings: the worker's arguments.
        environ: variables to set for it, beside those of this process.
    """

    def __init__(
        self, name: str, python: Path, worker: Path, settings: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        variables = [f"{key}={value}" for key, value in environ.items()]
        command = ["env", *variables, str(python), str(HOST), str(worker), json.dumps(settings)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stderr is not None
        self._reader = Thread(target=self._drain, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        try:
            self.about: dict[str, Any] = self._reply("ready")  # what the worker says of itself: any JSON
        except PeerError:
            self.close()
            raise

    def ask(self, call: str, **arguments: Any) -> Any:  # any JSON goes in and comes out
        """Call a method of the worker and return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended. Its last lines:\n{self._last_words()}") from None
        return self._reply("answer")

    @property
    def last_lines(self) -> str:
        """What the peer last wrote to its standard error."""
        return "\n".join(self._last)

    def close(self) -> None:
        """End the peer."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reply(self, key: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise PeerError(f"{self.name} ended with status {status}. Its last lines:\n{self._last_words()}")
        reply = json.loads(line)
        if key not in reply:
            raise PeerError(f"{self.name} failed: {reply.get('error', reply)}")
        return reply[key]

    def _last_words(self) -> str:
        """Return the last lines of a peer that has ended, once they are all read."""
        self._reader.join(timeout=5)
        return self.last_lines

    def _drain(self, stream: IO[str]) -> None:
        for line in stream:
            self._last.append(line.rstrip())
