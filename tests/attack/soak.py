"""Load on loopback: many clients at once, some broken off, some wrong; then everything is accounted for.

    python -m tests.attack.soak                                  # 64 clients for two minutes
    python -m tests.attack.soak --minutes 30 --clients 256       # a soak

The page pool is small, so requests are preempted. It fails (exit status 1) unless no request was lost or answered
twice, every finished text equals the offline engine's for its seed (and one under a schema what the server said
alone, without its draft), all pages are back at the end, and memory stayed flat after the first minutes.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.serve_client import Answer, Json, metrics, post, server, stream

from tests.attack.offline import Choice, offline_texts
from tests.attack.watch import Prober, Wait, memory_mib
from tests.attack.wire import request

PATH = "/v1/completions"
TOPICS = ("rain", "bridges", "bread", "the moon", "chess", "rivers", "glass", "trains")
BAD: tuple[Json, ...] = (
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": [-5]},
    {"messages": "x"},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "logit_bias": {"a": 1}},
    {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
)
ACTIONS = {"stream": 56, "whole": 12, "schema": 8, "disconnect": 12, "abort": 4, "bad": 8}
"""What a client does next, by weight."""
PHASES = ("connected", "in the head", "in the body", "asked", "answered", "between events")
"""When a client that goes away does so."""
SETTLED_MINUTES = 5.0


def make_jobs(count: int) -> list[Json]:
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


def make_schema_jobs(count: int) -> list[Json]:
    """Return requests whose answers must follow schemas, no two alike."""
    kinds: tuple[Json, ...] = ({"type": "integer"}, {"type": "string", "maxLength": 9}, {"enum": ["a", "b"]})
    jobs = []
    for seed in range(count):
        fields = {f"{name}{seed}": kinds[(seed + place) % 3] for place, name in enumerate("xyz"[: 1 + seed % 3])}
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        jobs.append(
            {"prompt": "JSON:", "max_tokens": 40, "temperature": seed % 2, "seed": seed, "response_format": form}
        )
    return jobs


async def quiet_texts(port: int, jobs: list[Json]) -> list[str]:
    """Return what the server answers one at a time, without its draft."""
    answers = [await post(port, PATH, {**job, "speculate": False}) for job in jobs]
    return [answer.body["choices"][0]["text"] for answer in answers]


class Load:
    """The clients, and what became of every request."""

    def __init__(self, port: int, jobs: list[Json], texts: list[str], num_schemas: int, deadline: float) -> None:
        """Keep what is asked.

        Args:
            num_schemas: so many jobs, the last, have a schema.
        """
        self.port = port
        self.jobs = jobs
        self.texts = texts
        self.deadline = deadline
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.finished_ids: Counter[str] = Counter()
        self.compared: set[int] = set()
        self._num_plain = len(jobs) - num_schemas

    async def client(self, number: int) -> None:
        """Ask one thing after another until the time is up."""
        draw = random.Random(number)
        turn = 0
        while time.monotonic() < self.deadline:
            turn += 1
            request_id = f"load-{number}-{turn}"
            action = draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            job = draw.randrange(self._num_plain)
            self.counts[action] += 1
            try:
                await getattr(self, f"_{action}")(request_id, job, draw)
            except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
                if str(error).startswith("status 429"):  # those that left are not counted out until their step ends
                    self.counts["turned away"] += 1
                    await asyncio.sleep(1)
                    continue
                self.problems.append(f"{request_id} ({action}) was lost: {error!r}")

    async def _stream(self, request_id: str, job: int, _: random.Random) -> None:
        text, reasons, ended = "", [], 0
        async for event in stream(self.port, PATH, self.jobs[job], request_id):
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
        self._take(request_id, job, await post(self.port, PATH, self.jobs[job], request_id))

    async def _schema(self, request_id: str, _job: int, draw: random.Random) -> None:
        job = draw.randrange(self._num_plain, len(self.jobs))
        await (self._stream if draw.random() < 0.5 else self._whole)(request_id, job, draw)

    async def _disconnect(self, request_id: str, job: int, draw: random.Random) -> None:
        phase = draw.choice(PHASES)
        data = request("POST", PATH, {**self.jobs[job], "stream": True}, [("X-Request-ID", request_id)])
        sent = {"connected": 0, "in the head": 50, "in the body": len(data) - 9}.get(phase, len(data))
        num_reads = {"answered": 1, "between events": 1 + draw.randrange(5)}.get(phase, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data[:sent])
            await writer.drain()
            for _ in range(num_reads):
                if not await reader.read(1 << 12):
                    break
        finally:
            writer.transport.abort() if draw.random() < 0.3 else writer.close()

    async def _abort(self, request_id: str, job: int, draw: random.Random) -> None:
        try:
            async with asyncio.timeout(2 * draw.random()):
                answer = await post(self.port, PATH, self.jobs[job], request_id)
        except TimeoutError:
            return
        self.counts["abort came too late"] += 1
        self._take(request_id, job, answer)

    async def _bad(self, request_id: str, _job: int, draw: random.Random) -> None:
        answer = await post(self.port, PATH, draw.choice(BAD), request_id)
        if answer.status != 400:
            self.problems.append(f"{request_id}: a bad request got status {answer.status}")

    def _take(self, request_id: str, job: int, answer: Answer) -> None:
        if answer.status != 200 or answer.body["id"] != f"cmpl-{request_id}":
            raise RuntimeError(f"status {answer.status}: {answer.body}")
        self._finished(request_id, job, answer.body["choices"][0]["text"])

    def _finished(self, request_id: str, job: int, text: str) -> None:
        self.counts["finished"] += 1
        self.finished_ids[request_id] += 1
        self.compared.add(job)
        if text != self.texts[job]:
            self.problems.append(f"{request_id}: {text!r} is not the expected {self.texts[job]!r}")


async def run(pid: int, load: Load, num_clients: int, minutes: float) -> list[float]:
    """Run the clients; return the server's memory, taken sixty times on the way."""
    memory: list[float] = []

    async def watch() -> None:
        for _ in range(60):
            await asyncio.sleep(minutes)  # a sixtieth of the whole
            memory.append(memory_mib(pid))

    await asyncio.gather(watch(), *(load.client(number) for number in range(num_clients)))
    for _ in range(100):
        found = metrics(load.port)
        if not found["slipstream_running_requests"] and not found["slipstream_waiting_requests"]:
            break
        await asyncio.sleep(0.1)
    return memory


