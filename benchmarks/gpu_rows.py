"""Time whole decoder layers of passes with up to 160 rows on this GPU, and choose by that what carries them.

    PYTHONPATH=src python benchmarks/gpu_rows.py --out FOLDER [--seconds 80] [--only attention,many,...] [--start FILE]

A graph holds layers of Llama-8B's shape with cold weights and caches, as a step runs them: requests x nodes, a bound
of 4,096 keys. Groups of candidates are tried one after another: how attention's programs share the keys, tiles of
products for 160 rows and for 32 and 40, and the stretches their columns are cut in (which also change passes of one
row). A candidate is kept if it makes the passes it touches faster and changes no bit, or, with other stretches, if all
passes together are faster. Each group is compiled first, in as many processes as there are cores. FOLDER gets
`sm_90.json`, to be put into kernels/triton/configs, and `rows.json` with every time. A candidate that fails is skipped,
and said.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

from gpu_models import LLAMA_8B, filled_cache, random_target
from gpu_rows_tried import (
    ALL,
    NARROW,
    SPLITS,
    Candidate,
    Case,
    candidates_of,
    later_only,
    with_linear,
)
from gpu_tune import replayed_us, starting_tuning, write_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import LinearConfig, Tuning
from slipstream.models.context import PagedContext, QueryTokens, paged_context

PAGE, BOUND = 16, 4096
NUM_LAYERS, REPLAYS = 6, 9
CHECKED: tuple[Case, ...] = ((2, 2), (5, 4), (17, 1), (33, 1), (36, 4), (24, 4), (40, 3), (40, 2))  # beside those timed


class Layers:
    """Llama-8B's layers on the device, run over requests that have a context each."""

    def __init__(
        self, num_layers: int, context: int, most_requests: int, device: torch.device, bound: int = BOUND
    ) -> None:
        spec = dataclasses.replace(LLAMA_8B, num_layers=num_layers, vocab_size=64)
        self.target = random_target(spec, torch.bfloat16, device)
        self._context, self._device, self._pool, self._bound = context, device, None, bound
        self._pages = -(-context // PAGE)
        kv_pages = most_requests * self._pages
        self._kv = filled_cache(self.target.kv_shape, kv_pages, PAGE, torch.bfloat16, device)
        self._order = torch.randperm(kv_pages, generator=torch.Generator().manual_seed(1)).int()
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(most_requests, 4, spec.hidden_size, generator=generator).bfloat16().to(device)

    def pass_of(self, tuning: Tuning, case: Case) -> Callable[[], Tensor]:
        """Return a pass; a request's nodes are the same in every batch, and its first are with fewer."""
        requests, nodes = case
        ops = TritonOps(self._device, tuning)
        ctx, layers = self.laid_out(ops, requests, nodes), list(self.target.layers)
        hidden = self._hidden[:requests, :nodes].flatten(0, 1).contiguous()
        return lambda: ops.run_layers(layers, hidden, ctx, ())[0]

    def us(self, tuning: Tuning, case: Case) -> tuple[float, Tensor]:
        """Return microseconds a layer in a CUDA graph, the median of replays, and what a pass gives."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        us, out = replayed_us(self.pass_of(tuning, case), REPLAYS, self._pool)
        return us / len(self.target.layers), out

    def laid_out(self, ops: TritonOps, requests: int, nodes: int) -> PagedContext:
        """Return the context of a pass over the last nodes of so many requests."""
        first = self._context - 4
        index = torch.arange(first, first + nodes, device=self._device).repeat(requests)
        bound = max(self._bound, -(-self._context // BOUND) * BOUND)
        table = torch.zeros(requests, bound // PAGE, dtype=torch.int32, device=self._device)
        own = self._order[: requests * self._pages].view(requests, self._pages)
        table[:, : self._pages] = own.to(self._device)
        queries = QueryTokens([nodes] * requests, index, index, torch.full_like(index, -1))
        return paged_context(ops, self._kv, table, queries)


class Judge:
    """Times tunings, and keeps the best."""

    def __init__(self, layers: Layers, tuning: Tuning, deadline: float) -> None:
        self.layers, self.best, self.deadline = layers, tuning, deadline
        self.record: list[dict[str, object]] = []
        self.times: dict[Case, float] = {}
        self.outs: dict[Case, Tensor] = {}
        for case in ALL:
            self.times[case], self.outs[case] = layers.us(tuning, case)
        self.first = dict(self.times)
        print(f"  {'as configured':52} {shown(self.times)}", flush=True)

    def measured(
        self, name: str, tuning: Tuning, cases: tuple[Case, ...]
    ) -> tuple[dict[Case, float], dict[Case, Tensor]]:
        """Time passes; print and record what they take."""
        found = {case: self.layers.us(tuning, case) for case in cases}
        times = {case: us for case, (us, _) in found.items()}
        outs = {case: out for case, (_, out) in found.items()}
        wrong = [case for case, out in outs.items() if not torch.equal(out, self.outs[case])]
        say = f" other bits at {wrong}" if wrong else ""
        print(f"  {name:52} {shown(times)}{say}", flush=True)
        listed = {f"{r}x{n}": round(us, 2) for (r, n), us in times.items()}
        self.record.append({"name": name, "us": listed, "other_bits": bool(wrong)})
        return times, outs

    def score(self, times: dict[Case, float]) -> float:
        """Return the mean of times beside the best's."""
        return statistics.mean(us / self.times[case] for case, us in times.items())

    def consider(self, candidate: Candidate) -> None:
        """Keep a candidate if it is faster by more than the noise, and its bits are right."""
        if time.monotonic() > self.deadline:
            return
        try:
            tuning = candidate.apply(self.best)
            times, outs = self.measured(candidate.name, tuning, candidate.cases)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {candidate.name}: {said(error)}", flush=True)
            return
        same = all(torch.equal(out, self.outs[case]) for case, out in outs.items())
        if (same or not candidate.same) and self.score(times) < 0.997:
            self.best = tuning
            self.times.update(times)
            self.outs.update(outs)

    def consider_stretches(self, shape: str, config: LinearConfig) -> None:
        """Try a product with other stretches: the best tiles for them, and then all passes together."""
        if time.monotonic() > self.deadline:
            return
        label = f"{shape} in {config.split_k} stretches, {config.block_n}x{config.block_k}s{config.num_stages}"
        changed = with_linear(shape, config)(self.best)
        try:
            for few in (False, True):
                ranked = []
                for candidate in later_only(shape, few=few):
                    tuning = candidate.apply(changed)
                    times, _ = self.measured(f"{label}: {candidate.name}", tuning, candidate.cases[:1])
                    ranked.append((self.score(times), tuning))
                changed = min(ranked, key=lambda pair: pair[0])[1]
            times, outs = self.measured(f"{label}: all passes", changed, ALL)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {label}: {said(error)}", flush=True)
            return
        if self.score(times) < 0.997 and rows_agree(self.layers, changed):
            self.best, self.times, self.outs = changed, times, outs


def shown(times: dict[Case, float]) -> str:
    """Return times in a line."""
    return "  ".join(f"{r}x{n} {us:6.1f}" for (r, n), us in times.items()) + " us"


def said(error: Exception) -> str:
    """Return an error's last line."""
    return str(error).splitlines()[-1][:160] if str(error) else type(error).__name__


def rows_agree(layers: Layers, tuning: Tuning, *, everywhere: bool = False) -> bool:
    """Tell whether rows have the same bits in passes of 1 to 160 rows, and say where they do not.

    Args:
        everywhere: also in passes whose kernels no candidate has compiled yet.
    """
    whole = layers.pass_of(tuning, (40, 4))().view(40, 4, -1)
    wrong = []
    for requests, nodes in (*ALL[:-1], *CHECKED[: None if everywhere else 5]):
        rows = layers.pass_of(tuning, (requests, nodes))().view(requests, nodes, -1)
        if not torch.equal(rows, whole[:requests, :nodes]):
            wrong.append(f"{requests}x{nodes}")
    print(
        f"  rows alone and among 160: {'OTHER BITS at ' + ', '.join(wrong) if wrong else 'the same bits'}", flush=True
    )
    return not wrong


_WORKERS: list[Layers] = []


def compile_one(task: tuple[Tuning, tuple[Case, ...]]) -> str:
    """Run a layer once, so that its kernels are in Triton's cache; return what went wrong."""
    tuning, cases = task
    try:
        with torch.no_grad():
            if not _WORKERS:
                _WORKERS.append(Layers(1, 64, 40, torch.device("cuda")))
            for case in cases:
                _WORKERS[0].pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return said(error)
    return ""


def compile_all(tasks: list[tuple[Tuning, tuple[Case, ...]]], pool: Pool) -> None:
    """Compile what will be run, in the pool's processes."""
    started = time.monotonic()
    failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    for error in sorted(set(failed)):
        print(f"does not run: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)


def tasks_of(tuning: Tuning, group: str) -> list[tuple[Tuning, tuple[Case, ...]]]:
    """Return what is compiled before a group of candidates is timed."""
    tasks: list[tuple[Tuning, tuple[Case, ...]]] = []
    tasks += [(one.apply(tuning), (case,)) for one in candidates_of(group) for case in one.cases]
    for shape, configs in SPLITS.items() if group == "splits" else ():
        for config in configs:
            changed = with_linear(shape, config)(tuning)
            both = [one for few in (False, True) for one in later_only(shape, few=few)]
            tasks += [(changed, NARROW), *((one.apply(changed), one.cases) for one in both)]
    return tasks


def compare_long(tunings: dict[str, Tuning], device: torch.device) -> dict[str, dict[str, float]]:
    """Time tunings at 10,240 keys."""
    layers, found = Layers(2, 10240, 40, device), {}
    for name, tuning in tunings.items():
        times = {case: layers.us(tuning, case)[0] for case in ((1, 1), (8, 4), (40, 1), (40, 4))}
        found[name] = {f"{r}x{n}": round(us, 1) for (r, n), us in times.items()}
        print(f"  10,240 keys, {name:39} {shown(times)}", flush=True)
    return found


def main() -> None:
    """Tune what is asked for, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=80.0, help="try nothing new after so long")
    parser.add_argument("--only", default="near,attention,many,few,ahead,splits")
    parser.add_argument("--context", type=int, default=1152)
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device, groups = torch.device("cuda"), arguments.only.split(",")
    tuning = starting_tuning(arguments.start, device)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        compile_all([(tuning, (case,)) for case in ALL], pool)
        judge = Judge(Layers(NUM_LAYERS, arguments.context, 40, device), tuning, deadline)
        results: dict[str, object] = {"context": arguments.context, "tried": judge.record}
        tune(judge, groups, results, arguments.out, pool)
        compile_all([(judge.best, (case,)) for case in CHECKED], pool)
    results["rows_agree"] = rows_agree(judge.layers, judge.best, everywhere=True)
    del judge.layers
    torch.cuda.empty_cache()
    try:
        results["long"] = compare_long({"before": tuning, "after": judge.best}, device)
    except Exception as error:  # noqa: BLE001 - what was found is worth more than the rest
        print(f"  no long contexts: {said(error)}")
    write(arguments.out, judge.best, results)
    summary(tuning, judge.best, results)


def tune(judge: Judge, groups: list[str], results: dict[str, object], folder: Path, pool: Pool) -> None:
    """Try the groups of candidates one after another; what is found is written after each."""
    results["first"] = {f"{r}x{n}": round(us, 2) for (r, n), us in judge.first.items()}
    for group in groups:
        if time.monotonic() > judge.deadline:
            print(f"out of time before {group}")
            break
        compile_all(tasks_of(judge.best, group), pool)
        if group == "splits":
            for shape, config in ((shape, config) for shape, configs in SPLITS.items() for config in configs):
                judge.consider_stretches(shape, config)
        for candidate in candidates_of(group):
            judge.consider(candidate)
        times = {case: judge.layers.us(judge.best, case)[0] for case in ALL}
        print(f"after {group:46} {shown(times)}", flush=True)
        results[f"after {group}"] = {f"{r}x{n}": round(us, 2) for (r, n), us in times.items()}
        write(folder, judge.best, results)


def write(folder: Path, tuning: Tuning, results: dict[str, object]) -> None:
    """Write the configuration, and what was measured."""
    write_tuning(tuning, folder)
    (folder / "rows.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def summary(before: Tuning, after: Tuning, results: dict[str, object]) -> None:
    """Print what to put into the configuration, and what it gives."""
    print("changed:")
    if before.attention != after.attention:
        print(f"  attention {after.attention}")
    for section in ("linear", "wide_linear"):
        old, new = getattr(before, section), getattr(after, section)
        for name in new:
            if new[name] != old.get(name):
                print(f"  {section} {name} {new[name]}")
    for name, value in results.items():
        if name == "first" or name.startswith("after"):
            print(f"{name:20} {value}")
    print(f"rows agree: {results['rows_agree']}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
