"""Time attention with all requests' keys shared out evenly on this GPU, beside programs of each request's own.

    PYTHONPATH=src python benchmarks/gpu_even.py --out FOLDER [--seconds 60] [--start FILE]

First the bits, in processes that compile: one query to four, alone, among 8 and among 40 requests, contexts around the
borders of groups, each as programs of a request's own have it. Then attention alone, in a graph over several layers'
caches with a small kernel before each: contexts spread around 1,408 keys, and 10,240 keys. Then whole decoder layers of
Llama-8B's shape at 1,152, 1,408 and 10,240 keys: each request's own, and the best two. FOLDER gets `sm_90.json` with
the best, to be put into kernels/triton/configs, and `even.json` with every time. A candidate that fails is skipped, and
said.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

from gpu_rows import Layers, said
from gpu_rows_tried import ALL, Case
from gpu_tune import replayed_us, starting_tuning, write_tuning
from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention import AttentionLaunch, attention, walks_of
from slipstream.kernels.triton.attention_blocks import SPLITS_IN_GROUP
from slipstream.kernels.triton.attention_hopper import Walks
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.tuning import AttentionConfig, Tuning

PAGE, HEADS, GROUPS, WIDTH = 16, 32, 8, 128
KEY_BYTES = 2 * 2 * GROUPS * WIDTH
Fields = dict[str, int | bool]
Times = dict[tuple[int, Case], float]
"""Microseconds by keys of a request, and requests x nodes."""
BOUNDS = {1152: 4096, 1408: 4096, 10240: 16384}  # keys of a request, and the bound on them a graph is captured for
LAYERS = {1152: 4, 1408: 4, 10240: 2}
ALONE: dict[int, tuple[Case, ...]] = {1408: ALL[2:], 10240: ALL[2:]}
CONFIGURED = "each request's own"
THREE: Fields = {"even_programs": 396, "even_from": 0, "even_stages": 2, "even_registers": 168}
CANDIDATES: dict[str, Fields] = {  # programs are 132 processors times those that fit one
    "two stages, 3 a processor": THREE,
    "three stages, 3 a processor": {**THREE, "even_stages": 3},
    "three stages, 2 a processor": {**THREE, "even_programs": 264, "even_stages": 3, "even_registers": 0},
    "four stages, 2 a processor": {**THREE, "even_programs": 264, "even_stages": 4, "even_registers": 0},
    "two stages, 4 a processor": {**THREE, "even_programs": 528, "even_registers": 128},
    "two stages, 3, twice the programs": {**THREE, "even_programs": 792},
}
CONTEXTS = (1500, 2046, 2048, 2049, 64, 3, 255, 256, 257, 320, 1023, 1030, 5000)


def spread(keys: int, count: int) -> list[int]:
    """Return contexts that differ by up to a fifth where they are short; they add up to the same as if they did not."""
    if keys > 4096:
        return [keys] * count
    return [keys + (2 * (i % 2) - 1) * (keys * (i // 2 * 7 % 20) // 100) for i in range(count)]


class Requests:
    """Requests over layers of a cache, each with a context of its own, and queries for the end of each."""

    def __init__(self, contexts: list[int], num_layers: int, bound: int, device: torch.device) -> None:
        self.contexts, self._bound, self._device = contexts, bound, device
        own = [-(-context // PAGE) for context in contexts]
        self._table = torch.zeros(len(contexts), bound // PAGE, dtype=torch.int32, device=device)
        order = torch.randperm(sum(own), device=device).int()
        for row, pages in enumerate(order.split(own)):
            self._table[row, : len(pages)] = pages
        size = (sum(own) * PAGE, GROUPS, WIDTH)
        self.layers = [
            KvLayer(*(torch.empty(size, device=device, dtype=torch.bfloat16).normal_() for _ in "kv"))
            for _ in range(num_layers)
        ]
        past = [self._table[row, own[row] - 1].item() * PAGE + i for row, context in enumerate(contexts)
                for i in range((max(context, 4) - 1) % PAGE + 1, PAGE)]  # fmt: skip
        for layer in self.layers:  # nobody may read what lies past a context's end
            for cache in (layer.keys_SGd, layer.values_SGd):
                cache[past] = float("nan")
        self._q = torch.randn(len(contexts), 4, HEADS, WIDTH, device=device).bfloat16()
        self._counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        self._between = torch.zeros(1024, device=device)

    def batch(self, rows: list[int], queries: int, skipped: int = 0) -> tuple[Tensor, AttentionBatch]:
        """Return the last queries of some requests but for the `skipped` very last, and the batch they make."""
        q = self._q[rows, 4 - skipped - queries : 4 - skipped].flatten(0, 1).contiguous()
        ends = torch.tensor([max(self.contexts[row] - skipped, queries) for row in rows], device=self._device)
        own = (ends[:, None] + torch.arange(-queries, 0, device=self._device)).flatten()
        return q, AttentionBatch(
            query_starts_R1=torch.arange(0, len(own) + 1, queries, dtype=torch.int32, device=self._device),
            kv_lens_R=ends.int(),
            page_table_RP=self._table[rows],
            kv_index_T=own,
            ancestors_T=torch.full_like(own, -1),
            page_size=PAGE,
            max_queries=queries,
            max_keys=self._bound,
        )

    def attended(self, config: AttentionConfig, rows: list[int], queries: int, skipped: int = 0) -> Tensor:
        """Return what queries attend to in the first layer: [rows, queries, ...]."""
        q, batch = self.batch(rows, queries, skipped)
        launch = AttentionLaunch(config, self._counters, dependent=True, early=True)
        walks = self._walks(batch, launch)
        self._between.add_(1.0)
        out = attention(q, self.layers[0], batch, WIDTH**-0.5, None, launch, None, walks)
        return out.view(len(rows), queries, -1)

    def _walks(self, batch: AttentionBatch, launch: AttentionLaunch) -> Walks | None:
        """Return a pass's walks; a kernel that lets nobody start early must lie between them and attention."""
        return walks_of(batch, len(batch.kv_index_T), HEADS, self.layers[0], self._q.dtype, launch)

    def step(self, config: AttentionConfig, case: Case) -> Callable[[], Tensor]:
        """Return attention over all layers, with a small kernel before each."""
        q, batch = self.batch(list(range(case[0])), case[1])
        launch = AttentionLaunch(config, self._counters, dependent=True, early=True)

        def run() -> Tensor:
            walks = self._walks(batch, launch)
            for layer in self.layers:
                self._between.add_(1.0)
                out = attention(q, layer, batch, WIDTH**-0.5, None, launch, None, walks)
            return out

        return run


