"""What a draft gains where a grammar decides the form: forced JSON and forced tool calls, with a draft and without.

    python -m benchmarks.structured

One server, one request at a time. Each request is sent with its draft and without one, in turns, so a slow minute of
the machine falls on both; its prompt is in the prefix cache by then. The tokens must be the same. A request's time is
that of the whole answer over HTTP.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve_client import metrics, post, server

CHAT = "/v1/chat/completions"
FORMS = Path(__file__).with_name("forms.jsonl")


def requests(max_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the requests by name: a form of the answer, or a tool that must be called."""
    same = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    lines = [json.loads(line) for line in FORMS.read_text(encoding="utf-8").splitlines()]
    return {line.pop("name"): {**same, **line} for line in lines}


@dataclass(frozen=True)
class Timed:
    """An answer's tokens and how long they took."""

    tokens: list[int]
    seconds: float


async def timed(port: int, body: dict[str, Any], speculate: bool) -> Timed:
    """Send a request and wait for its whole answer."""
    started = time.perf_counter()
    answer = await post(port, CHAT, {**body, "speculate": speculate})
    seconds = time.perf_counter() - started
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body}")
    return Timed(answer.body["choices"][0]["token_ids"], seconds)


def measure(port: int, rounds: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Send every request in turns; return what each took by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, body in requests(max_tokens).items():
        pairs: list[tuple[Timed, Timed]] = []
        before = metrics(port)
        for turn in range(rounds + 1):
            order = (True, False) if turn % 2 else (False, True)
            answers = {speculate: asyncio.run(timed(port, body, speculate)) for speculate in order}
            if answers[True].tokens != answers[False].tokens:
                raise RuntimeError(f"{name}: the draft changed the tokens")
            if turn:  # the first round warms up
                pairs.append((answers[True], answers[False]))
        after = metrics(port)
        drafted, plain = (statistics.median(pair[i].seconds for pair in pairs) for i in (0, 1))
        found[name] = {
            "tokens": len(pairs[0][0].tokens),
            "drafted_ms": round(1e3 * drafted, 1),
            "plain_ms": round(1e3 * plain, 1),
            "ratio": round(statistics.median(plain.seconds / drafted.seconds for drafted, plain in pairs), 2),
            "acceptance_length": _acceptance_length(before, after),
        }
    return found


def _acceptance_length(before: dict[str, float], after: dict[str, float]) -> float:
    """Return tokens emitted per pass that drafted, by vLLM's names for the counters."""

    def counted(what: str) -> float:
        names = [name for name in after if name.startswith(f"vllm:spec_decode_num_{what}_total")]
        return sum(after[name] - before.get(name, 0.0) for name in names)

    return round(1 + counted("accepted_tokens") / max(counted("drafts"), 1.0), 2)


def main() -> int:
    """Measure and report; exit status 1 below the asked ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--at-least", type=float, default=1.5, help="the least ratio of all requests together")
    options = parser.parse_args()
    with server([options.model, "--draft", options.draft]) as (_, port):
        found = measure(port, options.rounds, options.tokens)
    ratios = [one["ratio"] for one in found.values()]
    total = sum(one["plain_ms"] for one in found.values()) / sum(one["drafted_ms"] for one in found.values())
    print(
        json.dumps({"requests": found, "median_ratio": statistics.median(ratios), "ratio": round(total, 2)}, indent=1)
    )
    return 0 if total >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
