"""What the server's own path costs: streams behind an engine without a model, read by another process.

    python -m benchmarks.serve_host                       # 40 and 256 streams at 25,000 tokens a second, and more
    python -m benchmarks.serve_host --streams 40 --rate 40000 --tokens-per-step 3 --logprobs 5

The fake engine (`serve_fake_engine.py`) gives every stream its tokens at a steady pace. This process only reads and
counts. It fails (exit status 1) where the server falls behind the pace by more than 2%, or a stream that had begun
pauses for more than 30 ms. Pauses count from one arrival of bytes to the next, the engine's own pace included. They
mean nothing on a machine that has no core to spare: those during which even a thread that only sleeps woke late are
reported apart, and so is the share of the time that threads of the server were ready to run and had no core.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.serve_client import free_port, get

LIMIT_MS = 30.0
_TICK_S = 0.005
_MARK = b'"choices":[{'  # one in every event that carries tokens


@dataclass(frozen=True)
class Load:
    """One measurement."""

    streams: int = 40
    rate: int = 25_000
    tokens_per_step: int = 1
    seconds: float = 6.0
    logprobs: int | None = None
    arrivals: int = 0
    arriving_tokens: int = 8192

    @property
    def period_s(self) -> float:
        """From one step of the engine to the next."""
        return self.streams * self.tokens_per_step / self.rate

    @property
    def max_tokens(self) -> int:
        """Tokens of each answer."""
        return round(self.seconds * self.rate / self.streams)


@dataclass
class Found:
    """What came of it."""

    tokens_per_s: float = 0.0
    events_per_s: float = 0.0
    cpu_us_per_token: float = 0.0
    longest_pause_ms: float = 0.0
    pauses_over_limit: int = 0
    waited_for_core_share: float = 0.0
    machine_pauses_ms: list[float] = field(default_factory=list)


class Stream:
    """One answer being read."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        self.socket.setblocking(False)
        self.num_events = 0
        self.arrivals: list[float] = []
        self.over = False
        self._rest = b""

    def read(self) -> None:
        """Take what has come."""
        data = self._rest + self.socket.recv(1 << 16)
        self.arrivals.append(time.perf_counter())
        self.num_events += data.count(_MARK)
        self.over = b"data: [DONE]" in data
        self._rest = data[-len(_MARK) + 1 :] if not data.endswith(b"\n") else b""


class Ticks(threading.Thread):
    """Notes when this machine held up a thread that only sleeps: such pauses are not the server's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late: list[tuple[float, float]] = []
        self.ending = False

    def run(self) -> None:
        """Sleep and look at the clock until told to end."""
        before = time.perf_counter()
        while not self.ending:
            time.sleep(_TICK_S)
            now = time.perf_counter()
            if now - before > _TICK_S + LIMIT_MS / 2000:
                self.late.append((before, now))
            before = now


def measure(load: Load) -> Found:
    """Serve, read, and return what was found."""
    port = free_port()
    arguments = ["--port", port, "--together", load.streams, "--period-s", load.period_s]
    arguments += ["--tokens-per-step", load.tokens_per_step]
    command = [sys.executable, "-m", "benchmarks.serve_fake_engine", *map(str, arguments)]
    process = subprocess.Popen(command)
    try:
        _wait(port, process)
        return _read_all(load, port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _read_all(load: Load, port: int, pid: int) -> Found:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
    body |= {"max_tokens": load.max_tokens}
    if load.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": load.logprobs}
    ticks = Ticks()
    ticks.start()
    streams = [Stream(port, body) for _ in range(load.streams)]
    arriving = multiprocessing.get_context("spawn").Process(target=_arrive, args=(port, load), daemon=True)
    if load.arrivals:
        arriving.start()
    before, waited = _cpu_s(pid), _waited_for_core_s(pid)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                key.data.read()
                if key.data.over:
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    ticks.ending = True
    if load.arrivals:
        arriving.join(30)
    found = _found(load, streams, _cpu_s(pid) - before, ticks)
    found.waited_for_core_share = round((_waited_for_core_s(pid) - waited) / load.seconds, 3)
    return found


def _found(load: Load, streams: list[Stream], cpu_s: float, ticks: Ticks) -> Found:
    # The first arrival of a stream is its head; its answer begins with the second.
    seconds = max(s.arrivals[-1] for s in streams) - min(s.arrivals[1] for s in streams)
    num_tokens = load.streams * load.max_tokens
    pauses = [pair for s in streams for pair in zip(s.arrivals[1:], s.arrivals[2:], strict=False)]
    own = [end - start for start, end in pauses if not any(a < end and start < b for a, b in ticks.late)]
    return Found(
        tokens_per_s=round(num_tokens / seconds),
        events_per_s=round(sum(s.num_events for s in streams) / seconds),
        cpu_us_per_token=round(1e6 * cpu_s / num_tokens, 1),
        longest_pause_ms=round(1e3 * max(own), 1),
        pauses_over_limit=sum(1e3 * pause > LIMIT_MS for pause in own),
        machine_pauses_ms=[round(1e3 * (end - start), 1) for start, end in ticks.late],
    )


def _arrive(port: int, load: Load) -> None:
    """Send prompts of token ids in the middle of the measurement, all at once, each for one token."""
    content = json.dumps({"prompt": [5 + i % 4000 for i in range(load.arriving_tokens)], "max_tokens": 1}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    time.sleep(load.seconds / 2)
    with contextlib.ExitStack() as stack:
        arrived = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(load.arrivals)]
        for connection in arrived:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        for connection in arrived:
            while connection.recv(1 << 16):
                pass


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waited_for_core_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[1]) for one in threads) / 1e9


def _wait(port: int, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        try:
            get(port, "/health")
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.1)
    raise RuntimeError("the server did not start within a minute")


USUAL = (
    Load(),
    Load(streams=256),
    Load(tokens_per_step=3),
    Load(logprobs=5, rate=10_000),
    Load(rate=20_000, arrivals=40),
    Load(rate=10_000, arrivals=200, arriving_tokens=128),
)


def main() -> int:
    """Measure and report; exit status 1 where the server does not keep up or pauses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("streams", int), ("rate", int), ("tokens-per-step", int), ("logprobs", int), ("arrivals", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--arriving-tokens", type=int)
    parser.add_argument("--seconds", type=float)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    failed = False
    for load in (Load(**given),) if given else USUAL:
        found = measure(load)
        behind = found.tokens_per_s < 0.98 * load.rate
        failed |= behind or found.pauses_over_limit > 0
        print(json.dumps({**asdict(load), **asdict(found), "keeps_up": not behind}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