def wrong_bits(requests: Requests, today: AttentionConfig, config: AttentionConfig) -> list[str]:
    """Return where bits are other than today's, or depend on what shares the pass."""
    count, found = len(requests.contexts), []
    among = {
        (queries, skipped): requests.attended(today, list(range(count)), queries, skipped)
        for queries, skipped in ((4, 0), (1, 0), (1, 3), (3, 1))
    }
    for rows in ([0], [1], [4], list(range(8)), list(range(count))):
        for (queries, skipped), expected in among.items():
            if not torch.equal(requests.attended(config, rows, queries, skipped), expected[rows]):
                found.append(f"{len(rows)} x {queries} from {rows[0]}")
    return found


def context_sets() -> dict[str, tuple[list[int], int]]:
    """Return contexts of 40 requests to compare bits for, and the bound on keys."""
    mixed = [CONTEXTS[i % len(CONTEXTS)] for i in range(40)]
    shorter, alike = [min(context, 4000) for context in mixed], [1216 + 7 * i % 150 for i in range(40)]
    return {"mixed": (mixed, 16384), "up to 4,000 keys": (shorter, 4096), "alike": (alike, 4096)}


def check(task: tuple[str, Tuning, Fields]) -> tuple[str, str]:
    """Return a candidate's name, and what is wrong with it: "" if its bits are today's."""
    name, tuning, fields = task
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            device = torch.device("cuda")
            config = dataclasses.replace(tuning.attention, **fields)
            wrong = [
                one
                for some, bound in context_sets().values()
                for one in wrong_bits(Requests(some, 1, bound, device), tuning.attention, config)
            ]
    except Exception as error:  # noqa: BLE001 - what else there is to find out is worth more
        return name, f"failed: {said(error)}"
    return name, "; ".join(f"other bits at {one}" for one in wrong[:4])


