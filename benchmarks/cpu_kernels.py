"""Time the CPU kernels' products on the shapes of SmolLM2-135M, beside torch's and the time memory alone would take.

    python benchmarks/cpu_kernels.py [--threads 2]

Each figure is the median of repeated calls over enough copies of a weight that none stays in cache between calls.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from slipstream.kernels.cpu.ops import CpuOps
from slipstream.quant.gguf_blocks import BLOCK_BYTES
from slipstream.quant.packed import PackedWeight

ROWS = (1, 2, 4, 8, 16)
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152))  # columns, outputs
FORMATS = ("q4_1", "q4_0", "q8_0", "w8a8_int8", "w4a8", "bfloat16", "float32")
COLD_BYTES = 150_000_000
REPEATS = 5
W = TypeVar("W")


def main() -> None:
    """Print one table per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    ops = CpuOps(threads)
    bandwidth = read_bandwidth()
    print(f"{ops.promise}; reading {bandwidth / 1e9:.1f} GB/s")
    for columns, outputs in SHAPES:
        print(f"\n{columns} x {outputs}: microseconds a call for {', '.join(f'M={m}' for m in ROWS)}; floor at M=1")
        for format in FORMATS:
            times, size = kernel_times(ops, format, outputs, columns)
            floor = size / bandwidth * 1e6
            print(f"  {format:10} " + " ".join(f"{t:8.1f}" for t in times) + f"   floor {floor:8.1f}")
        times, size = torch_times(outputs, columns)
        print(f"  {'torch f32':10} " + " ".join(f"{t:8.1f}" for t in times) + f"   floor {size / bandwidth * 1e6:8.1f}")


def read_bandwidth() -> float:
    """Return bytes per second of summing memory far larger than the caches."""
    memory = torch.ones(100_000_000)
    return memory.nbytes / min(timed(memory.sum) for _ in range(REPEATS))


def kernel_times(ops: CpuOps, format: str, outputs: int, columns: int) -> tuple[list[float], int]:
    """Return microseconds a call for each number of rows, and the weight's bytes."""
    if format in ("float32", "bfloat16"):
        weight = torch.randn(outputs, columns).to(getattr(torch, format))
        copies = [weight.clone() for _ in range(max(1, COLD_BYTES // weight.nbytes))]
        return row_times(ops.linear, copies, columns), weight.nbytes
    packed = random_weight(format, outputs, columns)
    prepared = [ops.prepare(packed) for _ in range(max(1, COLD_BYTES // packed.nbytes))]
    return row_times(ops.packed_linear, prepared, columns), packed.nbytes


def torch_times(outputs: int, columns: int) -> tuple[list[float], int]:
    """Return the same for torch's own float32 product."""
    weight = torch.randn(outputs, columns)
    copies = [weight.clone() for _ in range(max(1, COLD_BYTES // weight.nbytes))]
    return row_times(torch.nn.functional.linear, copies, columns), weight.nbytes


def row_times(product: Callable[[torch.Tensor, W], torch.Tensor], weights: list[W], columns: int) -> list[float]:
    """Return the median microseconds a call for each number of rows."""
    times = []
    for rows in ROWS:
        x = torch.randn(rows, columns)
        rounds = [timed(lambda x=x: [product(x, weight) for weight in weights]) for _ in range(REPEATS)]
        times.append(statistics.median(rounds) / len(weights) * 1e6)
    return times


def random_weight(format: str, outputs: int, columns: int) -> PackedWeight:
    """Return a weight of random codes; its values do not matter to the time."""
    if format in BLOCK_BYTES:
        codes = torch.randint(0, 60, (outputs, columns // 32 * BLOCK_BYTES[format]), dtype=torch.uint8)
        return PackedWeight(format, outputs, columns, codes)
    scale = {"scale": torch.rand(outputs)}
    if format == "w8a8_int8":
        return PackedWeight(
            format, outputs, columns, torch.randint(-127, 128, (outputs, columns)).to(torch.int8), scale
        )
    codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8)
    return PackedWeight(format, outputs, columns, codes, scale)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    with torch.inference_mode():
        main()
