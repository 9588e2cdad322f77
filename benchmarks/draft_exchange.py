"""What exchanging drafts under load costs, over HTTP, and that it changes no text.

    python -m benchmarks.draft_exchange DRAFT --rounds 12

Rounds in which the server takes DRAFT and its own draft by turns, one every few seconds, against rounds without, in
turns; ratios of tokens a second and of the server's processor time, which a busy machine changes less. Every text must
be that of the rounds without.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.serve_client import metrics, server, stream

from slipstream import LLM
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.records.traffic import Deployed, write_deployed


async def server_round(
    port: int, prompts: list[list[int]], body: dict[str, object], concurrency: int
) -> tuple[float, list[str]]:
    """Answer prompts through the server with so many streams open; return tokens per second and the texts."""
    waiting, num_tokens, texts = list(enumerate(prompts)), 0, [""] * len(prompts)

    async def client() -> None:
        nonlocal num_tokens
        while waiting:
            number, prompt = waiting.pop()
            request = {**body, "prompt": prompt, "stream_options": {"include_usage": True}}
            async for event in stream(port, "/v1/completions", request):
                for choice in [] if event is None else event["choices"]:
                    texts[number] += choice["text"]
                if event is not None and event.get("usage"):
                    num_tokens += event["usage"]["completion_tokens"]

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return num_tokens / (time.perf_counter() - started), texts


@contextmanager
def exchanging(folder: Path, drafts: Sequence[Path], first: int, every_s: float) -> Iterator[None]:
    """Have the server that learns from a folder take one draft after another until the block ends."""
    over = threading.Event()

    def run() -> None:
        for number in itertools.count(first):
            write_deployed(folder, Deployed(number, str(drafts[number % len(drafts)].resolve()), 1.0, 1.0))
            if over.wait(every_s):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    """Measure and report round by round; exit status 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exchange", type=Path, metavar="DRAFT")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between two exchanges")
    options = parser.parse_args()
    shipped = embedded_draft() if options.draft == "auto" else Path(options.draft)
    assert shipped is not None, "the package brings it"
    body: dict[str, object] = {"max_tokens": options.tokens, "ignore_eos": True, "temperature": 0}
    tokenizer = LLM(options.model, None).tokenizer
    asked = [f"Question {number}: what is it like to live by the sea?" for number in range(options.requests)]
    chat = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    pairs: list[dict[bool, tuple[float, float, list[str]]]] = []
    exchanges = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        learn = ["--learn", str(folder), "--learn-elsewhere", "--max-requests", str(options.concurrency)]
        with server([options.model, "--draft", options.draft, *learn]) as (process, port):
            asyncio.run(server_round(port, chat, body, options.concurrency))  # warms it up
            for turn in range(options.rounds):
                pair = {}
                for exchanged in ((False, True), (True, False))[turn % 2]:
                    before, cpu_s = metrics(port)["slipstream_learning_deployed_total"], _cpu_s(process.pid)
                    context = exchanging(folder, [options.exchange, shipped], 1000 * (turn + 1), options.every_s)
                    with context if exchanged else nullcontext():
                        rate, texts = asyncio.run(server_round(port, chat, body, options.concurrency))
                    exchanges += int(metrics(port)["slipstream_learning_deployed_total"] - before)
                    pair[exchanged] = rate, _cpu_s(process.pid) - cpu_s, texts
                pairs.append(pair)
                differing = sum(a != b for pair in pairs for a, b in zip(pair[False][2], pair[True][2], strict=True))
                rates, cpu = ([[pair[arm][part] for pair in pairs] for arm in (False, True)] for part in (0, 1))
                report = {
                    "exchanges": exchanges,
                    "texts": len(chat) * len(pairs),
                    "texts_that_differ": differing,
                    "tokens_per_s_without": [round(rate, 1) for rate in rates[0]],
                    "tokens_per_s_with": [round(rate, 1) for rate in rates[1]],
                    "rate_ratio": round(statistics.harmonic_mean(rates[1]) / statistics.harmonic_mean(rates[0]), 3),
                    "cpu_s_without": [round(seconds, 1) for seconds in cpu[0]],
                    "cpu_s_with": [round(seconds, 1) for seconds in cpu[1]],
                    "cpu_ratio": round(sum(cpu[1]) / sum(cpu[0]), 3),
                }
                print(json.dumps(report), flush=True)
    return int(differing > 0)


def _cpu_s(pid: int) -> float:
    """Return the processor time a process has taken, which a busy machine changes less than the clock's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
