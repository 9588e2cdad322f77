"""What serving costs: tokens per second through HTTP against the engine alone, in turns, at the same concurrency.

    python -m benchmarks.serve_overhead --concurrency 8

Both make the same answers to the same prompts. The engine alone keeps `concurrency` requests in flight in this
process while the server idles; then clients in this process keep as many streams open. The ratio is taken pair by
pair, so a slow minute of the machine falls on both.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.serve_client import server, stream

from slipstream import LLM, SamplingParams


def offline_round(llm: LLM, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> float:
    """Answer prompts with so many in flight; return tokens per second."""
    engine, waiting, num_tokens = llm.engine, list(prompts), 0
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < concurrency:
            engine.add(waiting.pop(), params, 0, llm.tokenizer.eos_token_ids, llm.tokenizer.detokenizer())
        num_tokens += sum(len(emission.tokens) for emission in engine.step())
    return num_tokens / (time.perf_counter() - started)


async def server_round(port: int, prompts: list[list[int]], body: dict[str, object], concurrency: int) -> float:
    """Answer prompts through the server with so many streams open; return tokens per second."""
    waiting, num_tokens = list(prompts), 0

    async def client() -> None:
        nonlocal num_tokens
        while waiting:
            request = {**body, "prompt": waiting.pop(), "stream_options": {"include_usage": True}}
            async for event in stream(port, "/v1/completions", request):
                if event is not None and event.get("usage"):
                    num_tokens += event["usage"]["completion_tokens"]

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return num_tokens / (time.perf_counter() - started)


def main() -> int:
    """Measure and report; exit status 1 below 95%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    llm = LLM(options.model, options.draft)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    body: dict[str, object] = {"max_tokens": options.tokens, "ignore_eos": True, "temperature": 0}
    pairs = []
    with server([options.model, "--draft", options.draft]) as (_, port):
        for turn in range(options.rounds + 1):
            texts = [
                f"Round {turn}, question {number}: what is it like to live by the sea?"
                for number in range(options.requests)
            ]
            prompts = [llm.tokenizer.encode(text) for text in texts]
            served = asyncio.run(server_round(port, prompts, body, options.concurrency))
            # In a thread, as the server's engine is: torch's own thread pool behaves otherwise in the main thread.
            with ThreadPoolExecutor(1) as pool:
                alone = pool.submit(offline_round, llm, prompts, params, options.concurrency).result()
            if turn:  # the first round warms both up
                pairs.append((served, alone))
    ratios = [served / alone for served, alone in pairs]
    report = {
        "concurrency": options.concurrency,
        "server_tokens_per_s": [round(served, 1) for served, _ in pairs],
        "offline_tokens_per_s": [round(alone, 1) for _, alone in pairs],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(report, indent=1))
    return 0 if report["median_ratio"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
