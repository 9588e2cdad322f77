"""Choose tiles for passes of one request on this GPU: a single row, and a chain of four.

    PYTHONPATH=src python benchmarks/gpu_few.py --out FOLDER [--seconds 35] [--formats dense,fp8] [--start FILE]

A graph holds layers of Llama-8B's shape with cold weights and caches (`gpu_rows`). Each product's tiles, the rows of
them that are a program's own and whether stretches lie side by side are changed in turn, twice, for passes of up to 4
rows alone (`linear_few`); what is kept makes both passes faster together, twice timed, and changes no bit. FOLDER gets
`sm_90.json`, for kernels/triton/configs, after every format. A candidate that fails is skipped, and said.
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

from gpu_rows import said
from gpu_rows_tried import Case
from gpu_streams import layers_of
from gpu_tune import replayed_us, starting_tuning, write_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.tuning import Tuning

NUM_LAYERS, CONTEXT, REPLAYS = 8, 1152, 21
CASES: tuple[Case, ...] = ((1, 1), (1, 4))
QKV, OUT, GATE_UP, DOWN = "6144:4096", "4096:4096", "28672:4096", "4096:14336"
SIDE = True
TILES = {  # product, rows of a tile, those that are a program's, columns, stages, lines ahead, stretches side by side
    "dense": (
        (GATE_UP, 64, 56, 128, 3, 0), (OUT, 64, 32, 256, 5, 8, SIDE), (DOWN, 64, 16, 128, 6, 0, SIDE),
        (QKV, 64, 32, 256, 3, 0, SIDE), (QKV, 64, 24, 256, 3, 0, SIDE), (QKV, 64, 32, 128, 5, 0, SIDE),
        (QKV, 64, 24, 128, 5, 0, SIDE), (QKV, 64, 32, 128, 6, 0, SIDE), (QKV, 64, 64, 256, 3, 0),
        (OUT, 64, 32, 256, 4, 8, SIDE), (OUT, 64, 32, 256, 6, 8, SIDE), (OUT, 64, 32, 256, 5, 0, SIDE),
        (OUT, 64, 64, 256, 5, 8), (DOWN, 64, 16, 128, 5, 0, SIDE), (DOWN, 64, 16, 128, 7, 0, SIDE),
        (DOWN, 64, 64, 128, 6, 0), (GATE_UP, 128, 112, 128, 3, 0), (GATE_UP, 64, 64, 128, 3, 0),
    ),
    "fp8": (
        (QKV, 64, 32, 256, 6, 0, SIDE), (QKV, 64, 32, 256, 4, 0, SIDE), (QKV, 64, 64, 256, 5, 0),
        (QKV, 64, 64, 256, 6, 0), (QKV, 64, 64, 256, 4, 0), (QKV, 64, 48, 256, 5, 0), (OUT, 64, 16, 256, 3, 0, SIDE),
        (OUT, 64, 16, 256, 4, 8, SIDE), (OUT, 64, 16, 256, 5, 0, SIDE), (OUT, 64, 16, 256, 4, 0, SIDE),
        (OUT, 64, 64, 256, 5, 8), (OUT, 128, 32, 256, 4, 0, SIDE), (DOWN, 64, 16, 256, 4, 0, SIDE),
        (DOWN, 64, 16, 256, 6, 0, SIDE), (DOWN, 64, 16, 256, 5, 0, SIDE), (DOWN, 64, 64, 256, 5, 0),
        (DOWN, 128, 32, 256, 4, 0, SIDE), (GATE_UP, 128, 112, 256, 3, 0), (GATE_UP, 64, 56, 256, 3, 0),
        (GATE_UP, 64, 64, 256, 3, 0), (GATE_UP, 128, 112, 128, 6, 0), (GATE_UP, 256, 224, 128, 4, 0),
    ),
}  # fmt: skip


def candidates(format: str, tuning: Tuning) -> Iterator[tuple[str, Tuning]]:
    """Yield what to try, each one change to the tuning given."""
    for shape, block_n, own, block_k, stages, ahead, *side in TILES[format]:
        name = f"{format}:{shape}"
        tiles = dataclasses.replace(
            tuning.linear[name],
            block_n=block_n,
            own_rows=own,
            side=bool(side),
            block_k=block_k,
            num_stages=stages,
            ahead=ahead,
        )
        changed = dataclasses.replace(tuning, linear_few={**tuning.linear_few, name: tiles})
        yield f"{shape} {own}/{block_n}x{block_k}s{stages}a{ahead}{' side' if side else ''}", changed


def compile_one(task: tuple[str, Tuning]) -> str:
    """Run a layer once, so that its kernels are in Triton's cache; return what went wrong."""
    format, tuning = task
    try:
        with torch.no_grad():
            layers = layers_of(format)(1, 64, 1, torch.device("cuda"))
            for case in CASES:
                layers.pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return said(error)
    return ""


