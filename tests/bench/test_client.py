"""The client recovers what a server with known timing and acceptance did, and calls every failure by its name."""

import asyncio
from itertools import pairwise

import pytest
from aiohttp import web

from slipstream.bench.client import Client, Sampling, open_session
from slipstream.bench.measure import scrape
from slipstream.bench.metrics import latency_of, repetition_of, throughput_of
from slipstream.bench.server_metrics import read_acceptance, read_phases
from slipstream.bench.traffic import LoadRun
from slipstream.bench.workload import Prompt
from tests.bench.fake_server import Behaviour, FakeServer
from tests.bench.virtual_time import run_virtual


def exchange_all(behaviour, num_requests=12, concurrency=3, tokens=40, rate=None, timeout_s=100.0):
    """Run a load against a fake server on simulated time; return exchanges, the server, and both metrics pages."""

    async def body():
        fake = FakeServer(behaviour)
        url = await fake.start()
        async with open_session() as session:
            client = await Client.connect(session, url)
            before = await scrape(client)
            load = LoadRun(client, Sampling(), concurrency, timeout_s)
            prompts = [Prompt(tokens, token_ids=(7, 8, 9)) for _ in range(num_requests)]
            exchanges = await load.run(prompts, seed=1, request_rate=rate)
            after = await scrape(client)
        await fake.stop()
        return exchanges, fake, before, after

    return run_virtual(body())


@pytest.mark.parametrize("counts_chunks", [True, False])
def test_plain_decoding_is_measured_as_the_server_timed_it(counts_chunks):
    behaviour = Behaviour(ttft_s=0.2, step_s=0.03, counts_chunks=counts_chunks)
    exchanges, _, _, _ = exchange_all(behaviour, num_requests=12, concurrency=3, tokens=41)
    latency, throughput = latency_of(exchanges), throughput_of(exchanges, num_devices=2)
    assert latency.ttft_ms.median == pytest.approx(200, rel=0.02)
    assert latency.tpot_ms.mean == pytest.approx(30, rel=0.02)
    assert latency.itl_ms.p99 == pytest.approx(30, rel=0.02)
    assert latency.itl_token_ms.median == pytest.approx(30, rel=0.02)
    assert latency.e2e_ms.p90 == pytest.approx(200 + 40 * 30, rel=0.02)
    seconds = 4 * (0.2 + 40 * 0.03)
    assert throughput.output_tok_s == pytest.approx(12 * 41 / seconds, rel=0.02)
    assert throughput.total_tok_s_per_device == pytest.approx(12 * (41 + 3) / seconds / 2, rel=0.02)


def test_speculative_decoding_is_measured_as_the_server_timed_it():
    behaviour = Behaviour(ttft_s=0.1, step_s=0.04, accepts=(0.8, 0.6, 0.5), seed=3, names="slipstream")
    exchanges, fake, before, after = exchange_all(behaviour, num_requests=60, concurrency=8, tokens=200)
    acceptance, latency = read_acceptance(before, after), latency_of(exchanges)
    expected_length = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.5
    assert acceptance.length == pytest.approx(expected_length, rel=0.02)
    pairs = zip(acceptance.accepted_by_position, acceptance.drafted_by_position, strict=True)
    assert [accepted / drafted for accepted, drafted in pairs] == pytest.approx([0.8, 0.48, 0.24], rel=0.05)
    assert acceptance.num_drafts == fake.drafts
    # Chunks come once a step; a token costs a step divided by the acceptance length.
    assert latency.itl_ms.median == pytest.approx(40, rel=0.02)
    assert latency.tpot_ms.mean == pytest.approx(40 / expected_length, rel=0.02)
    phases = read_phases(before, after)
    assert phases.verify_s / phases.total_s == pytest.approx(0.7, rel=0.02)
    (cost,) = phases.by_context
    assert (cost.context, cost.passes, cost.verify_s) == (256, fake.drafts, pytest.approx(phases.verify_s))
    assert cost.tokens - cost.rows == acceptance.num_accepted_tokens


def test_acceptance_is_read_from_sglangs_counters_too():
    behaviour = Behaviour(accepts=(0.9, 0.9), seed=5, names="sglang")
    _, _, before, after = exchange_all(behaviour, num_requests=30, tokens=150)
    acceptance = read_acceptance(before, after)
    assert acceptance.length == pytest.approx(1 + 0.9 + 0.81, rel=0.02)
    assert "spec_verify_calls_total" in acceptance.source