def judge(load: Load, found: dict[str, float], memory: list[float], minutes: float) -> list[str]:
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
    if not found["slipstream_preemptions_total"]:
        problems.append("nothing was preempted: the page pool is too large for this load")
    level, last = flat(memory, minutes)
    if last > 1.05 * level + 8:
        problems.append(f"memory grew from {level:.0f} to {last:.0f} MiB once it had waited")
    return problems


def flat(memory: list[float], minutes: float) -> tuple[float, float]:
    """Return the memory once it had waited (after five minutes, or half of a shorter run) and at the end."""
    waited = memory[int(len(memory) * min(0.5, SETTLED_MINUTES / minutes)) :]
    fifth = -(-len(waited) // 5)
    return statistics.median(waited[:fifth]), statistics.median(waited[-fifth:])


def summary(options: argparse.Namespace, load: Load, found: dict[str, float], waits: list[Wait]) -> dict[str, Any]:
    """Return what happened, for the report."""
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": dict(load.counts),
        "different_texts_compared": len(load.compared),
        "tokens": found["slipstream_emitted_tokens_total"],
        "server_ends": {r: found[f'slipstream_requests_total{{reason="{r}"}}'] for r in ("stop", "length", "abort")},
        "preemptions": found["slipstream_preemptions_total"],
        "acceptance_length": found[f'sglang:spec_accept_length{{model_name="{options.model}"}}'],
        "longest_wait_for_health_s": round(max((wait.seconds for wait in waits), default=0.0), 2),
    }


def main() -> int:
    """Run the load and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=500, help="different requests, each with its offline text")
    parser.add_argument("--schemas", type=int, default=40, help="different schemas")
    parser.add_argument("--num-pages", type=int, default=96, help="pages of the server's cache")
    options = parser.parse_args()
    choice = Choice(options.model, options.draft, options.device)
    jobs, schema_jobs = make_jobs(options.texts), make_schema_jobs(options.schemas)
    texts = offline_texts(jobs, choice)
    with server([*choice.flags, "--max-context", "1024", "--num-pages", str(options.num_pages)]) as (process, port):
        texts += asyncio.run(quiet_texts(port, schema_jobs))
        prober = Prober(port)
        load = Load(port, jobs + schema_jobs, texts, len(schema_jobs), time.monotonic() + 60 * options.minutes)
        memory = asyncio.run(run(process.pid, load, options.clients, options.minutes))
        waits, found = prober.stop(), metrics(port)
    problems = judge(load, found, memory, options.minutes)
    report = summary(options, load, found, waits)
    report |= {"memory_mib": " ".join(f"{value:.0f}" for value in memory), "problems": problems[:20]}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
