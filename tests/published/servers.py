"""Starts published lines in a folder of tiny checkpoints, counted down to what this machine has."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 120
PLACES = {
    "/path/to/kimi-k2.5-eagle3": "lightseekorg/kimi-k2.5-eagle3",
    "<path-to-kimi-k2.5>": "amd/Kimi-K2.5-W4A8",
    "<path-to-this-model>": "ginsongsong/eagle3-kimik2.5-w4a8",
}
COUNTED_DOWN = {
    **dict.fromkeys(("--tp", "--tensor-parallel-size"), "2"),
    **dict.fromkeys(("--mem-fraction-static", "--gpu-memory-utilization"), "0.05"),
    "--host": "127.0.0.1",
}
"""GPUs, the share of memory (of a machine that others use, too) and the address."""


def slipstream(folder, *words, env=()):
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *words],
        cwd=folder, env=environment(env), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def environment(more):
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", **dict(more)}


def on_this_machine(words):
    """Return a line for this machine, and what was changed."""
    port, changed, line = str(free_port()), [], []
    words = [PLACES.get(word, word) for word in words]
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        if before in COUNTED_DOWN and word != COUNTED_DOWN[before]:
            changed.append(f"{before} {word} -> {COUNTED_DOWN[before]}")
            line.append(COUNTED_DOWN[before])
        else:
            line.append(port if before == "--port" else word)
    if "--port" not in line:
        line += ["--port", port]
    return line, port, changed


@contextmanager
def started(folder, words, env=()):
    """Start a launch line and give its address and what it said; end it afterwards."""
    line, port, changed = on_this_machine(words)
    log = folder / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", *line],
            cwd=folder, env=environment(env), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while not answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", log, changed
    finally:
        process.terminate()
        process.wait(60)


def answers(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def answer(url, path, body):
    """Post a request and return what came back."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
