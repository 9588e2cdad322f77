"""Ranks as processes: a server starts and ends its own, torchrun may start them, and a dead one is noticed at once."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from parallel.folders import Pair
from ports import free_port

PROGRAM = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from slipstream.cli.main import app; app()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
WITHIN_S = 10.0


class Server:
    """`slipstream serve --tp 2` on a tiny model, and what it wrote to its log."""

    def __init__(self, pair: Pair, *more: str) -> None:
        port = free_port()
        options = ["--draft", str(pair.draft), "--tp", "2", "--dtype", "float32", "--port", str(port), *more]
        self.process = subprocess.Popen(
            [*PROGRAM, "serve", str(pair.target), *options], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.wait(lambda: self.health().status_code == 200, 120)

    def _read(self) -> None:
        self.log.extend(self.process.stderr)

    def health(self) -> httpx.Response:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health")
        assert self.process.poll() is None, "".join(self.log)
        return httpx.Response(0)

    def other_rank(self) -> int:
        """Return the process that holds the second rank."""
        return next(int(found[1]) for line in self.log if (found := re.search(r"rank 1 is process (\d+)", line)))

    def wait(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "".join(self.log)
            time.sleep(0.02)

    def close(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join()
        return code


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def server(dense):
    running = Server(dense, "--draft-tp", "2")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


BODY = {
    "model": "m",
    "prompt": [3, 14, 15],
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "return_tokens": True,
}


def test_a_killed_rank_ends_answers_and_health_within_ten_seconds_and_is_named(server):
    name = server.client.get("/v1/models").json()["data"][0]["id"]
    other = server.other_rank()
    with server.client.stream("POST", "/v1/completions", json={**BODY, "model": name}) as answer:
        lines = answer.iter_lines()
        next(lines)
        killed = time.monotonic()
        os.kill(other, signal.SIGKILL)
        rest = "\n".join(lines)
    assert "error" in rest and "was killed by SIGKILL" in rest
    server.wait(lambda: server.health().status_code == 503, WITHIN_S - (time.monotonic() - killed))
    assert time.monotonic() - killed < WITHIN_S
    reason = server.health().json()["reason"]
    assert f"Rank 1 (process {other}) was killed by SIGKILL" in reason
    refused = server.client.post("/v1/completions", json={**BODY, "model": name, "stream": False})
    assert refused.status_code == 503
    assert "Rank 1" in json.dumps(refused.json())
    assert server.close() == 0
    assert any("Rank 1" in line and "SIGKILL" in line for line in server.log)


def two_ranks(reason: str) -> subprocess.Popen[str]:
    """Start two ranks that only wait, or of which the second fails."""
    program = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), reason]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def other_rank_of(first: subprocess.Popen[str]) -> int:
    assert first.stdout.readline() == "up\n", first.stderr.read()
    return int(first.stderr.readline().rpartition(" ")[2])


def test_a_first_rank_that_ends_leaves_no_other_behind():
    with two_ranks("") as first:
        other = other_rank_of(first)
        assert is_running(other)
        first.stdin.close()
        assert first.wait(30) == 0
        assert not is_running(other)


def test_a_first_rank_that_is_killed_takes_the_others_with_it():
    with two_ranks("") as first:
        other = other_rank_of(first)
        first.kill()
        first.wait()
        end = time.monotonic() + WITHIN_S
        while is_running(other):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_rank_that_fails_says_why():
    with two_ranks("no room for the weights") as first:
        _, log = first.communicate(timeout=60)
    assert first.returncode != 0
    assert "RankLostError: Rank 1 failed (MemoryError: no room for the weights); the other ranks were ended." in log


def test_torchrun_starts_the_ranks_just_as_well(dense):
    def generate(*launcher: str) -> str:
        options = f"--model {dense.target} --draft {dense.draft} --dtype float32 --raw -n 16 --temperature 0.9 --seed 5"
        done = subprocess.run(
            [*launcher, *options.split(), "w3 w14 w15"],
            check=False,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    assert generate(*torchrun, *PROGRAM, "generate", "--tp", "2") == generate(*PROGRAM, "generate")