def compile_layers(task: tuple[Tuning, Case]) -> str:
    """Run a layer once, so that its kernels are in Triton's cache; return what went wrong."""
    tuning, case = task
    try:
        with torch.no_grad():
            for bound in sorted(set(BOUNDS.values())):
                Layers(1, 64, 40, torch.device("cuda"), bound).pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - it is said, and shows again where the layer is timed
        return f"{case}: {said(error)}"
    return ""


def checked(tuning: Tuning, pool: Pool) -> list[str]:
    """Compile everything in the pool's processes; return the candidates whose bits are today's."""
    started, right = time.monotonic(), []
    products = pool.imap_unordered(compile_layers, [(tuning, case) for case in ALL])
    tasks = [(name, tuning, fields) for name, fields in CANDIDATES.items()]
    for name, wrong in pool.imap_unordered(check, tasks):
        print(f"  {wrong or 'the same bits'}: {name}  ({time.monotonic() - started:.0f} s)", flush=True)
        right += [] if wrong else [name]
    for error in products:
        print(f"  does not run: {error}" if error else "", end="\n" if error else "", flush=True)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    return [name for name in CANDIDATES if name in right]


def with_fields(tuning: Tuning, fields: Fields) -> Tuning:
    """Return a tuning with other fields of attention."""
    return dataclasses.replace(tuning, attention=dataclasses.replace(tuning.attention, **fields))


def shown(times: Times) -> str:
    """Return times in a line, by keys."""
    parts = itertools.groupby(times.items(), key=lambda item: item[0][0])
    return " | ".join(" ".join(f"{us:6.1f}" for _, us in part) for _, part in parts)


def heading(what: str, keys: Iterable[int], cases: tuple[Case, ...]) -> str:
    """Return what the columns are."""
    named = " ".join(f"{f'{r}x{n}':>6}" for r, n in cases)
    where = " | ".join(f"{k:,}" for k in keys)
    return f"{what} at {where} keys\n{'':36} {' | '.join(named for _ in where.split(' | '))}"


class Alone:
    """Attention by itself, over caches that no cache of the processor holds."""

    def __init__(self, cases: dict[int, tuple[Case, ...]], device: torch.device) -> None:
        self._cases = cases
        self._requests = {
            keys: Requests(spread(keys, 40), 6 if keys < 4096 else 2, 4096 if keys < 4096 else 16384, device)
            for keys in cases
        }
        between = torch.zeros(1024, device=device)

        def nothing() -> Tensor:
            for _ in range(6):
                between.add_(1.0)
            return between

        self._nothing = replayed_us(nothing, 9)[0] / 6

    def measured(self, name: str, config: AttentionConfig) -> Times:
        """Return microseconds of one layer's attention, less those of the kernel before; print them."""
        times: Times = {}
        for keys, case in ((keys, case) for keys, cases in self._cases.items() for case in cases):
            requests = self._requests[keys]
            us = replayed_us(requests.step(config, case), 9)[0] / len(requests.layers)
            times[keys, case] = us - self._nothing
        print(f"{name:36} {shown(times)}", flush=True)
        return times

    def speed(self, times: Times) -> str:
        """Return TB/s of keys and values, in the columns of times."""
        rates = {
            (keys, case): sum(self._requests[keys].contexts[: case[0]]) * KEY_BYTES / us / 1e6
            for (keys, case), us in times.items()
        }
        parts = itertools.groupby(rates.items(), key=lambda item: item[0][0])
        return " | ".join(" ".join(f"{rate:6.2f}" for _, rate in part) for _, part in parts)


def score(times: Times, before: Times) -> float:
    """Return the mean of times beside those before, those of 40 requests three times."""
    weights = {key: 3 if key[1][0] == 40 else 1 for key in times}
    return sum(weights[key] * us / before[key] for key, us in times.items()) / sum(weights.values())


