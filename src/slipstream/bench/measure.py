"""Measures one point on a running server and judges whether the figures may be believed."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.bench.client import Client, Sampling, ServerError
from slipstream.bench.metrics import REPETITIVE, Exchange, latency_of, throughput_of
from slipstream.bench.plan import Point
from slipstream.bench.recipe import Recipe
from slipstream.bench.reference_client import Load
from slipstream.bench.server_metrics import (
    MetricsPage,
    page_of_server_info,
    parse_metrics,
    read_acceptance,
    read_phases,
)
from slipstream.bench.traffic import LoadRun
from slipstream.bench.workload import Prompt, Template, file_prompts, random_prompts
from slipstream.records.point import Acceptance, Latency, Phases, RequestResult, Throughput

HARDLY_ACCEPTS = 1.05
"""An acceptance length below this means the draft is as good as useless, most often loaded wrongly."""


@dataclass(frozen=True)
class Measurement:
    """What was measured at one point, and what is wrong with it (`reasons` make it invalid, `warnings` do not)."""

    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    throughput: Throughput | None = None
    latency: Latency | None = None
    acceptance: Acceptance | None = None
    phases: Phases | None = None
    repetition: float | None = None
    requests: tuple[RequestResult, ...] = ()


async def measure_point(
    client: Client, point: Point, recipe: Recipe, on_request: Callable[[], None] = lambda: None
) -> Measurement:
    """Warm the server up, send the point's requests between two readings of its counters, and judge the result."""
    load, sampling = point.load, Sampling(point.load.workload.temperature, None, point.load.workload.ignore_eos)
    try:
        prompts = await make_prompts(client, load, recipe.target.token_range)
        if load.num_warmups:
            # Warm-ups have prompts of their own, so that no prompt of the point is in a prefix cache.
            apart = replace(load, num_requests=load.num_warmups, seed=load.seed + 7919)
            warmups = await make_prompts(client, apart, recipe.target.token_range)
            run = LoadRun(client, sampling, load.concurrency, recipe.traffic.timeout_s)
            warmed = await run.run(warmups, load.seed)
            broken = [exchange for exchange in warmed if exchange.result.error]
            if broken:
                return Measurement(reasons=(f"warm-up: {failures_in_words(broken, len(warmed))}",))
        before = await scrape(client)
        run = LoadRun(client, sampling, load.concurrency, recipe.traffic.timeout_s)
        exchanges = await run.run(prompts, load.seed, load.request_rate, on_request)
    except ServerError as error:
        return Measurement(reasons=(str(error),))
    after = await scrape(client)
    return judge(exchanges, point, before, after)


def judge(
    exchanges: Sequence[Exchange], point: Point, before: MetricsPage | None, after: MetricsPage | None
) -> Measurement:
    """Turn finished requests and two readings of the server's counters into a measurement."""
    reasons: list[str] = []
    warnings: list[str] = []
    failed = [exchange for exchange in exchanges if exchange.result.error]
    if failed:
        reasons.append(failures_in_words(failed, len(exchanges)))
    acceptance = read_acceptance(before, after) if before and after else None
    spec = point.launch.speculation
    if spec and spec.method == "ngram" and acceptance is None:
        warnings.append("n-gram lookup found nothing to propose")
    elif spec and before and after and acceptance is None:
        reasons.append(f"the arm declares {spec.method} drafting, but the server counted no drafts")
    elif spec and acceptance is None:
        warnings.append("the server has neither /metrics nor SGLang's /server_info, so acceptance is unknown")
    elif spec is None and acceptance is not None:
        reasons.append("the arm declares no drafting, but the server counted drafts")
    elif spec and acceptance and acceptance.length < HARDLY_ACCEPTS:
        warnings.append(
            f"acceptance length {acceptance.length:.2f}: the draft is hardly ever right; is it this target's?"
        )
    good = [exchange for exchange in exchanges if not exchange.result.error]
    repetition = sum(e.result.repetition for e in good) / len(good) if good else None
    if repetition is not None and repetition > REPETITIVE:
        warnings.append(
            f"outputs repeat themselves ({repetition:.0%} of 4-grams seen before): acceptance is flattered; "
            "compare with real prompts"
        )
    start = min((e.result.sent_at_s for e in exchanges), default=0.0)
    valid = not reasons
    return Measurement(
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        throughput=throughput_of(exchanges, point.launch.topology.devices()) if valid else None,
        latency=latency_of(exchanges) if valid else None,
        acceptance=acceptance if valid else None,
        phases=read_phases(before, after) if valid and before and after else None,
        repetition=repetition,
        requests=tuple(replace(e.result, sent_at_s=e.result.sent_at_s - start) for e in exchanges),
    )


async def make_prompts(client: Client, load: Load, token_range: tuple[int, int] | None) -> list[Prompt]:
    """Make a load's prompts: a function of workload and seed alone, so that every arm gets the same."""
    if load.workload.kind == "prompts":
        return file_prompts(load.workload, load.num_requests, load.seed)
    assert token_range is not None, "checked when the recipe was read"
    template = await client.template() if load.workload.chat_template else Template()
    return random_prompts(load.workload, token_range, template, load.num_requests, load.seed)


def failures_in_words(failed: Sequence[Exchange], num_sent: int) -> str:
    """Sum up failures by kind, the most frequent first."""
    kinds = Counter(exchange.result.error or "" for exchange in failed)
    listed = "; ".join(f"{count}x {error}" for error, count in kinds.most_common(4))
    more = f"; and {len(kinds) - 4} other kinds" if len(kinds) > 4 else ""
    return f"{len(failed)} of {num_sent} requests failed: {listed}{more}"


async def scrape(client: Client) -> MetricsPage | None:
    """Read the server's counters, or what SGLang says of itself without them; None where there is neither."""
    try:
        return parse_metrics(await client.get_text("/metrics"))
    except ServerError:  # judged where it matters: an arm that drafts is warned about, any other needs no counters
        pass
    for path in ("/server_info", "/get_server_info"):
        try:
            return page_of_server_info(await client.get_json(path))
        except ServerError:
            continue
    return None
