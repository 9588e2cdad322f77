"""Records of an imagined machine, with known speed-ups, for the report's tests and for looking at its page."""

import numpy as np

from slipstream.records.evals import (
    FirstDifference,
    Gsm8kItem,
    Gsm8kRecord,
    LosslessCase,
    LosslessRecord,
    PerplexityRecord,
    TextScore,
)
from slipstream.records.point import (
    Acceptance,
    ContextCost,
    Distribution,
    Hardware,
    Latency,
    Phases,
    PointKey,
    PointRecord,
    Provenance,
    Throughput,
)
from slipstream.records.store import RecordSet

HARDWARE = Hardware("Linux 6.1 x86_64", "Imagined CPU", 2, 16.0)
ARMS = {"no-spec": (), "ngram": (0.35, 0.2, 0.1), "eagle3-bf16": (0.78, 0.6, 0.45), "eagle3-fp8": (0.77, 0.59, 0.44)}
DRAFT_MS = {"no-spec": 0.0, "ngram": 0.2, "eagle3-bf16": 2.4, "eagle3-fp8": 1.6}


def spread(mean, rng):
    return Distribution.of(list(mean * np.exp(rng.normal(0, 0.1, 60))))


def provenance(recipe, arm):
    argv = ("slipstream", "serve", "embedded", *(("--speculative-algorithm", "EAGLE3") if arm != "no-spec" else ()))
    return Provenance(
        recipe, "ab" * 32, {}, "cd" * 32, argv, {}, "", "http://127.0.0.1:8600",
        {"slipstream": "0.1.0", "server": "slipstream 0.1.0", "python": "3.11"}, HARDWARE,
        "2026-01-02T03:04:05+00:00", "2026-01-02T03:05:05+00:00",
    )  # fmt: skip


def point(arm, concurrency, seed, workload="chat", context=128, recipe="sample", noise=0.01):
    """One record from a simple model of a server: a step costs more with batch, width and context."""
    rng = np.random.default_rng([seed, concurrency, context, len(arm)])
    wobble = np.exp(np.random.default_rng([seed, concurrency, context]).normal(0, 0.05) + rng.normal(0, noise))
    rates = ARMS[arm]
    length = 1 + sum(rates)
    verify_ms = 12 + 0.35 * concurrency * (1 + len(rates)) + context * concurrency * 0.0004
    step_ms = (verify_ms + DRAFT_MS[arm] + 0.8) * wobble
    tpot = step_ms / length
    per_s = concurrency * 1e3 / tpot
    drafts = 4000.0
    latency = Latency(
        spread(3 * verify_ms + context * 0.1, rng),
        spread(64 * tpot, rng),
        spread(tpot, rng),
        spread(step_ms, rng),
        None,
    )
    return PointRecord(
        key=PointKey(arm, "tp1", workload, concurrency, seed),
        baseline_arm="no-spec",
        status="valid",
        num_devices=1,
        provenance=provenance(recipe, arm),
        input_tokens=context,
        output_tokens=64,
        num_requests=8 * concurrency,
        throughput=Throughput(10.0, 1.0, per_s, per_s * 2, per_s, per_s * 2),
        latency=latency,
        acceptance=Acceptance(
            length, "vllm:spec_decode_num_drafts_total", drafts, drafts * len(rates), drafts * sum(rates),
            tuple(drafts * r for r in rates), (drafts,) * len(rates),
        ) if rates else None,
        phases=phases_of(verify_ms * drafts / 1e3, DRAFT_MS[arm] * drafts / 1e3, drafts, length, context),
        repetition=0.1,
        warnings=("outputs repeat themselves (61% of 4-grams seen before): acceptance is flattered",)
        if workload.startswith("random") and rates else (),
    )  # fmt: skip


def phases_of(verify_s, draft_s, drafts, length, context):
    """Half of the passes at the prompt's length, half a little further on."""
    at = tuple(
        ContextCost(tokens, drafts / 2, drafts / 2, drafts / 2 * length, draft_s / 2, verify_s / 2)
        for tokens in (context, context * 3 // 2)
    )
    return Phases(draft_s, verify_s, 0.8 * drafts / 1e3, prefill_s=0.2 * verify_s, by_context=at)


def invalid(arm, concurrency, seed):
    return PointRecord(
        PointKey(arm, "tp1", "chat", concurrency, seed), "no-spec", "invalid", 1, provenance("sample", arm),
        reasons=("1 of 20 requests failed: 1x HTTP 503: <script>alert('x')</script>",), num_requests=20, num_failed=1,
    )  # fmt: skip


def gsm8k(arm, flips=()):
    items = tuple(
        Gsm8kItem(i, "#### 1", "1", "1", (i % 10 != 0) ^ (i in flips), (i % 12 != 0) ^ (i in flips)) for i in range(300)
    )
    return Gsm8kRecord(
        arm, "http://x", "m", 10, False, "slipstream", {}, HARDWARE, "2026-01-02", "2026-01-02", "00" * 32, items
    )


def perplexity(arm, baseline=None):
    theirs = (None, None) if baseline is None else (-20.5, -39.0)
    items = (TextScore(10, -20.0, theirs[0]), TextScore(20, -40.0, theirs[1]))
    hardware = Hardware("Linux 6.1 x86_64", "A CPU that scored texts", 4, 8.0)
    return PerplexityRecord(arm, baseline, "http://x", "m", {}, hardware, "2026-01-02", "2026-01-02", items)


def sample_set():
    points = [
        point(arm, concurrency, seed, workload, context)
        for workload, context in (("chat", 128), ("random-2k", 2048))
        for arm in ARMS
        for concurrency in (1, 2, 4, 8)
        for seed in (1, 2, 3)
    ]
    points = [p for p in points if p.key != PointKey("eagle3-fp8", "tp1", "chat", 8, 3)]
    cases = tuple(LosslessCase(i, 0.0, 0, 64) for i in range(31))
    differs = LosslessCase(31, 0.8, 1, 64, FirstDifference(17, " cat", " dog", 0.0021))
    lossless = LosslessRecord(
        "eagle3-fp8", "no-spec", "http://a", "http://b", "m", {}, HARDWARE, "t", "t", (*cases, differs)
    )
    return RecordSet(
        points=(*points, invalid("eagle3-fp8", 8, 3)),
        gsm8k=(gsm8k("no-spec"), gsm8k("eagle3-bf16"), gsm8k("eagle3-fp8", flips=(3, 24, 77))),
        lossless=(lossless,),
        perplexity=(perplexity("fp8-keys", "no-spec"), perplexity("alone")),
    )
