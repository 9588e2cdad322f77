"""Time whole decoder layers with attention's splits cut in other ways on this GPU, and choose among them.

    PYTHONPATH=src python benchmarks/gpu_far.py --out FOLDER [--seconds 70] [--start FILE]

First the bits: one query against four, alone and among 40 requests, decoded and as the end of a prompt, with contexts
around the border where longer splits begin. Then a graph holds layers of Llama-8B's shape with cold weights and caches,
at 1,152 keys (a bound of 4,096) and at 10,240 (16,384). Three groups are tried one after another: how programs hold the
keys, which must change no bits, how keys are cut, which does, and with the best cut how programs share them. A
candidate is kept if all passes together are faster and none is much slower. FOLDER gets `sm_90.json`, to be put into
kernels/triton/configs, and `far.json` with every time. A candidate that fails is skipped, and said.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

from gpu_rows import Layers, said
from gpu_rows_tried import ALL, Case
from gpu_tune import starting_tuning, write_tuning
from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention import AttentionLaunch, attention
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.tuning import AttentionConfig, Tuning

PAGE = 16
NEAR, FAR = (1152, 4096), (10240, 16384)  # keys of each request, and the bound on them a graph is captured for
LAYERS = {NEAR: 4, FAR: 2}
SLOWER = 1.015  # what a single pass may lose for the sake of all
Fields = dict[str, int | bool]
Measured = dict[tuple[int, int, int], float]
"""Microseconds a layer by keys, requests and nodes."""
CUTS: dict[str, Fields] = {
    "64, 128 from 2k": {"split_far": 128, "far_from": 2048},
    "64, 256 from 1k": {"split_far": 256, "far_from": 1024},
    "64, 256 from 2k": {"split_far": 256, "far_from": 2048},
    "64, 256 from 2k, stored one by one": {"split_far": 256, "far_from": 2048, "far_groups": 1 << 30},
    "64, 512 from 2k": {"split_far": 512, "far_from": 2048},
    "64, 256 from 4k": {"split_far": 256, "far_from": 4096},
    "128 everywhere": {"split": 128},
    "128, 256 from 2k": {"split": 128, "split_far": 256, "far_from": 2048},
    "64, 256 from 2k, blocks of 32": {
        "split_far": 256, "far_from": 2048, "block": 32, "num_stages": 3, "group_stages": 4, "halves": True,
    },
}  # fmt: skip
SETTINGS: dict[str, Fields] = {
    "pages through the nearest cache": {"cached": True},
    "halves": {"halves": True},
    "halves, three stages of groups": {"halves": True, "group_stages": 3},
    "long: halves, three stages": {"halves": True, "long_from": 4096, "long_stages": 3},
    "long: three stages, any registers": {"long_from": 4096, "long_stages": 3, "long_registers": 255},
    "long: halves, two stages, 128 registers": {
        "halves": True, "long_from": 4096, "long_stages": 2, "long_registers": 128,
    },
    "long: 1,600 programs": {"long_from": 4096, "long_programs": 1600},
    "long: 3,168 programs": {"long_from": 4096, "long_programs": 3168},
}  # fmt: skip
SHARING: dict[str, Fields] = {
    "far splits stored one by one": {"far_groups": 1 << 30},
    "far splits stored by groups": {"far_groups": 1},
    "long: 640 programs": {"long_from": 4096, "long_programs": 640},
    "long: 1,056 programs": {"long_from": 4096, "long_programs": 1056},
    "long: 2,112 programs": {"long_from": 4096, "long_programs": 2112},
    "long: 6,400 programs": {"long_from": 4096, "long_programs": 6400},
}
CHECKED: tuple[Fields, ...] = (
    CUTS["64, 256 from 2k"],
    {**CUTS["64, 256 from 2k"], "cached": True, "halves": True, "long_from": 4096, "long_stages": 3},
    {**CUTS["64, 512 from 2k"], "cached": True, "halves": True, "group_stages": 3, "compact": False},
    CUTS["64, 256 from 2k, blocks of 32"],
)
CONTEXTS = (1500, 2046, 2048, 2049, 2052, 3100, 5000)


def with_fields(tuning: Tuning, fields: Fields) -> Tuning:
    """Return a tuning with other fields of attention."""
    return dataclasses.replace(tuning, attention=dataclasses.replace(tuning.attention, **fields))


class Requests:
    """Requests of one layer, each with a context of its own, and queries for the end of each."""

    def __init__(self, count: int, most_queries: int, device: torch.device) -> None:
        self._pages, self._device = FAR[1] // PAGE, device
        self.contexts = [CONTEXTS[i % len(CONTEXTS)] for i in range(count)]
        own = [-(-context // PAGE) for context in self.contexts]
        self._table = torch.zeros(count, self._pages, dtype=torch.int32, device=device)
        order = torch.randperm(sum(own), device=device).int()
        for row, pages in enumerate(order.split(own)):
            self._table[row, : len(pages)] = pages
        size = (sum(own) * PAGE, 8, 128)
        self.layer = KvLayer(*(torch.randn(size, device=device).bfloat16() for _ in "kv"))
        self._q = torch.randn(count, most_queries, 32, 128, device=device).bfloat16()

    def attended(self, config: AttentionConfig, rows: list[int], queries: int, skipped: int = 0) -> Tensor:
        """Return what the last queries of some requests attend to, but for the `skipped` very last: [rows, queries]."""
        most = self._q.shape[1]
        q = self._q[rows, most - skipped - queries : most - skipped].flatten(0, 1)
        ends = torch.tensor([self.contexts[row] - skipped for row in rows], device=self._device)
        own = (ends[:, None] + torch.arange(-queries, 0, device=self._device)).flatten()
        batch = AttentionBatch(
            query_starts_R1=torch.arange(0, len(own) + 1, queries, dtype=torch.int32, device=self._device),
            kv_lens_R=ends.int(),
            page_table_RP=self._table[rows],
            kv_index_T=own,
            ancestors_T=torch.full_like(own, -1),
            page_size=PAGE,
            max_queries=queries,
            max_keys=self._pages * PAGE,
        )
        counters = torch.zeros(1 << 16, dtype=torch.int32, device=self._device)
        launch = AttentionLaunch(config, counters, dependent=True)
        return attention(q, self.layer, batch, 128**-0.5, None, launch).view(len(rows), queries, -1)


def wrong_bits(requests: Requests, config: AttentionConfig) -> list[str]:
    """Return where a query's bits depend on what shares its pass."""
    count, found = len(requests.contexts), []
    together = requests.attended(config, list(range(count)), 4)
    for queries in (8, 72):  # in wide tiles, and by one program as prompts are
        if not torch.equal(requests.attended(config, list(range(count)), queries)[:, -4:], together):
            found.append(f"the last 4 of {queries}")
    for rows in ([0], [1], [3], [5], list(range(8)), list(range(count))):
        for queries, skipped in ((4, 0), (1, 0), (1, 3), (3, 1)):
            expected = together[rows, 4 - skipped - queries : 4 - skipped]
            if not torch.equal(requests.attended(config, rows, queries, skipped), expected):
                found.append(f"{len(rows)} x {queries} from {rows[0]}")
    return found


