"""Search the kernels of a layer of a few rows together: attention and four products, whose programs share processors.

    PYTHONPATH=src python benchmarks/gpu_joint.py --out FOLDER [--format fp8] [--seconds 150] [--start FILE] [--own]

A kernel's programs come in early only where those before leave fast memory and registers, so its best tiles depend on
its neighbours'. Whole layers of Llama-8B's shape are timed in a graph, as `gpu_rows.py` does, for one row, a chain of
four, and eight requests. Settings come first, then a few hand-made combinations, each kernel's tiles in turn, other
stretches of columns (which change bits, so passes of many rows are timed too), lines ahead and registers, and at last
pairs of neighbours at random until the time is up. What is faster at first sight is timed again in turns with the best
so far, and kept if it is faster still, leaves the other passes within 1% of what they took, and has the bits it must.
FOLDER gets `sm_90.json` at every step forward and `rows.json` with every time; a table of before and after comes last.
"""

import argparse
import dataclasses
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

import gpu_rows
from gpu_joint_tried import (
    ORDER,
    SHAPES,
    Move,
    far_moves,
    fine_moves,
    joint_moves,
    key_of,
    one_after_another,
    settings_moves,
    short,
    tile_moves,
)
from gpu_layer import pack_rounded
from gpu_rows import Captured, Layers, compile_all, rows_agree, said
from gpu_rows_tried import NARROW, Case
from gpu_tune import starting_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import Tuning

WEIGHTS: dict[Case, float] = {(1, 1): 0.6, (1, 4): 0.2, (8, 1): 0.2}
GUARDS: tuple[Case, ...] = ((8, 4), (40, 1), (40, 4))  # passes that other stretches touch as well
LIMIT = 1.01  # of what a pass took at first; one row is what is to be faster
FASTER = 0.9985
ONE: Case = (1, 1)
PAIRS = tuple(zip(ORDER, (*ORDER[1:], ORDER[0]), strict=True))
Task = tuple[str, Tuning, tuple[Case, ...]]
_WORKERS: list[Layers] = []


def layers_of(format: str, num_layers: int, context: int, device: torch.device) -> Layers:
    """Return layers with weights of a format."""
    layers = Layers(num_layers, context, 40, device)
    if format == "fp8":
        pack_rounded(layers.target, TritonOps(device))
        torch.cuda.empty_cache()
    return layers


def compile_one(task: Task) -> str:
    """Run two layers once, so that their kernels are in Triton's cache; return what went wrong."""
    format, tuning, cases = task
    try:
        with torch.no_grad():
            if not _WORKERS:
                _WORKERS.append(layers_of(format, 2, 64, torch.device("cuda")))
            for case in cases:
                _WORKERS[0].pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return said(error)
    return ""