def time_alone(tuning: Tuning, names: list[str], deadline: float) -> tuple[dict[str, Times], list[str]]:
    """Time attention alone; return all times, and the candidates that are faster, the best first."""
    alone = Alone(ALONE, torch.device("cuda"))
    print(heading("us of attention", ALONE, ALL[2:]), flush=True)
    found = {CONFIGURED: alone.measured(CONFIGURED, tuning.attention)}
    for name in names:
        if time.monotonic() > deadline:
            print(f"out of time before {name}")
            break
        try:
            found[name] = alone.measured(name, with_fields(tuning, CANDIDATES[name]).attention)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"{name:36} skipped: {said(error)}", flush=True)
    before = found[CONFIGURED]
    order = sorted(found, key=lambda name: score(found[name], before))
    for name in dict.fromkeys((CONFIGURED, order[0])):
        print(f"{'TB/s, ' + name:36} {alone.speed(found[name])}", flush=True)
    return found, [name for name in order if name != CONFIGURED and score(found[name], before) < 1.0]


def time_layers(tunings: dict[str, Tuning], deadline: float, cases: tuple[Case, ...] = ALL) -> dict[str, Times]:
    """Time whole layers, and compare what they give, bit for bit; one with other bits is left out."""
    device = torch.device("cuda")
    layers = {keys: Layers(LAYERS[keys], keys, 40, device, bound) for keys, bound in BOUNDS.items()}
    found: dict[str, Times] = {}
    outs: dict[tuple[int, Case], Tensor] = {}
    print(heading("us a layer", BOUNDS, cases), flush=True)
    for name, tuning in tunings.items():
        if time.monotonic() > deadline and found:
            print(f"out of time before {name}")
            break
        try:
            times: Times = {}
            same = True
            for key in itertools.product(BOUNDS, cases):
                times[key], out = layers[key[0]].us(tuning, key[1])
                same = same and torch.equal(out, outs.setdefault(key, out.clone()))
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"{name:36} skipped: {said(error)}", flush=True)
            continue
        print(f"{name:36} {shown(times)}{'' if same else '  OTHER BITS'}", flush=True)
        if same:
            found[name] = times
    return found


def chosen(times: Times, before: Times, fields: Fields, group: int) -> Fields:
    """Return a candidate's fields, from as many groups on as it is faster for, whatever the requests and keys.

    Args:
        group: keys of a group.
    """
    ratios: dict[int, list[float]] = {}
    for key, us in times.items():
        ratios.setdefault(key[1][0] * GROUPS * BOUNDS[key[0]] // group, []).append(us / before[key])
    slower = [groups for groups, found in ratios.items() if statistics.mean(found) > 0.998]
    return {**fields, "even_from": max(slower, default=-1) + 1}


def main() -> None:
    """Check bits, time, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="try nothing new after so long")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    start = starting_tuning(arguments.start, torch.device("cuda"))
    # Programs in which a warp asks for keys would take the passes that are compared here.
    tuning = with_fields(start, {"even_programs": 0, "flow_programs": 0})
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(torch.device('cuda')) / 1e12:.3f} TB/s", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 15)) as pool:
        names = checked(tuning, pool)
    alone, faster = time_alone(tuning, names, deadline - 20)
    tried = {CONFIGURED: tuning} | {name: with_fields(tuning, CANDIDATES[name]) for name in faster[:2]}
    layers = time_layers(tried, deadline)
    best = CONFIGURED
    fields: Fields = {}
    if CONFIGURED in layers:
        best = min(layers, key=lambda name: score(layers[name], layers[CONFIGURED]))
        if best != CONFIGURED:
            group = SPLITS_IN_GROUP * tuning.attention.split
            fields = chosen(layers[best], layers[CONFIGURED], CANDIDATES[best], group)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tuning(with_fields(tuning, {"flow_programs": start.attention.flow_programs, **fields}), arguments.out)
    listed = {
        kind: {n: {f"{k}: {r}x{c}": round(us, 2) for (k, (r, c)), us in t.items()} for n, t in found.items()}
        for kind, found in (("alone", alone), ("layers", layers))
    }
    (arguments.out / "even.json").write_text(json.dumps({**listed, "best": best}, indent=1) + "\n", encoding="utf-8")
    print(f"best: {best}, {fields}")
    for name, times in layers.items():
        ratios = [f"{r} at {k:,}: {times[k, (r, 4)] / times[k, (r, 1)]:.3f}" for k in BOUNDS for r in (1, 8, 40)]
        print(f"4 nodes beside 1, {name}: {', '.join(ratios)}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    main()
