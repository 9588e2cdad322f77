"""Sends a point's requests: a fixed number of streams kept busy, or Poisson arrivals besides."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.bench.client import Client, Sampling
from slipstream.bench.metrics import Exchange
from slipstream.bench.workload import Prompt
from slipstream.records.point import RequestResult


class LoadRun:
    """One point's requests in flight; `run` returns them in the order of the prompts."""

    def __init__(self, client: Client, sampling: Sampling, concurrency: int, timeout_s: float) -> None:
        self._client = client
        self._sampling = sampling
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._failures_in_a_row = 0

    async def run(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        request_rate: float | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> list[Exchange]:
        """Send every prompt.

        `seed` fixes the arrival times and the sampling (request i uses `seed * 100003 + i`). `request_rate` is the mean
        number of arrivals a second; None sends as soon as a stream is free.
        """
        streams = asyncio.Semaphore(self._concurrency)
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        arrival = loop.time()
        tasks = []
        for index, prompt in enumerate(prompts):
            if request_rate is not None:
                arrival += rng.expovariate(request_rate)
                await asyncio.sleep(max(0.0, arrival - loop.time()))
            sampling = replace(self._sampling, seed=seed * 100003 + index)
            tasks.append(asyncio.create_task(self._send(streams, prompt, sampling, on_done)))
        return list(await asyncio.gather(*tasks))

    async def _send(
        self, streams: asyncio.Semaphore, prompt: Prompt, sampling: Sampling, on_done: Callable[[], None]
    ) -> Exchange:
        async with streams:
            if self._failures_in_a_row >= max(3, self._concurrency):
                # Nothing has worked for a whole round of streams: waiting out every time-out would only lose hours.
                now = asyncio.get_running_loop().time()
                error = f"not sent: {self._failures_in_a_row} requests in a row had failed"
                exchange = Exchange(RequestResult(now, 0.0, 0, 0, error=error), (), ())
            else:
                exchange = await self._client.generate(prompt, sampling, self._timeout_s)
                self._failures_in_a_row = self._failures_in_a_row + 1 if exchange.result.error else 0
        on_done()
        return exchange
