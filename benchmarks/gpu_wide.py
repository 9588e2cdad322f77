"""Find the tiles of products of 65 to 256 rows on this GPU, which one program takes whole, and write them down.

    PYTHONPATH=src python -m benchmarks.gpu_wide --out out/configs [--seconds 100] [--formats dense,fp8] [--shapes 4]

Every candidate is timed at 160 rows, the best three at 40 to 256, beside the tiles without them and torch's product.
A candidate counts only if a row's bits are the same for 1 to 300 rows. One that fails is skipped, and said.
"""

import argparse
import dataclasses
import json
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
)
from torch import Tensor

from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.linear import Epilogue
from slipstream.kernels.triton.products import Products, Weight
from slipstream.kernels.triton.tuning import LinearConfig, Tuning, WideConfig, architecture_of, read_tuning
from slipstream.kernels.triton.wide_linear import fitted, row_pieces

ROWS = (40, 64, 96, 128, 160, 256)
TARGET_ROWS = 160
LAUNCHES = 20
TILES = (  # weight rows of a tile, whether two of them, warps, stages, whether also without the copy engine
    (128, True, 8, 4, True),
    (128, True, 8, 3, False),
    (128, False, 8, 6, False),
    (128, False, 8, 4, True),
    (128, False, 8, 3, False),
    (128, False, 4, 4, False),
    (64, True, 4, 5, False),
    (64, True, 8, 5, False),
    (64, False, 4, 6, False),
    (64, False, 4, 4, True),
    (64, False, 4, 3, False),
)
STEP_BYTES = (128, 256)
KEPT = 3

Tried = dict[tuple[str, Shape], list[WideConfig]]


def main() -> None:
    """Tune what is asked for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="leave the shapes that are not reached by then")
    parser.add_argument("--formats", default="dense,fp8")
    parser.add_argument("--shapes", type=int, default=len(LLAMA), help="how many products of a model; a block has four")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cuda")
    tuning = read_tuning(architecture_of(device))
    work = [(format, shape) for format in arguments.formats.split(",") for shape in LLAMA[: arguments.shapes]]
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        tried = {(f, s): candidates(tuning, f, s) for f, s in work}
        compile_all(tuning, tried, (TARGET_ROWS,), pool)
        print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
        kept = {}
        for (format, shape), configs in tried.items():
            if time.monotonic() > deadline:
                print(f"out of time before {format} {shape.name}")
                break
            kept[format, shape] = fastest(tuning, format, shape, configs, device)
        compile_all(tuning, kept, ROWS, pool)
    best = dict(tuning.wide_linear)
    for (format, shape), configs in kept.items():
        if time.monotonic() > deadline + 30:
            print(f"out of time before the rows of {format} {shape.name}")
            break
        found = best_of(tuning, format, shape, configs, device)
        if found is not None:
            best[key_of(format, shape)] = found
    tuning = dataclasses.replace(tuning, wide_linear=best)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{tuning.architecture}.json"
    data = {name: value for name, value in dataclasses.asdict(tuning).items() if name != "architecture"}
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def key_of(format: str, shape: Shape) -> str:
    """Return the name a shape's configuration goes by."""
    return f"{format}:{shape.outputs}:{shape.inputs}"


