"""Runs of slipstream's verbs that end at a moment drawn from a seed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "400",
}


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit status (negative for a signal), what it printed, the changes it made."""

    status: int
    output: str
    changes: int

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def refused(self) -> bool:
        """Whether it ended in a sentence of its own."""
        return self.status == 1 and "error: " in self.output and "Traceback" not in self.output


class Forks:
    """A process that has imported everything and forks for each run."""

    def __init__(self) -> None:
        imports = ["slipstream.cli.main", "slipstream.train.run.phases", "slipstream.quant.quantize", "crash.convert"]
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "crash" / "doomed.py"), *imports],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip

    def run(self, plan: dict) -> int:
        """Run a plan in a fork and return its exit status, negative for a signal."""
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Verb:
    """A command line, and the folder whose changes count."""

    forks: Forks
    arguments: tuple[str, ...]
    watch: Path
    module: str = "slipstream.cli.main"

    def run(self, at: int = 0, after_s: float = 0.0, action: str = "kill") -> Ended:
        """Run it, to its end or to the moment asked for."""
        count, output = self.watch.parent / "count", self.watch.parent / "output"
        count.unlink(missing_ok=True)
        status = self.forks.run(
            {
                "module": self.module, "arguments": list(self.arguments), "watch": str(self.watch), "at": at,
                "after_s": after_s, "action": action, "count": str(count), "output": str(output),
            }
        )  # fmt: skip
        changes = int(count.read_text()) if count.exists() else 0
        return Ended(status, output.read_text(), changes)

    def finish(self) -> Ended:
        """Run it to its end, which must be a good one."""
        ended = self.run()
        assert ended.status == 0, ended.output
        return ended


def moments(seed: int, changes: int, number: int, spread_s: float) -> Iterator[tuple[int, float]]:
    """Yield moments: half of them just before a change, half up to `spread_s` after one."""
    rng = random.Random(seed)
    for i in range(number):
        yield rng.randrange(1, changes + 1), rng.choice((0.0, rng.random() * spread_s)) if i else 0.0


def contents(folder: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


@contextlib.contextmanager
def small_disk(at: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own, of that size; the test is skipped where none may be mounted."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(at)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here ({mounted.stderr.decode().strip()})")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)


def make_read_only(disk: Path) -> None:
    """Let nobody write to a disk any more, root included."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
