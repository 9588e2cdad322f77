"""Load on loopback: many streams at once, some broken off, some wrong; then everything is accounted for.

    python -m benchmarks.serve_load --seconds 120 --streams 64

It fails (exit status 1) unless no request was lost or answered twice, every completed text equals the offline
engine's for its seed, all pages are back at the end, and memory stayed flat.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.serve_client import metrics, post, server, stream

TOPICS = ("rain", "bridges", "bread", "the moon", "chess", "rivers", "glass", "trains")
BAD = (
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": [-5]},
    {"messages": "x"},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "logit_bias": {"a": 1}},
)


def make_jobs(count: int) -> list[dict[str, Any]]:
    """Return requests of mixed lengths, temperatures and seeds."""
    draw = random.Random(0)
    return [
        {
            "prompt": f"Write about {draw.choice(TOPICS)}. " * draw.choice((1, 1, 3, 10)),
            "max_tokens": draw.choice((4, 12, 24, 48, 96)),
            "temperature": draw.choice((0.0, 0.7, 1.0)),
            "seed": seed,
            "ignore_eos": draw.random() < 0.5,
        }
        for seed in range(count)
    ]


def offline_texts(jobs: list[dict[str, Any]], model: str, draft: str) -> list[str]:
    """Answer the jobs with the engine alone."""
    from slipstream import LLM, SamplingParams

    llm = LLM(model, draft)
    texts = []
    for job in jobs:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        params = SamplingParams(**{name: job[name] for name in names})
        texts.append(llm.generate(job["prompt"], params).text)
    return texts


class Load:
    """The clients, and what became of every request."""

    def __init__(self, port: int, jobs: list[dict[str, Any]], texts: list[str], deadline: float) -> None:
        self.port = port
        self.jobs = jobs
        self.texts = texts
        self.deadline = deadline
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.finished_ids: Counter[str] = Counter()

    async def client(self, number: int) -> None:
        """Ask one thing after another until the time is up."""
        draw = random.Random(number)
        turn = 0
        while time.monotonic() < self.deadline:
            turn += 1
            request_id = f"load-{number}-{turn}"
            job = draw.randrange(len(self.jobs))
            action = draw.choices(("stream", "whole", "disconnect", "abort", "bad"), (64, 12, 12, 4, 8))[0]
            self.counts[action] += 1
            try:
                await getattr(self, f"_{action}")(request_id, job, draw)
            except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
                self.problems.append(f"{request_id} ({action}) was lost: {error!r}")

    async def _stream(self, request_id: str, job: int, _: random.Random) -> None:
        text, reasons, ended = "", [], 0
        async for event in stream(self.port, "/v1/completions", self.jobs[job], request_id):
            if event is None:
                ended += 1
            elif "error" in event:
                raise RuntimeError(event["error"]["message"])
            else:
                if event["id"] != f"cmpl-{request_id}":
                    self.problems.append(f"{request_id} got an event of {event['id']}")
                text += event["choices"][0]["text"]
                reasons.append(event["choices"][0]["finish_reason"])
        if ended != 1 or [reason for reason in reasons if reason] != reasons[-1:]:
            self.problems.append(f"{request_id} ended {ended} times with {reasons[-3:]}")
        self._finished(request_id, job, text)

    async def _whole(self, request_id: str, job: int, _: random.Random) -> None:
        answer = await post(self.port, "/v1/completions", self.jobs[job], request_id)
        if answer.status != 200 or answer.body["id"] != f"cmpl-{request_id}":
            raise RuntimeError(f"status {answer.status}: {answer.body}")
        self._finished(request_id, job, answer.body["choices"][0]["text"])

    async def _disconnect(self, request_id: str, job: int, draw: random.Random) -> None:
        num_events = draw.randrange(4)
        events = stream(self.port, "/v1/completions", self.jobs[job], request_id)
        async for _ in events:
            num_events -= 1
            if num_events < 0:
                break
        await events.aclose()  # type: ignore[attr-defined]  # an async generator

    async def _abort(self, request_id: str, job: int, draw: random.Random) -> None:
        try:
            async with asyncio.timeout(draw.random()):
                answer = await post(self.port, "/v1/completions", self.jobs[job], request_id)
        except TimeoutError:
            return
        self.counts["abort came too late"] += 1
        self._finished(request_id, job, answer.body["choices"][0]["text"])

    async def _bad(self, request_id: str, _job: int, draw: random.Random) -> None:
        answer = await post(self.port, "/v1/completions", draw.choice(BAD), request_id)
        if answer.status != 400:
            self.problems.append(f"{request_id}: a bad request got status {answer.status}")

    def _finished(self, request_id: str, job: int, text: str) -> None:
        self.counts["finished"] += 1
        self.finished_ids[request_id] += 1
        if text != self.texts[job]:
            self.problems.append(f"{request_id}: {text!r} is not the offline {self.texts[job]!r}")


def resident_mib(pid: int) -> float:
    """Return a process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def run(pid: int, load: Load, streams: int, seconds: float) -> list[float]:
    """Run the clients; return the server's memory, taken twenty times on the way."""
    memory: list[float] = []

    async def watch() -> None:
        for _ in range(20):
            await asyncio.sleep(seconds / 20)
            memory.append(resident_mib(pid))

    await asyncio.gather(watch(), *(load.client(number) for number in range(streams)))
    for _ in range(100):
        found = metrics(load.port)
        if not found["slipstream_running_requests"] and not found["slipstream_waiting_requests"]:
            break
        await asyncio.sleep(0.1)
    return memory


def judge(load: Load, found: dict[str, float], memory: list[float]) -> list[str]:
    """Return everything that is not as promised."""
    problems = list(load.problems)
    problems += [f"{name} was answered {count} times" for name, count in load.finished_ids.items() if count > 1]
    ended = found['slipstream_requests_total{reason="stop"}'] + found['slipstream_requests_total{reason="length"}']
    if ended < load.counts["finished"]:
        problems.append(f"clients saw {load.counts['finished']} answers, the server counts {ended:.0f}")
    if found['slipstream_requests_total{reason="error"}'] or found["slipstream_failed_steps_total"]:
        problems.append("the server counts failed answers")
    if found["slipstream_kv_usage"] or found["slipstream_running_requests"] or found["slipstream_waiting_requests"]:
        problems.append("pages or requests are left at the end")
    settled, last = memory[len(memory) // 2], memory[-1]
    if last > 1.05 * settled + 8:
        problems.append(f"memory grew from {settled:.0f} to {last:.0f} MiB in the second half")
    return problems


def main() -> int:
    """Run the load and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=40)
    options = parser.parse_args()
    jobs = make_jobs(options.jobs)
    texts = offline_texts(jobs, options.model, options.draft)
    with server([options.model, "--draft", options.draft]) as (process, port):
        load = Load(port, jobs, texts, time.monotonic() + options.seconds)
        memory = asyncio.run(run(process.pid, load, options.streams, options.seconds))
        found = metrics(port)
    problems = judge(load, found, memory)
    report = {
        "seconds": options.seconds,
        "streams": options.streams,
        "requests": dict(load.counts),
        "tokens": found["slipstream_emitted_tokens_total"],
        "server_ends": {r: found[f'slipstream_requests_total{{reason="{r}"}}'] for r in ("stop", "length", "abort")},
        "preemptions": found["slipstream_preemptions_total"],
        "acceptance_length": found[f'sglang:spec_accept_length{{model_name="{options.model}"}}'],
        "memory_mib": [round(value) for value in memory],
        "problems": problems[:20],
    }
    print(json.dumps(report, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