class Search:
    """Times tunings beside the best so far, and keeps what is faster."""

    def __init__(self, layers: Layers, format: str, tuning: Tuning, out: Path, pool: Pool, deadline: float) -> None:
        self.layers, self.format, self.pool, self.deadline = layers, format, pool, deadline
        self.first, self.best = tuning, tuning
        self.results: dict[str, object] = {"format": format}
        self.record: list[dict[str, object]] = []
        self.scores: dict[tuple[str, str], tuple[float, Move]] = {}
        self._out = out
        self.first_us: dict[Case, float] = {}
        self.outs: dict[Case, Tensor] = {}
        for case in NARROW:
            self.first_us[case], self.outs[case] = layers.us(tuning, case)
        self.times = dict(self.first_us)
        self.checked = {case: self.outs[case].float() for case in NARROW}
        print(f"  {'as configured':66} {gpu_rows.shown(self.times)}", flush=True)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def screen(self, move: Move) -> float:
        """Return one row's time with a move beside that of the best so far; infinity for what fails or is over."""
        if self.is_over:
            return float("inf")
        try:
            tuning = move.apply(self.best)
            if tuning == self.best:
                return float("inf")
            us, out = self.layers.us(tuning, ONE)
            wrong = self._wrong(tuning, ONE, out)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {move.part} {move.name}: {said(error)}", flush=True)
            return float("inf")
        if wrong:
            print(f"  {move.part} {move.name}: {wrong}", flush=True)
        self.record.append({"part": move.part, "name": move.name, "us": round(us, 2), "wrong": wrong})
        ratio = float("inf") if wrong else us / self.times[ONE]
        self.scores[move.part, move.name] = (ratio, move)
        return ratio

    def consider(self, move: Move) -> None:
        """Time a move in turns with the best so far, all passes of few rows, and keep it if it is faster."""
        if self.is_over or (tuning := move.apply(self.best)) == self.best:
            return
        try:
            list(self.pool.imap_unordered(compile_one, [(self.format, tuning, (case,)) for case in NARROW]))
            again = self.beside(self.best, tuning, NARROW)
            times = {case: after for case, (_, after) in again.items()}
            ratio = score({case: after / before for case, (before, after) in again.items()})
            outs = {case: self.layers.pass_of(tuning, case)() for case in NARROW}
            wrong = [f"{self._wrong(tuning, case, outs[case])} at {case}" for case in NARROW]
            reasons = [text for text in wrong if not text.startswith(" at")]
            reasons += [f"slow at {case}" for case in NARROW if times[case] > LIMIT * self.first_us[case]]
            other = order_of(self.format, tuning) != order_of(self.format, self.best)
            good = ratio < FASTER and not reasons and (not other or self._many_rows_agree(move, tuning))
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {move.part} {move.name}: {said(error)}", flush=True)
            return
        verdict = "kept" if good else ", ".join(["not kept", *reasons])
        print(f"  {move.part + ' ' + move.name:66} {gpu_rows.shown(times)} {ratio:.4f} {verdict}", flush=True)
        if good:
            self.best, self.times, self.outs = tuning, times, outs
            self.write()

    def _wrong(self, tuning: Tuning, case: Case, out: Tensor) -> str:
        """Say what is wrong with a pass: other bits than the best's, or with sums in another order other numbers."""
        if order_of(self.format, tuning) == order_of(self.format, self.best):
            return "" if torch.equal(out, self.outs[case]) else "OTHER BITS"
        error = (out.float() - self.checked[case]).norm() / self.checked[case].norm()
        return "" if error < 0.05 else f"OTHER NUMBERS ({error:.3f})"

    def _many_rows_agree(self, move: Move, tuning: Tuning) -> bool:
        """Tell whether passes of many rows have the rows' bits too, and are no slower with sums in another order."""
        cases = (*GUARDS, *gpu_rows.CHECKED[:5])
        compile_all([(self.format, tuning, (case,)) for case in cases], self.pool, compile_one)
        many = self.beside(self.best, tuning, GUARDS)
        ratios = {case: after / before for case, (before, after) in many.items()}
        print(f"  {move.name}: many rows {', '.join(f'{c} {r:.3f}' for c, r in ratios.items())}", flush=True)
        return statistics.mean(ratios.values()) < 1.003 and rows_agree(self.layers, tuning)

    def beside(
        self, before: Tuning, after: Tuning, cases: tuple[Case, ...], turns: int = 4
    ) -> dict[Case, tuple[float, float]]:
        """Return microseconds a layer of two tunings, timed in turns."""
        found = {}
        for case in cases:
            both: list[Captured] = [self.layers.captured(tuning, case) for tuning in (before, after)]
            times = [[one.us(5) for one in both] for _ in range(turns)]
            medians = [
                statistics.median(column) / len(self.layers.target.layers) for column in zip(*times, strict=True)
            ]
            found[case] = (medians[0], medians[1])
        return found

    def write(self) -> None:
        """Write the best tuning, and what was tried."""
        gpu_rows.write(self._out, self.best, {**self.results, "tried": self.record})


