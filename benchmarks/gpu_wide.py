"""Find the tiles of products whose programs take all of a pass's rows, on this GPU, and write them down.

    PYTHONPATH=src python -m benchmarks.gpu_wide --out out/configs [--seconds 100] [--formats dense] [--shapes qkv,o]

Every candidate is timed at 160 rows, the best three at 96 to 256, beside the tiles without them and torch's product;
and likewise at 40 rows and 32 to 64. A candidate counts only if a row's bits are the same for 1 to 300 rows. One that
fails is skipped, and said.
"""

import argparse
import dataclasses
import multiprocessing
import time
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from benchmarks.gpu_tune import (
    LLAMA,
    ROWS_CHECKED,
    Shape,
    bits_differ,
    copies_of,
    graph_seconds,
    product_seconds,
    run_product,
    write_tuning,
)
from torch import Tensor

from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.linear import Epilogue
from slipstream.kernels.triton.products import Products, Weight
from slipstream.kernels.triton.tuning import (
    LinearConfig,
    Tuning,
    WideConfig,
    architecture_of,
    few_rows_name,
    read_tuning,
)
from slipstream.kernels.triton.wide_linear import fitted, row_pieces

MANY, FEW = (160, 96, 128, 256), (40, 32, 64)  # rows of passes; by the first a tile is chosen
LAUNCHES = 20
TILES = (  # weight rows of a tile, whether two of them, warps, stages, whether also without the copy engine
    (128, True, 8, 4, True),
    (128, True, 8, 6, False),
    (128, True, 8, 3, False),
    (128, True, 4, 5, False),
    (128, False, 8, 6, False),
    (128, False, 8, 4, True),
    (128, False, 8, 3, False),
    (128, False, 4, 4, False),
    (64, True, 4, 5, False),
    (64, True, 4, 3, False),
    (64, True, 8, 5, False),
    (64, False, 4, 6, False),
    (64, False, 4, 4, True),
    (64, False, 4, 3, False),
)
STEP_BYTES = (128, 256)
KEPT = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A product over passes of so many rows."""

    format: str
    shape: Shape
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        """What its tiles go by in a configuration."""
        shape = f"{self.format}:{self.shape.outputs}:{self.shape.inputs}"
        return few_rows_name(shape) if self.rows == FEW else shape

    def narrow(self, tuning: Tuning) -> LinearConfig:
        """Return the configuration that fixes the order of its columns."""
        itemsize = 2 if self.format == "dense" else 1
        return tuning.linear_config(self.format, self.shape.outputs, self.shape.inputs, itemsize)

    def __str__(self) -> str:
        return f"{self.format:5} {self.shape.name:14}"


Tried = dict[Case, list[WideConfig]]


def main() -> None:
    """Tune what is asked for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="leave the shapes that are not reached by then")
    parser.add_argument("--formats", default="dense,fp8")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in LLAMA))
    parser.add_argument("--rows", default="many,few")
    parser.add_argument("--split", default="", help="stretches to try for shapes: dense:6144:4096=2,...")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cuda")
    tuning = read_tuning(architecture_of(device))
    for name, splits in (pair.split("=") for pair in arguments.split.split(",") if pair):
        changed = dataclasses.replace(tuning.linear[name], split_k=int(splits))
        tuning = dataclasses.replace(tuning, linear={**tuning.linear, name: changed})
    passes = [{"many": MANY, "few": FEW}[name] for name in arguments.rows.split(",")]
    shapes = [shape for shape in LLAMA if shape.name in arguments.shapes.split(",")]
    cases = [Case(f, shape, rows) for f in arguments.formats.split(",") for rows in passes for shape in shapes]
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        tried = {case: candidates(tuning, case) for case in cases}
        compile_all(tuning, tried, 1, pool)
        print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
        kept: Tried = {}
        for case, configs in tried.items():
            if time.monotonic() > deadline:
                print(f"out of time before {case} at {case.rows[0]} rows")
                break
            kept[case] = fastest(tuning, case, configs, device)
        compile_all(tuning, kept, None, pool)
    best = dict(tuning.wide_linear)
    for case, configs in kept.items():
        if time.monotonic() > deadline + 30:
            print(f"out of time before {case} at {case.rows} rows")
            break
        found = best_of(tuning, case, configs, device)
        if found is not None:
            best[case.name] = found
    tuning = dataclasses.replace(tuning, wide_linear=best)
    write_tuning(tuning, arguments.out)


