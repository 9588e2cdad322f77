"""Where FP8 codes are made in a layer of a few rows, and with which tiles, on this GPU.

    PYTHONPATH=src python benchmarks/gpu_fp8.py --out out/configs [--seconds 60] [--start FILE]

Times Llama-8B's layers with FP8 weights in a graph (`gpu_layer`): norms and codes by their own kernels, codes made in
products, and norms there too. Up to as many rows as each is faster, it is chosen; then each product's tiles are changed
in turn. Bits are compared with those of the kernels for more rows. What fails is said and skipped; the table of times
before and after comes last.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.pool import Pool
from pathlib import Path

import torch

from gpu_layer import CASES, FP8_TILES, NUM_LAYERS, Layers, profile, with_lines, with_tiles
from gpu_tune import starting_tuning, write_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.narrow_products import MOST_ROWS, MOST_WHOLE_ROWS
from slipstream.kernels.triton.tuning import Tuning

CASE = CASES["fp8"]
ROWS = (1, 2, 4, 8, 16)
JUDGED = (1, 8)  # rows whose times choose the tiles
CHECKED = (1, 3, 4, 8, 9, 16)
MORE = MOST_ROWS + 1  # rows that go through the kernels for many
Task = tuple[Tuning, tuple[int, ...]]
_WORKERS: list[Layers] = []


def folds(tuning: Tuning) -> dict[str, Tuning]:
    """Return where codes can be made: each adds one thing to the one before."""
    kernels = dataclasses.replace(tuning, weights_first=True, fold_rows=MOST_ROWS, fold_codes=0, fold_norm_codes=0)
    codes = dataclasses.replace(kernels, fold_codes=MOST_ROWS)
    return {
        "norms and codes by kernels": kernels,
        "codes in products": codes,
        "codes and norms in products": dataclasses.replace(codes, fold_norm_codes=MOST_WHOLE_ROWS),
    }


def said(error: Exception) -> str:
    """Return the last line of what went wrong."""
    return str(error).splitlines()[-1][:160] if str(error) else type(error).__name__


def compile_one(task: Task) -> str:
    """Run two layers once, so that their kernels are in Triton's cache; return what went wrong."""
    tuning, batches = task
    try:
        with torch.no_grad():
            if not _WORKERS:
                _WORKERS.append(Layers(dataclasses.replace(CASE, head=[]), 2, torch.device("cuda"), MORE))
            for batch in batches:
                _WORKERS[0].pass_of(tuning, batch)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the variant
        return said(error)
    return ""


def compile_all(pool: Pool, tasks: list[Task]) -> None:
    """Compile what will be timed."""
    started = time.monotonic()
    failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    for error in failed:
        print(f"does not run: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)


def timed(layers: Layers, name: str, tuning: Tuning, rows: tuple[int, ...]) -> list[float]:
    """Print and return microseconds a layer, infinity for what fails."""
    times = []
    for count in rows:
        try:
            times.append(layers.us_per_layer(tuning, count))
        except Exception as error:  # noqa: BLE001 - one failing variant must not end the run
            print(f"  skipped {name}, {count} rows: {said(error)}")
            times.append(float("inf"))
    text = "  ".join(f"B={count} {us:6.2f} us" for count, us in zip(rows, times, strict=True))
    print(f"  {name:32} {text}", flush=True)
    return times


def choose_folds(layers: Layers, tuning: Tuning) -> Tuning:
    """Return a tuning in which products do what is folded into them up to as many rows as that is faster."""
    times = [timed(layers, name, way, ROWS) for name, way in folds(tuning).items()]
    chosen = []
    for before, after in itertools.pairwise(times):
        faster = itertools.takewhile(lambda row: row[2] < row[1], zip(ROWS, before, after, strict=True))
        chosen.append(max((count for count, _, _ in faster), default=0))
    codes, norms = chosen[0], min(chosen[1], MOST_WHOLE_ROWS)
    print(f"  chosen: fold_codes {codes}, fold_norm_codes {norms}", flush=True)
    return dataclasses.replace(tuning, weights_first=True, fold_codes=codes, fold_norm_codes=norms)


def tiles_of(tuning: Tuning) -> list[tuple[str, Tuning]]:
    """Return each product's tiles to try, in the order they are tried; none asks for lines ahead, which never paid."""
    found = []
    for shape, tiles in FP8_TILES.items():
        found += [
            (f"{shape} {tile}", with_lines(with_tiles(tuning, "fp8", shape, tile), "fp8", shape, 0)) for tile in tiles
        ]
    return found


def choose_tiles(layers: Layers, tuning: Tuning, deadline: float) -> Tuning:
    """Change one product's tiles after the other, twice, and keep what makes the layer faster by more than noise."""
    best, score = tuning, sum(timed(layers, "as configured", tuning, JUDGED))
    names = [name for name, _ in tiles_of(tuning)]
    for place in itertools.chain(range(len(names)), range(len(names))):
        if time.monotonic() > deadline:
            print("  (time is up: tiles are left out)")
            break
        candidate = tiles_of(best)[place][1]
        found = sum(timed(layers, names[place], candidate, JUDGED))
        if found < score * 0.998:
            best, score = candidate, found
    return best


def unfolded(tuning: Tuning) -> Tuning:
    """Return a tuning in which nothing is folded into products."""
    return dataclasses.replace(tuning, weights_first=False, fold_rows=0, fold_codes=0, fold_norm_codes=0)


def check_bits(tuning: Tuning, device: torch.device) -> None:
    """Say whether rows have the bits of kernels that fold nothing, alone and among others."""
    layers = Layers(CASE, 3, device, MORE)
    whole = layers.pass_of(unfolded(tuning), MORE)()
    wrong = [rows for rows in CHECKED if not torch.equal(layers.pass_of(tuning, rows)(), whole[:rows])]
    finite = bool(torch.isfinite(whole).all())
    print(f"bits: {f'DIFFER at {wrong} rows' if wrong else 'same'}{'' if finite else ', NOT FINITE'}", flush=True)


def guarded(what: str, work: Callable[[], None]) -> None:
    """Do something whose failure must not cost the figures."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - as it says
        print(f"  no {what}: {error!r}", flush=True)


def main() -> None:
    """Choose, write the file, and print times before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the file")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop trying tiles by then")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cuda")
    before = starting_tuning(arguments.start, device)
    before = dataclasses.replace(before, fold_codes=0, fold_norm_codes=0)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        tasks: list[Task] = [(unfolded(before), (MORE,))]
        compile_all(pool, tasks + [(way, (rows,)) for way in folds(before).values() for rows in ROWS])
        guarded("bits", lambda: check_bits(folds(before)["codes and norms in products"], device))
        layers = Layers(CASE, NUM_LAYERS["fp8"], device, MOST_ROWS)
        after = choose_folds(layers, before)
        write_tuning(after, arguments.out)
        compile_all(pool, [(way, JUDGED) for way in (after, *(way for _, way in tiles_of(after)))])
        after = choose_tiles(layers, after, deadline)
        write_tuning(after, arguments.out)
        tasks = [(unfolded(after), (MORE,))]
        compile_all(pool, tasks + [(after, (rows,)) for rows in ROWS])
    guarded("bits", lambda: check_bits(after, device))
    for name, tuning in (("before", before), ("after", after)):
        print(f"profile {name}")
        guarded("profile", lambda tuning=tuning: profile(layers, tuning, 1))
    print("microseconds a layer")
    timed(layers, "before", before, ROWS)
    timed(layers, "after", after, ROWS)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
