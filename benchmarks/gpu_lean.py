"""Check and time products of 1 to 4 rows in which one warp asks for weights (`lean`), on this GPU.

    PYTHONPATH=src python benchmarks/gpu_lean.py --out FOLDER [--seconds 120] [--formats fp8,dense] [--start FILE]

First each product alone, for 1 to 4 rows, in processes that may hang without harm: its outputs, what it leaves for the
next kernel and what it writes to the cache must have the bits of `narrow_kernel`, in launches one after another. What
does not is left out. Then whole layers of Llama-8B's shape with cold weights (`gpu_few`): all products so, then one
after another as it was, with other rings and other triggers; what is kept is faster, twice timed, and changes no bit.
FOLDER gets `sm_90.json`, for kernels/triton/configs, after every format.
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_few import DOWN, GATE_UP, OUT, QKV, Search
from gpu_rows import said
from gpu_tune import Shape, random_weight, starting_tuning, write_tuning
from slipstream.kernels import KvLayer
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.linear import Epilogue, FoldedNorm, Rows
from slipstream.kernels.triton.norm_rope import Rope, RopeWrite
from slipstream.kernels.triton.products import Products
from slipstream.kernels.triton.tuning import LinearConfig, Tuning
from slipstream.quant.packed import PackedWeight

Settings = dict[str, Any]
LAUNCHES, CHECK_SECONDS, ROWS = 24, 75.0, (1, 2, 3, 4)
SIDE = {"side": True}
TILES: dict[str, dict[str, Settings]] = {
    "fp8": {
        QKV: {"block_n": 128, "own_rows": 64, "lean": 20, **SIDE},
        OUT: {"block_n": 128, "own_rows": 32, "lean": 8, **SIDE},
        GATE_UP: {"block_n": 256, "own_rows": 224, "lean": 9},
        DOWN: {"block_n": 128, "own_rows": 32, "lean": 10, **SIDE},
    },
    "dense": {
        QKV: {"block_n": 128, "own_rows": 64, "lean": 20, **SIDE},
        OUT: {"block_n": 64, "own_rows": 32, "lean": 20, **SIDE},
        GATE_UP: {"block_n": 256, "own_rows": 224, "lean": 10},
        DOWN: {"block_n": 128, "own_rows": 32, "lean": 10, **SIDE},
    },
}
RINGS = {  # slots, of which two programs never fit a processor
    "fp8": {QKV: (14, 24), OUT: (), GATE_UP: (6, 11), DOWN: (7, 12)},
    "dense": {QKV: (14, 24), OUT: (14, 24), GATE_UP: (7, 12), DOWN: (7, 12)},
}
TRIGGERS = (-1, 4, 8, 16)
NAMES = {QKV: "qkv", OUT: "o", GATE_UP: "gate_up", DOWN: "down"}
Task = tuple[Tuning, str, str, LinearConfig, int, bool]
"""A tuning, format and shape, tiles, rows, and whether the product makes the codes of rows after their norm."""
Key = tuple[str, int]
"""A product, and the slots of its ring."""


def tiles_of(tuning: Tuning, format: str, shape: str, slots: int = 0, trigger: int = 8) -> LinearConfig:
    """Return a product's tiles, with so many slots if not as many as usual; its stretches are as configured."""
    settings = {**TILES[format][shape], **({"lean": slots} if slots else {})}
    order = tuning.linear[f"{format}:{shape}"]
    return dataclasses.replace(order, **{"ahead": 0, "lean_trigger": trigger, **settings})


def with_tiles(tuning: Tuning, format: str, shape: str, config: LinearConfig) -> Tuning:
    """Return the tuning with a product's tiles for passes of up to 4 rows."""
    return dataclasses.replace(tuning, linear_few={**tuning.linear_few, f"{format}:{shape}": config})


def short(config: LinearConfig) -> str:
    """Return tiles in a word."""
    if not config.lean:
        return "as today"
    return f"{config.own_rows}/{config.block_n} slots {config.lean} trigger {config.lean_trigger}"


