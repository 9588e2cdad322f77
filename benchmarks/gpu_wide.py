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
from pathlib import Path

import torch
from benchmarks.gpu_tune import LLAMA, Shape, bits_differ, copies_of, graph_seconds, product_seconds, run_product
from torch import Tensor

from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.products import Products, Weight
from slipstream.kernels.triton.tuning import LinearConfig, Tuning, WideConfig, architecture_of, read_tuning

ROWS = (40, 64, 96, 128, 160, 256)
TARGET_ROWS = 160
LAUNCHES = 20
TILES = (  # weight rows of a tile, whether two of them, warps, stages; each with and without the copy engine
    (128, True, 8, 4),
    (128, True, 8, 3),
    (128, False, 8, 6),
    (128, False, 8, 4),
    (128, False, 8, 3),
    (128, False, 4, 4),
    (64, True, 4, 5),
    (64, True, 8, 5),
    (64, False, 4, 6),
    (64, False, 4, 4),
    (64, False, 4, 3),
)
STEP_BYTES = (128, 256)


def main() -> None:
    """Tune what is asked for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="leave the shapes that are not reached by then")
    parser.add_argument("--formats", default="dense,fp8")
    parser.add_argument(
        "--shapes", type=int, default=len(LLAMA), help="how many of a model's products, of a block first"
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cuda")
    tuning = read_tuning(architecture_of(device))
    work = [(format, shape) for format in arguments.formats.split(",") for shape in LLAMA[: arguments.shapes]]
    compile_all(tuning, work)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    best = dict(tuning.wide_linear)
    for format, shape in work:
        if time.monotonic() > deadline:
            print(f"out of time before {format} {shape.name}")
            continue
        found = tune_shape(tuning, format, shape, device, deadline)
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


def candidates(format: str, shape: Shape, narrow: LinearConfig) -> list[WideConfig]:
    """Return tiles worth trying: programs for a good part of the device, and steps that keep the bits."""
    found = []
    for block_n, pair, warps, stages in TILES:
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
            found += [WideConfig(block_n, pair, block_k, warps, stages, tma, from_rows=17) for tma in (True, False)]
    return found


def narrow_of(tuning: Tuning, format: str, shape: Shape) -> LinearConfig:
    """Return the configuration that fixes the order of a shape's columns."""
    return tuning.linear_config(format, shape.outputs, shape.inputs, 2 if format == "dense" else 1)


def tuned_with(tuning: Tuning, format: str, shape: Shape, config: WideConfig | None) -> Tuning:
    """Return a tuning in which a shape has these tiles, or none of this kind."""
    return dataclasses.replace(tuning, wide_linear={} if config is None else {key_of(format, shape): config})


def compile_all(tuning: Tuning, work: list[tuple[str, Shape]]) -> None:
    """Compile every candidate, in as many processes as there are cores, into Triton's cache."""
    tasks = set()
    for format, shape in work:
        narrow = narrow_of(tuning, format, shape)
        for config in candidates(format, shape, narrow):
            tasks.add((format, shape.silu, narrow.split_k, narrow.block_k, config))
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        failed = [error for error in pool.imap_unordered(compile_one, [(tuning, *t) for t in tasks], 4) if error]
    for error in failed:
        print(f"does not compile: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - start:.0f} s", flush=True)


def compile_one(task: tuple[Tuning, str, bool, int, int, WideConfig]) -> str:
    """Run one configuration on a small weight with the specialisations of the large ones; return what went wrong."""
    tuning, format, silu, split, block_k, config = task
    try:
        shape = Shape("small", 1024, 2 * block_k * split, silu)
        used = dataclasses.replace(
            tuning,
            linear={key_of(format, shape): LinearConfig(64, block_k, split, 4, 3)},
            wide_linear={key_of(format, shape): config},
        )
        with torch.no_grad():
            for num_rows in ROWS:
                run_product(used, format, shape, num_rows)
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return (
            f"{format} {dataclasses.astuple(config)}: {(str(error).splitlines() or [type(error).__name__])[-1][:160]}"
        )
    return ""


def tune_shape(tuning: Tuning, format: str, shape: Shape, device: torch.device, deadline: float) -> WideConfig | None:
    """Print what a shape's candidates take, and return the best whose bits are right, if it beats having none."""
    weights = copies_of(Products(tuning, device), format, shape, device)
    x = torch.randn(300, shape.inputs, device=device).bfloat16()
    without = {m: product_seconds(tuned_with(tuning, format, shape, None), weights, x[:m], shape) for m in ROWS}
    show(format, shape, "without", without)
    if format == "dense":
        show(format, shape, "torch", {m: torch_seconds(weights, x[:m]) for m in ROWS})
    timed = []
    for config in candidates(format, shape, narrow_of(tuning, format, shape)):
        if time.monotonic() > deadline:
            break
        used = tuned_with(tuning, format, shape, config)
        try:
            timed.append((product_seconds(used, weights, x[:TARGET_ROWS], shape), config))
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {format} {shape.name} {dataclasses.astuple(config)}: {str(error)[:120]!r}")
    timed.sort(key=lambda pair: pair[0])
    rest = " ".join(f"{short(config)}={seconds * 1e6:.0f}" for seconds, config in timed[3:])
    winner, at_winner = None, without
    for _, config in timed[:3]:
        used = tuned_with(tuning, format, shape, config)
        times = {m: product_seconds(used, weights, x[:m], shape) for m in ROWS}
        wrong = bits_differ(used, weights[0], x, shape)
        show(format, shape, short(config), times, f" BITS DIFFER at {wrong}" if wrong else "")
        if not wrong and times[TARGET_ROWS] < at_winner[TARGET_ROWS]:
            winner, at_winner = config, times
    print(f"    others at {TARGET_ROWS}: {rest}", flush=True)
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


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