def candidates(tuning: Tuning, format: str, shape: Shape) -> list[WideConfig]:
    """Return tiles worth trying: programs for a good part of the device, and steps that keep the bits."""
    found, narrow = [], narrow_of(tuning, format, shape)
    for block_n, pair, warps, stages, both in TILES:
        for step_bytes in STEP_BYTES:
            block_k = step_bytes // (2 if format == "dense" else 1)
            if block_k > narrow.block_k or (format == "fp8" and block_k != 128):
                continue
            if step_bytes == 256 and stages > 4:
                continue
            width = block_n * (2 if pair and not shape.silu else 1)
            programs = -(-(shape.outputs // (2 if shape.silu else 1)) // width) * narrow.split_k
            if programs < 48 or (shape.silu and not pair):
                continue
            ways = (True, False) if both and step_bytes == STEP_BYTES[0] else (True,)
            found += [WideConfig(block_n, pair, block_k, warps, stages, tma, from_rows=17) for tma in ways]
    most, pieces = tuning.shared_bytes, row_pieces(TARGET_ROWS)
    return list({fitted(config, pieces, format, shape.silu, most): config for config in reversed(found)}.values())


def narrow_of(tuning: Tuning, format: str, shape: Shape) -> LinearConfig:
    """Return the configuration that fixes the order of a shape's columns."""
    return tuning.linear_config(format, shape.outputs, shape.inputs, 2 if format == "dense" else 1)


def tuned_with(tuning: Tuning, format: str, shape: Shape, config: WideConfig | None) -> Tuning:
    """Return a tuning in which a shape has these tiles, or none of this kind."""
    return dataclasses.replace(tuning, wide_linear={} if config is None else {key_of(format, shape): config})


def compile_all(tuning: Tuning, tried: Tried, rows: tuple[int, ...], pool: Pool) -> None:
    """Compile configurations for passes of so many rows, in the pool's processes, into Triton's cache."""
    tasks = set()
    for (format, shape), configs in tried.items():
        narrow = narrow_of(tuning, format, shape)
        tasks |= {(format, shape.silu, narrow.split_k, narrow.block_k, config, m) for config in configs for m in rows}
    start = time.monotonic()
    failed = [error for error in pool.imap_unordered(compile_one, [(tuning, *t) for t in tasks], 2) if error]
    for error in failed:
        print(f"does not compile: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - start:.0f} s", flush=True)


def compile_one(task: tuple[Tuning, str, bool, int, int, WideConfig, int]) -> str:
    """Run one configuration on a small weight with the specialisations of the large ones; return what went wrong."""
    tuning, format, silu, split, block_k, config, num_rows = task
    try:
        shape = Shape("small", 1024, 2 * block_k * split, silu)
        used = dataclasses.replace(
            tuning,
            linear={key_of(format, shape): LinearConfig(64, block_k, split, 4, 3)},
            wide_linear={key_of(format, shape): config},
        )
        with torch.no_grad():
            run_product(used, format, shape, num_rows)
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return f"{format} {short(config)} {num_rows}: {(str(error).splitlines() or [type(error).__name__])[-1][:160]}"
    return ""


def fastest(
    tuning: Tuning, format: str, shape: Shape, configs: list[WideConfig], device: torch.device
) -> list[WideConfig]:
    """Time configurations over the pass that counts, and return the best few."""
    weights = copies_of(Products(tuning, device), format, shape, device)
    x = torch.randn(TARGET_ROWS, shape.inputs, device=device).bfloat16()
    timed = []
    for config in configs:
        try:
            timed.append((product_seconds(tuned_with(tuning, format, shape, config), weights, x, shape), config))
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {format} {shape.name} {short(config)}: {str(error)[:120]!r}")
    timed.sort(key=lambda pair: pair[0])
    text = " ".join(f"{short(config)}={seconds * 1e6:.1f}" for seconds, config in timed)
    print(f"{format:5} {shape.name:14} M={TARGET_ROWS}: {text}", flush=True)
    return [config for _, config in timed[:KEPT]]


def best_of(
    tuning: Tuning, format: str, shape: Shape, configs: list[WideConfig], device: torch.device
) -> WideConfig | None:
    """Print what configurations take, and return the best whose bits are right, if it beats having none."""
    weights = copies_of(Products(tuning, device), format, shape, device)
    x = torch.randn(max(ROWS_CHECKED), shape.inputs, device=device).bfloat16()
    without = {m: product_seconds(tuned_with(tuning, format, shape, None), weights, x[:m], shape) for m in ROWS}
    show(format, shape, "without", without)
    if format == "dense":
        show(
            format, shape, "torch", {m: torch_seconds(weights, x[:m]) for m in ROWS}, torch_bits(tuning, weights[0], x)
        )
    winner, at_winner = None, without
    for config in configs:
        used = tuned_with(tuning, format, shape, config)
        try:
            times = {m: product_seconds(used, weights, x[:m], shape) for m in ROWS}
            wrong = bits_differ(used, weights[0], x, shape)
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {format} {shape.name} {short(config)}: {str(error)[:120]!r}")
            continue
        show(format, shape, short(config), times, f" BITS DIFFER at {wrong}" if wrong else "")
        if not wrong and times[TARGET_ROWS] < at_winner[TARGET_ROWS]:
            winner, at_winner = config, times
    if winner is None:
        return None
    better = [m for m in (40, 64) if at_winner[m] < 0.98 * without[m]]
    from_rows = 33 if 40 in better and 64 in better else 49 if 64 in better else 65
    return dataclasses.replace(winner, from_rows=from_rows)


def short(config: WideConfig) -> str:
    """Return a configuration in a word."""
    tiles = f"{'2x' if config.pair else ''}{config.block_n}x{config.block_k}"
    return f"{tiles}/w{config.num_warps}s{config.num_stages}{'' if config.tma else '-ptr'}"


def show(format: str, shape: Shape, name: str, times: dict[int, float], say: str = "") -> None:
    """Print one line of the table."""
    text = " ".join(f"M={m} {seconds * 1e6:6.1f}" for m, seconds in times.items())
    print(f"{format:5} {shape.name:14} {name:20} {text} us{say}", flush=True)


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
    for num_rows in (40, TARGET_ROWS):
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
