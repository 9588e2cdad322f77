"""Starts our server where another project's tests would start theirs; runs inside that project's environment.

Standard library only, for it is imported by the other project's Python. What our command line knows of the other's
flags is passed on, the rest is left out and written down, so that a test that needs such a flag fails for that reason.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_S = 180
MAX_CONTEXT = 8192  # the embedded model's own
_CONTEXT_FLAGS = ("--max-model-len", "--context-length", "--max-context")
# Ours have these, too, but the values are meant for another model on another machine.
_NOT_OURS_TO_OBEY = frozenset({"--dtype", "--host", "--port", "--seed", "--tokenizer", "--memory-fraction"} | {
    "--gpu-memory-utilization", "--mem-fraction-static", "--tensor-parallel-size", "--tp-size", "--tp", "--device",
})  # fmt: skip


@dataclass
class Launcher:
    """Starts servers with the embedded model under any name.

    Args:
        python: the interpreter that has our package.
        source: the folder of our package, put on its path.
        known: options of `slipstream serve`.
        dropped: flags that were left out, with how often.
    """

    python: str
    source: str
    log: Path
    known: frozenset[str]
    dropped: dict[str, int] = field(default_factory=dict)
    started: dict[tuple[str, ...], tuple["subprocess.Popen[bytes]", int]] = field(default_factory=dict)

    def address(self, model: str, flags: Sequence[str]) -> tuple[str, int]:
        """Return host and port of a server for a model's name and another server's flags; the same one if it runs."""
        arguments = self.translated(model, flags)
        key = tuple(arguments)
        if key not in self.started or self.started[key][0].poll() is not None:
            self.stop()  # one at a time: the machine is small
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = int(free.getsockname()[1])
            self.started[key] = (self._start(arguments, port), port)
        return "127.0.0.1", self.started[key][1]

    def url(self, model: str, flags: Sequence[str]) -> str:
        """Return the address of a server as clients write it."""
        host, port = self.address(model, flags)
        return f"http://{host}:{port}"

    def process(self, model: str, flags: Sequence[str], port: int) -> "subprocess.Popen[bytes]":
        """Return the process of a new server at a port; whoever asked ends it."""
        self.stop()
        arguments = self.translated(model, flags)
        self.started[tuple(arguments)] = (self._start(arguments, port), port)
        return self.started[tuple(arguments)][0]

    def translated(self, model: str, flags: Sequence[str]) -> list[str]:
        """Return the part of a launch line that our server knows."""
        kept: list[str] = []
        named = False
        for flag, values in _pairs(flags):
            if flag in _CONTEXT_FLAGS:
                values[:] = [str(min(int(value), MAX_CONTEXT)) for value in values[-1:]]
            if flag in self.known and flag not in _NOT_OURS_TO_OBEY:
                named |= flag == "--served-model-name"
                kept += [part for value in values for part in (flag, value)] if values else [flag]
            else:
                self.dropped[flag] = self.dropped.get(flag, 0) + 1
        return kept if named else [*kept, "--served-model-name", model]

    def stop(self) -> None:
        """End what was started here."""
        for process, _ in self.started.values():
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        self.started.clear()

    def _start(self, arguments: Sequence[str], port: int) -> "subprocess.Popen[bytes]":
        command = [self.python, "-m", "slipstream", "serve", *arguments, "--port", str(port), "--drain-timeout", "2"]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command[2:])}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": self.source, "HF_HUB_OFFLINE": "1"}
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return process
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        process.kill()
        raise RuntimeError(f"the server did not start: {' '.join(command[2:])}; see {self.log}")


def launcher_for(python: str, source: str, log: Path) -> Launcher:
    """Return a launcher that knows what the server of this checkout knows."""
    code = (
        "import inspect, json, typing; from slipstream.cli.serve import serve; "
        "hints = typing.get_type_hints(serve, include_extras=True); "
        "print(json.dumps([d for h in hints.values() for m in getattr(h, '__metadata__', ()) "
        "for d in (getattr(m, 'param_decls', None) or ()) ] + ['--' + n.replace('_', '-') for n in hints]))"
    )
    done = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    names = [part for name in json.loads(done.stdout.splitlines()[-1]) for part in name.split("/")]
    return Launcher(python, source, log, frozenset(names))


def _pairs(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return flags with the values that follow them."""
    found: list[tuple[str, list[str]]] = []
    for part in flags:
        if part.startswith("--"):
            flag, _, value = part.partition("=")
            found.append((flag.replace("_", "-"), [value] if value else []))
        elif found:
            found[-1][1].append(str(part))
    return found