def score(ratios: dict[Case, float]) -> float:
    """Return the weighted mean of times beside others."""
    return sum(WEIGHTS[case] * ratio for case, ratio in ratios.items()) / sum(WEIGHTS[case] for case in ratios)


def order_of(format: str, tuning: Tuning) -> list[object]:
    """Return what fixes the order of sums: the stretches of columns, and the splits and blocks of keys."""
    keys = (tuning.attention.split, tuning.attention.block)
    return [keys, *(tuning.linear[key_of(format, part)].split_k for part in SHAPES)]


def try_all(search: Search, moves: list[Move], promising: float, most: int) -> None:
    """Compile moves for one row and time each, then consider the best few of those that look `promising`."""
    if search.is_over:
        return
    compile_all([(search.format, move.apply(search.best), (ONE,)) for move in moves], search.pool, compile_one)
    ranked = sorted(((search.screen(move), number) for number, move in enumerate(moves)))
    for ratio, number in ranked[:most]:
        if ratio < promising:
            search.consider(moves[number])


def random_pairs(search: Search, seed: int = 0) -> Iterator[Move]:
    """Yield pairs of moves of neighbouring kernels, those at random that were not much slower by themselves."""
    near: dict[str, list[Move]] = {}
    for (part, _), (ratio, move) in search.scores.items():
        if part in ORDER and ratio < 1.02:
            near.setdefault(part, []).append(move)
    chooser, seen = random.Random(seed), set()
    usable = [pair for pair in PAIRS if all(part in near for part in pair)]
    for _ in range(4000 if usable else 0):
        moves = [chooser.choice(near[part]) for part in chooser.choice(usable)]
        name = " + ".join(f"{move.part} {move.name}" for move in moves)
        if name not in seen:
            seen.add(name)
            yield Move("pair", name, one_after_another([move.apply for move in moves]))


def search_all(search: Search, own: bool) -> None:
    """Try everything, in the order in which one thing depends on another; `own`: nothing that other formats share."""
    format = search.format
    stages: list[tuple[str, Callable[[], list[Move]], float, int]] = [
        ("settings and attention", lambda: settings_moves(format, own), 1.003, 16),
        ("combinations by hand", lambda: joint_moves(format, own), FASTER, 4),
    ]
    stages += [
        (f"tiles of {part}", lambda part=part: tile_moves(format, part, splits_of(search, part)), FASTER, 4)
        for part in ("o", "down", "qkv", "gate_up")
    ]
    stages += [
        ("other sums", lambda: [*other_stretches(search), *([] if own else far_moves())], 0.997, 6),
        ("lines and registers", lambda: fine_moves(format, search.best), FASTER, 8),
        ("settings and attention again", lambda: settings_moves(format, own), 1.001, 8),
    ]
    for name, moves_of, promising, most in stages:
        if search.is_over:
            print(f"out of time before {name}")
            break
        started, count = time.monotonic(), len(search.record)
        try_all(search, moves_of(), promising, most)
        tried, seconds = len(search.record) - count, time.monotonic() - started
        print(f"{name}: {tried} tried in {seconds:.0f} s, {gpu_rows.shown(search.times)}", flush=True)
    count = len(search.record)
    for move in random_pairs(search):
        if search.is_over:
            break
        if search.screen(move) < FASTER:
            search.consider(move)
    print(f"pairs: {len(search.record) - count} tried, {gpu_rows.shown(search.times)}", flush=True)


def splits_of(search: Search, part: str) -> int:
    """Return the stretches that a product's columns are cut in."""
    return search.best.linear[key_of(search.format, part)].split_k


def other_stretches(search: Search) -> list[Move]:
    """Return tiles of products whose columns are cut in other stretches."""
    found = []
    for part in ("o", "down", "qkv"):
        known = {move.name for move in tile_moves(search.format, part, splits_of(search, part))}
        found += [move for move in tile_moves(search.format, part) if move.name not in known]
    return found