def candidates(tuning: Tuning, case: Case) -> list[WideConfig]:
    """Return tiles worth trying: programs for a good part of the device, and steps that keep the bits."""
    found, narrow, shape = [], case.narrow(tuning), case.shape
    for block_n, pair, warps, stages, both in TILES:
        for step_bytes in STEP_BYTES:
            block_k = step_bytes // (2 if case.format == "dense" else 1)
            if block_k > narrow.block_k or (case.format == "fp8" and block_k != 128):
                continue
            if step_bytes == 256 and stages > 4:
                continue
            width = block_n * (2 if pair and not shape.silu else 1)
            tiles = -(-(shape.outputs // (2 if shape.silu else 1)) // width)
            if tiles * narrow.split_k < 48 or (shape.silu and not pair):
                continue
            ways = (True, False) if both and step_bytes == STEP_BYTES[0] else (True,)
            found += [WideConfig(block_n, pair, block_k, warps, stages, tma) for tma in ways]
    most, pieces = tuning.shared_bytes, row_pieces(case.rows[0])
    return list({fitted(config, pieces, case.format, shape.silu, most): config for config in reversed(found)}.values())


def tuned_with(tuning: Tuning, case: Case, config: WideConfig | None) -> Tuning:
    """Return a tuning in which a product has these tiles, or none of this kind."""
    return dataclasses.replace(tuning, wide_linear={} if config is None else {case.name: config})


def compile_all(tuning: Tuning, tried: Tried, num_passes: int | None, pool: Pool) -> None:
    """Compile configurations for the first passes of each case, in the pool's processes, into Triton's cache."""
    tasks = set()
    for case, configs in tried.items():
        narrow = case.narrow(tuning)
        small = Shape("small", 1024, 2 * narrow.block_k * narrow.split_k, case.shape.silu)
        order = LinearConfig(64, narrow.block_k, narrow.split_k, 4, 3)
        of_small = Case(case.format, small, case.rows)
        tasks |= {(of_small, order, config, m) for config in configs for m in case.rows[:num_passes]}
    start = time.monotonic()
    failed = [error for error in pool.imap_unordered(compile_one, [(tuning, *t) for t in tasks], 2) if error]
    for error in failed:
        print(f"does not compile: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - start:.0f} s", flush=True)


def compile_one(task: tuple[Tuning, Case, LinearConfig, WideConfig, int]) -> str:
    """Run one configuration on a small weight with the specialisations of the large ones; return what went wrong."""
    tuning, case, order, config, num_rows = task
    shape = case.shape
    try:
        linear = {f"{case.format}:{shape.outputs}:{shape.inputs}": order}
        used = dataclasses.replace(tuned_with(tuning, case, config), linear=linear)
        with torch.no_grad():
            run_product(used, case.format, shape, num_rows)
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        why = (str(error).splitlines() or [type(error).__name__])[-1][:160]
        return f"{case.format} {short(config)} at {num_rows} rows: {why}"
    return ""


def fastest(tuning: Tuning, case: Case, configs: list[WideConfig], device: torch.device) -> list[WideConfig]:
    """Time configurations over the pass that counts, and return the best few."""
    weights = copies_of(Products(tuning, device), case.format, case.shape, device)
    x = torch.randn(case.rows[0], case.shape.inputs, device=device).bfloat16()
    timed = []
    for config in configs:
        try:
            timed.append((product_seconds(tuned_with(tuning, case, config), weights, x, case.shape), config))
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {case} {short(config)}: {str(error)[:120]!r}")
    timed.sort(key=lambda pair: pair[0])
    text = " ".join(f"{short(config)}={seconds * 1e6:.1f}" for seconds, config in timed)
    print(f"{case} M={case.rows[0]}: {text}", flush=True)
    return [dataclasses.replace(config, ahead=ahead) for _, config in timed[:KEPT] for ahead in (True, False)]


def best_of(tuning: Tuning, case: Case, configs: list[WideConfig], device: torch.device) -> WideConfig | None:
    """Print what configurations take, and return the best whose bits are right, if it beats having none."""
    shape, chosen_by = case.shape, case.rows[0]
    weights = copies_of(Products(tuning, device), case.format, shape, device)
    x = torch.randn(max(ROWS_CHECKED), shape.inputs, device=device).bfloat16()
    without = {m: product_seconds(tuned_with(tuning, case, None), weights, x[:m], shape) for m in case.rows}
    show(case, "without", without)
    if case.format == "dense":
        say = torch_bits(tuning, weights[0], x) if case.rows == MANY else ""
        show(case, "torch", {m: torch_seconds(weights, x[:m]) for m in case.rows}, say)
    winner, at_winner = None, without
    for config in configs:
        used = tuned_with(tuning, case, config)
        try:
            times = {m: product_seconds(used, weights, x[:m], shape) for m in case.rows}
            wrong = bits_differ(used, weights[0], x, shape)
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {case} {short(config)}: {str(error)[:120]!r}")
            continue
        show(case, short(config), times, f" BITS DIFFER at {wrong}" if wrong else "")
        if not wrong and times[chosen_by] < at_winner[chosen_by]:
            winner, at_winner = config, times
    if winner is None or case.rows == MANY:
        return winner
    return dataclasses.replace(winner, from_rows=17 if at_winner[32] < without[32] else 33)


def short(config: WideConfig) -> str:
    """Return a configuration in a word."""
    tiles = f"{'2x' if config.pair else ''}{config.block_n}x{config.block_k}"
    ways = f"{'' if config.tma else '-ptr'}{'' if config.ahead else '-now'}"
    return f"{tiles}/w{config.num_warps}s{config.num_stages}{ways}"


def show(case: Case, name: str, times: dict[int, float], say: str = "") -> None:
    """Print one line of the table."""
    text = " ".join(f"M={m} {seconds * 1e6:6.1f}" for m, seconds in sorted(times.items()))
    print(f"{case} {name:20} {text} us{say}", flush=True)


def torch_seconds(weights: list[Weight], x: Tensor) -> float:
    """Return seconds of torch's own product, without an epilogue."""
    return graph_seconds(
        lambda i: torch.nn.functional.linear(x, weights[i % len(weights)]), max(LAUNCHES, len(weights))
    )


def torch_bits(tuning: Tuning, weight: Tensor, x: Tensor) -> str:
    """Say how many numbers of torch's product are ours to the bit: stretch by stretch, and added in our order."""
    narrow = tuning.linear_config("dense", *weight.shape, 2)
    stretch = -(-weight.shape[1] // (narrow.block_k * narrow.split_k)) * narrow.block_k
    products, shares = Products(tuning, x.device), []
    for num_rows in (40, 160):
        rows = x[:num_rows]
        ours = products.multiply(products.rows_for(weight, rows), weight, Epilogue())
        starts = range(0, weight.shape[1], stretch)
        try:
            parts = [
                torch.mm(rows[:, k : k + stretch], weight[:, k : k + stretch].t(), out_dtype=torch.float32)
                for k in starts
            ]
        except Exception as error:  # noqa: BLE001 - a torch that cannot is only worth a word
            return f" bits not compared: {str(error)[:80]!r}"
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        shares.append(f"{100 * (total.bfloat16() == ours).float().mean().item():.3f}% at M={num_rows}")
    return f" bits as ours: {', '.join(shares)}"


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