def check(task: tuple[Tuning, Fields]) -> tuple[str, str]:
    """Return the name of a way to attend, and whether its bits are a request's own and, up to the border, today's."""
    tuning, fields = task
    name = ", ".join(f"{name} {value}" for name, value in fields.items()) or "as configured"
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            requests = Requests(40, 72, torch.device("cuda"))
            config, rows = dataclasses.replace(tuning.attention, **fields), list(range(40))
            today, got = requests.attended(tuning.attention, rows, 4), requests.attended(config, rows, 4)
            short = [row for row in rows if requests.contexts[row] <= config.far_from]
            same = config.block != tuning.attention.block or torch.equal(got[short], today[short])
            most = float((got.float() - today.float()).abs().max())
            wrong = wrong_bits(requests, config)
    except Exception as error:  # noqa: BLE001 - what else there is to find out is worth more
        return name, f"FAILED: {said(error)}"
    text = f"OTHER BITS {'; '.join(wrong)}" if wrong else "the same bits"
    return name, f"{text}; up to the border {'as today' if same else 'OTHER THAN TODAY'}; at most {most:.4f} apart"


_WORKERS: dict[int, Layers] = {}
Task = tuple[Tuning, tuple[tuple[Case, int], ...]]
"""A tuning, and passes that share their kernels, with the bound on keys of each."""


def compile_one(task: Task) -> str:
    """Run layers once, so that their kernels are in Triton's cache; return what went wrong."""
    tuning, passes = task
    try:
        with torch.no_grad():
            for case, bound in passes:
                if bound not in _WORKERS:
                    _WORKERS[bound] = Layers(1, 64, 40, torch.device("cuda"), bound)
                _WORKERS[bound].pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return said(error)
    return ""