def test_acceptance_is_read_from_what_sglang_says_of_itself_where_its_metrics_are_off():
    behaviour = Behaviour(accepts=(0.9, 0.9), seed=5, names="sglang", metrics=False)
    _, _, before, after = exchange_all(behaviour, num_requests=30, tokens=150)
    acceptance = read_acceptance(before, after)
    assert acceptance.length == pytest.approx(1 + 0.9 + 0.81, rel=0.02)
    assert "average since the server's start" in acceptance.source


@pytest.mark.parametrize("names", ["vllm", "slipstream"])
def test_a_server_that_drafts_nothing_has_no_acceptance(names):
    _, _, before, after = exchange_all(Behaviour(names=names))
    assert read_acceptance(before, after) is None


def test_poisson_arrivals_come_at_the_asked_rate_and_the_same_for_the_same_seed():
    behaviour = Behaviour(ttft_s=0.01, step_s=0.001)
    first, _, _, _ = exchange_all(behaviour, num_requests=400, concurrency=1000, tokens=2, rate=5.0)
    again, _, _, _ = exchange_all(behaviour, num_requests=400, concurrency=1000, tokens=2, rate=5.0)
    times = [e.result.sent_at_s for e in first]
    assert (times[-1] - times[0]) / 399 == pytest.approx(0.2, rel=0.1)
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) < 0.02 < 0.5 < max(gaps)
    other = [e.result.sent_at_s for e in again]
    assert [t - times[0] for t in times] == pytest.approx([t - other[0] for t in other], abs=0.01)


def test_no_more_requests_run_at_once_than_the_concurrency():
    exchanges, _, _, _ = exchange_all(Behaviour(), num_requests=20, concurrency=4)
    edges = [(e.result.sent_at_s, 1) for e in exchanges]
    edges += [(e.result.sent_at_s + e.result.latency_s, -1) for e in exchanges]
    running = peak = 0
    for _, step in sorted(edges):
        running += step
        peak = max(peak, running)
    assert peak == 4


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(fail_every=4), "HTTP 503"),
        (Behaviour(hang_every=4), "no complete answer within 100 s"),
        (Behaviour(garbage_every=4), "not JSON"),
        (Behaviour(cut_every=4), "ended before [DONE]"),
    ],
)
def test_each_failure_is_named_and_the_other_requests_still_count(behaviour, words):
    exchanges, _, _, _ = exchange_all(behaviour, num_requests=12)
    errors = [e.result.error for e in exchanges if e.result.error]
    assert len(errors) == 3
    assert all(words in error for error in errors)


def test_a_server_that_stops_early_in_spite_of_ignore_eos_is_a_failure():
    exchanges, _, _, _ = exchange_all(Behaviour(ignore_eos=False), num_requests=3)
    assert all("asked for exactly 40 tokens with ignore_eos, got 20" in e.result.error for e in exchanges)


def test_a_server_that_hangs_for_good_is_given_up_after_one_round():
    exchanges, fake, _, _ = exchange_all(Behaviour(hang_every=1), num_requests=50, concurrency=5)
    assert fake.num_requests < 15
    assert sum("not sent" in e.result.error for e in exchanges) > 30


def test_repetition_tells_a_loop_from_prose():
    assert repetition_of("the cat sat on the mat and looked at the moon for a while") < 0.1
    assert repetition_of("again and " * 50) > 0.9
    assert repetition_of("") == 0.0


def test_a_request_sent_on_a_connection_that_was_being_closed_is_sent_again():
    """A server that answers once a connection, and drops whatever comes second, as if it had just closed it."""

    async def body():
        used = set()

        @web.middleware
        async def once(request, handler):
            if request.transport in used and request.method == "POST":
                request.transport.abort()
            used.add(request.transport)
            return await handler(request)

        fake = FakeServer(Behaviour(ttft_s=0.001, step_s=0.0002))
        app = fake.app()
        app.middlewares.append(once)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        async with open_session() as session:
            client = await Client.connect(session, url)
            exchanges = [await client.generate(Prompt(5, token_ids=(7,)), Sampling(), 10.0) for _ in range(3)]
        await runner.cleanup()
        return exchanges

    assert [exchange.result.error for exchange in asyncio.run(body())] == [None] * 3