class Inputs:
    """What a product is given in a layer of so many rows, a number of times over."""

    def __init__(self, products: Products, format: str, shape: str, num_rows: int, *, folded: bool) -> None:
        self._device = torch.device("cuda")
        torch.manual_seed(num_rows)
        outputs, inputs = (int(part) for part in shape.split(":"))
        self._shape, self._format, self._rows, self._folded = shape, format, num_rows, folded
        weight = random_weight(format, Shape(shape, outputs, inputs), self._device)
        if isinstance(weight, PackedWeight):  # numbers of both signs
            signs = torch.randint(0, 2, weight.codes.shape, dtype=torch.uint8, device=self._device) << 7
            codes = (weight.codes.view(torch.uint8) | signs).view(torch.float8_e4m3fn)
            scale = torch.rand(outputs, device=self._device) * 1e-4
            weight = products.prepare(dataclasses.replace(weight, codes=codes, scales={"scale": scale}))
        self.weight = weight
        self._x = [torch.randn(num_rows, inputs, device=self._device).bfloat16() for _ in range(LAUNCHES)]
        self._norm = (1 + 0.1 * torch.randn(inputs, device=self._device)).bfloat16()
        self._residual = torch.randn(num_rows, outputs, device=self._device).bfloat16()
        angle = torch.rand(64, 64, device=self._device) * 6.28
        self._angles = angle.cos().contiguous(), angle.sin().contiguous()

    def rows(self, products: Products) -> list[Rows]:
        """Return the rows of every launch, with what the kernel before leaves of them."""
        found = []
        for x in self._x:
            normed = self._shape in (QKV, GATE_UP)
            squares = x.float().pow(2).view(self._rows, -1, 32).sum(-1).contiguous()
            folded = FoldedNorm(self._norm, 1e-5, squares)
            if normed and (self._format == "dense" or self._folded):
                found.append(Rows(x, None, x.dtype, folded))
            elif normed or self._format == "dense":
                found.append(products.rows_for(self.weight, x))
            else:
                parts = 32 if self._shape == OUT else 128
                found.append(Rows(x, None, x.dtype, maxima_TB=x.float().abs().view(self._rows, parts, -1).amax(-1)))
        return found

    def end(self, products: Products) -> tuple[Epilogue, list[Tensor]]:
        """Return what a launch ends with, and what it writes beside its outputs."""
        if self._shape == QKV:
            kept = [torch.full((64, 8, 128), float("nan"), device=self._device).bfloat16() for _ in range(2)]
            slots = torch.arange(7, 7 + self._rows, device=self._device)
            rope = Rope(slots, slots + 3, *self._angles)
            return Epilogue(rope=RopeWrite((32, 8), rope, KvLayer(*kept))), kept
        if self._shape == GATE_UP:
            count = products.num_maxima(self.weight, self._rows)
            left = torch.full((self._rows, count), float("nan"), device=self._device)
            return Epilogue(silu=True, maxima_TB=left if self._format == "fp8" else None), [left]
        squared = products.squared(self.weight, self._rows)
        left = torch.full((self._rows, 4096 // squared), float("nan"), device=self._device)
        return Epilogue(residual_TN=self._residual, squares_TB=left), [left]

    def results(self, products: Products) -> list[Tensor]:
        """Return all that comes of launches one after another."""
        rows, ends = self.rows(products), [self.end(products) for _ in self._x]
        torch.cuda.synchronize()
        outs = [products.multiply(one, self.weight, end) for one, (end, _) in zip(rows, ends, strict=True)]
        torch.cuda.synchronize()
        return outs + [one for _, written in ends for one in written]


def check(task: Task) -> str:
    """Compare a product's bits with those of `narrow_kernel` for the same tiles; return what is wrong."""
    tuning, format, shape, config, num_rows, folded = task
    try:
        with torch.no_grad():
            device = torch.device("cuda")
            lean = Products(with_tiles(tuning, format, shape, config), device)
            plain = Products(with_tiles(tuning, format, shape, dataclasses.replace(config, lean=0)), device)
            inputs = Inputs(plain, format, shape, num_rows, folded=folded)
            expected = inputs.results(plain)
            wrong = 0
            for _ in range(3):
                found = inputs.results(lean)
                same = [torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, expected, strict=True)]
                wrong += same.count(False)
            if wrong:
                return f"{wrong} of {3 * len(expected)} results have other bits"
            if not all(torch.isfinite(one).all() for one in expected[:LAUNCHES]):
                return "the same bits, but not all outputs are numbers"
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return said(error)
    return ""


def checked(tasks: list[Task], pool: Pool, seconds: float) -> set[Key]:
    """Return the products, with their slots, a check of which did not end well; say how each ended."""
    started, hung = time.monotonic(), False
    bad: set[Key] = set()
    pending = [(task, pool.apply_async(check, (task,))) for task in tasks]
    for (_, format, shape, config, num_rows, folded), result in pending:
        name = f"{format} {shape} {num_rows} rows{', norm' if folded else ''}, {short(config)}"
        try:
            error = result.get(timeout=max(seconds - (time.monotonic() - started), 0.5))
        except multiprocessing.TimeoutError:
            error, hung = "DID NOT END", True
        if error:
            bad.add((f"{format}:{shape}", config.lean))
        print(f"  {name}: {error or 'the same bits'}", flush=True)
    print(f"checked {len(tasks)} in {time.monotonic() - started:.0f} s{', SOME HUNG' if hung else ''}", flush=True)
    if hung:
        pool.terminate()
    return bad


def tasks_of(tuning: Tuning, formats: list[str]) -> list[Task]:
    """Return what is checked: the usual ring of every product for all rows, other rings for 1 and 4."""
    found = []
    for format in formats:
        for shape, rings in RINGS[format].items():
            for slots in (0, *rings):
                config = tiles_of(tuning, format, shape, slots)
                for num_rows in (1, 4) if slots else ROWS:
                    both = format == "fp8" and shape in (QKV, GATE_UP)
                    ways = ((True,) if num_rows == 1 else (False, True)) if both else (False,)
                    found += [(tuning, format, shape, config, num_rows, folded) for folded in ways]
    return found


def changes(today: Tuning, search: Search, format: str) -> Iterator[tuple[str, Tuning]]:
    """Yield what to try, each beside the best so far."""
    whole = today
    for shape in TILES[format]:
        whole = with_tiles(whole, format, shape, tiles_of(today, format, shape))
    yield "all lean", whole
    if format == "fp8":
        yield "codes after norms made for 4 rows", dataclasses.replace(search.best, fold_norm_codes=4)
    for shape, rings in RINGS[format].items():
        name, word = f"{format}:{shape}", NAMES[shape]
        yield f"{word}: as today", with_tiles(search.best, format, shape, today.linear_few[name])
        now = search.best.linear_few[name]
        for slots in (*rings, TILES[format][shape]["lean"]):
            config = tiles_of(today, format, shape, slots, now.lean_trigger)
            yield f"{word}: slots {slots}", with_tiles(search.best, format, shape, config)
        for trigger in TRIGGERS:
            config = dataclasses.replace(search.best.linear_few[name], lean_trigger=trigger)
            yield f"{word}: trigger {trigger}", with_tiles(search.best, format, shape, config)


def tune(format: str, tuning: Tuning, bad: set[Key], device: torch.device, seconds: float) -> tuple[Tuning, list[str]]:
    """Return the fastest tuning, and lines of the table."""
    deadline = time.monotonic() + seconds
    search = Search(format, tuning, device)
    for name, changed in changes(tuning, search, format):
        if time.monotonic() > deadline:
            print("  (time is up: the rest is left out)", flush=True)
            break
        if changed == search.best or any((key, c.lean) in bad for key, c in changed.linear_few.items()):
            continue
        search.consider(name, changed)
    lines = []
    for name, one in (("before", tuning), ("after", search.best), ("before", tuning), ("after", search.best)):
        text = "  ".join(f"{us:6.2f}" for us in search.measured(name, one)[0])
        lines.append(f"{format:6} {name:8} {text}")
    return search.best, lines


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="nothing new is tried after so long")
    parser.add_argument("--formats", default="fp8,dense")
    parser.add_argument("--start", type=Path, help="a configuration to go on from")
    parser.add_argument("--no-layers", action="store_true", help="only check bits")
    arguments = parser.parse_args()
    started, device, formats = time.monotonic(), torch.device("cuda"), arguments.formats.split(",")
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    tuning, table = starting_tuning(arguments.start, device), []
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        bad = checked(tasks_of(tuning, formats), pool, CHECK_SECONDS)
    if arguments.no_layers:
        return
    with torch.no_grad():
        for number, format in enumerate(formats):
            left = max(started + arguments.seconds - time.monotonic(), 10.0) / (len(formats) - number)
            try:
                tuning, lines = tune(format, tuning, bad, device, left)
                table += lines
            except Exception as error:  # noqa: BLE001 - the other format is still worth its time
                print(f"no layers of {format}: {said(error)}", flush=True)
            write_tuning(tuning, arguments.out)
            torch.cuda.empty_cache()
    print("us a layer       1x1     1x4\n" + "\n".join(table))
    for name, config in tuning.linear_few.items():
        print(f"  {name}: {short(config)}")


if __name__ == "__main__":
    main()