def compile_all(tunings: list[Tuning], pool: Pool, *, products: bool = False) -> None:
    """Compile what will be timed, in the pool's processes.

    Args:
        products: no pass has been compiled yet, so that even those that share attention's kernels are apart.
    """
    started = time.monotonic()
    bounds = [bound for _, bound in (NEAR, FAR)]
    few = [((case, bound),) for case in ALL[:2] for bound in bounds]
    many = [tuple((case, bound) for case in (ALL[2 + i], ALL[4 + i]) for bound in bounds) for i in range(2)]
    if products:
        many = [tuple((case, bound) for bound in bounds) for case in ALL[2:]]
    tasks: list[Task] = [(tuning, passes) for tuning in tunings for passes in (*many, *few)]
    failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    for error in sorted(set(failed)):
        print(f"  does not run: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)


class Judge:
    """Times tunings, and keeps the best."""

    def __init__(self, tuning: Tuning, deadline: float, device: torch.device) -> None:
        self.layers = {where: Layers(LAYERS[where], where[0], 40, device, where[1]) for where in (NEAR, FAR)}
        self.start, self.best, self.deadline = tuning, tuning, deadline
        self.record: dict[str, dict[str, float]] = {}
        self.times, self.outs = self.measured("as configured", tuning)
        self.first = dict(self.times)

    def measured(self, name: str, tuning: Tuning) -> tuple[Measured, dict[tuple[int, int, int], Tensor]]:
        """Time all passes; print and record what they take."""
        times: Measured = {}
        outs = {}
        for (context, bound), (requests, nodes) in ((where, case) for where in (NEAR, FAR) for case in ALL):
            key = (context, requests, nodes)
            times[key], outs[key] = self.layers[context, bound].us(tuning, (requests, nodes))
        self.record[name] = {f"{k}: {r}x{n}": round(us, 2) for (k, r, n), us in times.items()}
        print(f"{name:40} {shown(times)}", flush=True)
        return times, outs

    def try_all(self, candidates: dict[str, Fields], *, same_bits: bool) -> list[str]:
        """Try candidates on top of the best, one after another, and keep those that are better; return their names.

        Without `same_bits` they replace one another instead: the best of them is kept, if any is.
        """
        start, kept = self.best, []
        for name, fields in candidates.items():
            if time.monotonic() > self.deadline:
                print(f"out of time before {name}")
                break
            tuning = with_fields(self.best if same_bits else start, fields)
            try:
                times, outs = self.measured(name, tuning)
            except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
                print(f"{name:40} skipped: {said(error)}", flush=True)
                continue
            if same_bits and not all(torch.equal(out, self.outs[key]) for key, out in outs.items()):
                print(f"{'':40} OTHER BITS, not taken", flush=True)
                continue
            ratios = [us / self.times[key] for key, us in times.items()]
            worst = max(us / self.first[key] for key, us in times.items())
            if statistics.mean(ratios) < 0.998 and worst < SLOWER:
                self.best, self.times, self.outs = tuning, times, outs
                kept = [*kept, name] if same_bits else [name]
        return kept


def shown(times: Measured) -> str:
    """Return times in a line: those at few keys, then those at many."""
    parts = []
    for context, _ in (NEAR, FAR):
        parts.append(" ".join(f"{us:6.1f}" for (keys, _, _), us in times.items() if keys == context))
    return " | ".join(parts)


def heading() -> str:
    """Return what the columns are."""
    cases = " ".join(f"{f'{r}x{n}':>6}" for r, n in ALL)
    return f"{'us a layer at 1,152 | 10,240 keys':40} {cases} | {cases}"


def main() -> None:
    """Check bits, tune, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=70.0, help="try nothing new after so long")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    deadline, device = time.monotonic() + arguments.seconds, torch.device("cuda")
    tuning = starting_tuning(arguments.start, device)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    results: dict[str, object] = {}
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        checks = pool.imap_unordered(check, [(tuning, fields) for fields in ({}, *CHECKED)])
        compile_all([tuning], pool, products=True)
        bits = dict(checks)
        for name, text in bits.items():
            print(f"  {text}: {name}", flush=True)
        judge = Judge(tuning, deadline, device)
        results |= {"bits": bits, "us": judge.record}
        kept = []
        for candidates, same_bits in ((SETTINGS, True), (CUTS, False), (SHARING, True)):
            compile_all([with_fields(judge.best, fields) for fields in candidates.values()], pool)
            print(heading(), flush=True)
            kept += judge.try_all(candidates, same_bits=same_bits)
            write(arguments.out, judge.best, results)
    results["kept"] = kept
    results["rows agree"] = summary(judge, kept)
    write(arguments.out, judge.best, results)


def write(folder: Path, tuning: Tuning, results: dict[str, object]) -> None:
    """Write the configuration, and what was measured."""
    write_tuning(tuning, folder)
    (folder / "far.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def summary(judge: Judge, kept: list[str]) -> bool:
    """Print what to put into the configuration and what it gives; return whether rows have the same bits in all passes.

    Before and after are timed again, one right after the other.
    """
    after, outs = judge.measured("as kept, again", judge.best)
    before, _ = judge.measured("as configured, again", judge.start)
    wrong = []
    for (context, requests, nodes), out in outs.items():
        among = outs[context, 40, 4].view(40, 4, -1)[:requests, :nodes]
        if not torch.equal(out.view(requests, nodes, -1), among):
            wrong.append(f"{requests}x{nodes} at {context}")
    print(f"rows alone and among 160: {'OTHER BITS at ' + ', '.join(wrong) if wrong else 'the same bits'}")
    print(f"kept: {', '.join(kept) or 'nothing'}\n{judge.best.attention}")
    print(f"{heading()}\n{'before':40} {shown(before)}\n{'after':40} {shown(after)}")
    for name, times in (("before", before), ("after", after)):
        ratios = ", ".join(
            f"{requests} requests at {context}: {times[context, requests, 4] / times[context, requests, 1]:.3f}"
            for context, _ in (NEAR, FAR)
            for requests in (1, 8, 40)
        )
        print(f"{name}: 4 nodes beside 1: {ratios}")
    return not wrong


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    main()