def compile_all(tasks: list[tuple[str, Tuning]], pool: Pool) -> None:
    """Compile what will be timed."""
    started = time.monotonic()
    failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    for error in failed:
        print(f"does not run: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)


class Search:
    """Layers of a format, the best tuning so far, and what passes give."""

    def __init__(self, format: str, tuning: Tuning, device: torch.device) -> None:
        self.best, self._format = tuning, format
        self._layers = layers_of(format)(NUM_LAYERS, CONTEXT, 1, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._times, self._outs = self.measured("as configured", tuning)

    def measured(self, name: str, tuning: Tuning) -> tuple[list[float], list[Tensor]]:
        """Return microseconds a layer of each pass, and what it gives; print the times."""
        found = [replayed_us(self._layers.pass_of(tuning, case), REPLAYS, self._pool) for case in CASES]
        times = [us / NUM_LAYERS for us, _ in found]
        text = "  ".join(f"{r}x{n} {us:6.2f}" for (r, n), us in zip(CASES, times, strict=True))
        print(f"  {self._format} {name:28} {text} us", flush=True)
        return times, [out for _, out in found]

    def consider(self, name: str, tuning: Tuning) -> None:
        """Keep a tuning if it is faster than the best in two turns, and its bits are the same."""
        try:
            times, outs = self.measured(name, tuning)
            if not all(torch.equal(a, b) for a, b in zip(outs, self._outs, strict=True)):
                print(f"  OTHER BITS: {name}", flush=True)
            elif self._faster(times, self._times):
                again, _ = self.measured("the best again", self.best)
                once_more, _ = self.measured(f"{name}, again", tuning)
                if self._faster(once_more, again):
                    self.best, self._times = tuning, once_more
                    print("    kept", flush=True)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {name}: {said(error)}", flush=True)

    @staticmethod
    def _faster(times: list[float], before: list[float]) -> bool:
        ratios = [new / old for new, old in zip(times, before, strict=True)]
        return sum(ratios) / len(ratios) < 0.998 and max(ratios) < 1.003


def main() -> None:
    """Search, format by format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=35.0, help="a format tries nothing new after so long")
    parser.add_argument("--formats", default="dense,fp8")
    parser.add_argument("--start", type=Path, help="a configuration to go on from")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s")
    tuning, table, formats = starting_tuning(arguments.start, device), [], arguments.formats.split(",")
    with torch.no_grad():
        with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
            compile_all([(format, one) for format in formats for _, one in candidates(format, tuning)], pool)
        for format in formats:
            deadline, first = time.monotonic() + arguments.seconds, tuning
            search = Search(format, tuning, device)
            for number in (*range(len(TILES[format])), *range(len(TILES[format]))):
                if time.monotonic() > deadline:
                    print("  (time is up: tiles are left out)")
                    break
                search.consider(*list(candidates(format, search.best))[number])
            tuning = search.best
            write_tuning(tuning, arguments.out)
            for name, one in (("before", first), ("after", tuning)):
                text = "  ".join(f"{us:6.2f}" for us in search.measured(name, one)[0])
                table.append(f"{format:6} {name:8} {text}")
            del search
    print("us a layer       1x1     1x4\n" + "\n".join(table))
    for name, config in tuning.linear_few.items():
        print(f"  {name}: {config}")


if __name__ == "__main__":
    main()