def timeline(layers: Layers, tuning: Tuning, case: Case) -> list[str]:
    """Return a line for each kernel of a layer: what it adds to the time, and when it starts by the end before."""
    captured = layers.captured(tuning, case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        captured.graph.replay()
        torch.cuda.synchronize()
    events = [(e.time_range.end, e.time_range.start, e.name) for e in found.events() if "kernel" in e.name]
    events.sort()
    marks = [i for i, event in enumerate(events) if "splits" in event[2]]
    lines = []
    for place in range(1, marks[-1] - marks[-2] + 1):
        taken = [events[m + place][0] - events[m + place - 1][0] for m in marks[1:-1]]
        starts = [events[m + place][1] - events[m + place - 1][0] for m in marks[1:-1]]
        name = events[marks[1] + place][2]
        lines.append(f"{statistics.median(taken):6.2f} us, starts {statistics.median(starts):+6.2f}  {name[:32]}")
    return lines


def finish(search: Search) -> None:
    """Compare first and best in turns, check bits everywhere, show where the time goes, and write it all."""
    first, best = search.first, search.best
    cases = (*NARROW, *GUARDS)
    compile_all([(search.format, best, (case,)) for case in (*GUARDS, *gpu_rows.CHECKED)], search.pool, compile_one)
    guarded("bits", lambda: search.results.update(rows_agree=rows_agree(search.layers, best, everywhere=True)))
    for name, tuning in (("before", first), ("after", best)):

        def show(name: str = name, tuning: Tuning = tuning) -> None:
            search.results[f"timeline {name}"] = lines = timeline(search.layers, tuning, (1, 1))
            print("\n".join([f"timeline {name}, from attention's end", *lines]), flush=True)

        guarded("timeline", show)
    print("changed:")
    for line in changes(first, best):
        print(f"  {line}")
    found = search.beside(first, best, cases, turns=6)
    search.results["before and after"] = {f"{r}x{n}": (round(a, 2), round(b, 2)) for (r, n), (a, b) in found.items()}
    print(f"microseconds a layer, {search.format}: before, after, after / before")
    for (requests, nodes), (before, after) in found.items():
        print(f"  {requests:2}x{nodes}  {before:7.2f}  {after:7.2f}  {after / before:.4f}")
    print(
        f"  four rows beside one: {found[1, 4][0] / found[1, 1][0]:.3f} before, {found[1, 4][1] / found[1, 1][1]:.3f}"
    )
    search.write()


def changes(before: Tuning, after: Tuning) -> list[str]:
    """Return what differs between two tunings."""
    found = []
    for field in dataclasses.fields(Tuning):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if isinstance(new, dict):
            for name in new:
                if new[name] != old.get(name):
                    found.append(f"{name}: {short(old[name]) if name in old else 'nothing'} -> {short(new[name])}")
        elif field.name == "attention":
            changed = {k: v for k, v in dataclasses.asdict(new).items() if v != getattr(old, k)}
            found.append(f"attention: {changed}")
        else:
            found.append(f"{field.name}: {old} -> {new}")
    return found


def guarded(what: str, work: Callable[[], None]) -> None:
    """Do something whose failure must not cost what was found."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - as it says
        print(f"  no {what}: {said(error)}", flush=True)


def main() -> None:
    """Search, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=("dense", "fp8"), default="dense")
    parser.add_argument("--seconds", type=float, default=150.0, help="try nothing new after so long")
    parser.add_argument("--own", action="store_true", help="change nothing that the other format shares")
    parser.add_argument("--context", type=int, default=1152)
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = torch.device("cuda")
    tuning = starting_tuning(arguments.start, device)
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        cases = (*NARROW, *GUARDS)
        compile_all([(arguments.format, tuning, (case,)) for case in cases], pool, compile_one)
        print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
        layers = layers_of(arguments.format, gpu_rows.NUM_LAYERS, arguments.context, device)
        search = Search(layers, arguments.format, tuning, arguments.out, pool, started + arguments.seconds)
        search_all(search, arguments.own)
        search.write()
        finish(search)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
