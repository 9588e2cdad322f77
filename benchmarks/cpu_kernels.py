"""Time the CPU kernels' products and attention on the shapes of small models, beside torch's and memory's own time.

    python benchmarks/cpu_kernels.py [--threads 2] [--only products|attention] [--formats q4_1,q4_k,q6_k]

Each figure is the median of repeated calls over enough copies of a weight that none stays in cache between calls.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.quant.gguf_blocks import BLOCK_FORMATS
from slipstream.quant.packed import PackedWeight

ROWS = (1, 2, 4, 8, 16)
# Columns and outputs of SmolLM2-135M's layers, and two of Llama-3.2-1B's, whose widths the K formats can have.
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152), (2048, 2048), (2048, 8192))
FORMATS = ("q4_1", "q4_0", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k", "w8a8_int8", "w4a8", "bfloat16", "float32")
KEYS = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION = ((1, 1, 200), (1, 4, 200), (1, 4, 1000), (8, 1, 200), (8, 4, 200))  # requests, rows, tokens before
LAYERS = 30
COLD_BYTES = 150_000_000
REPEATS = 5
W = TypeVar("W")


def main() -> None:
    """Print a table for attention and one per shape of a product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("products", "attention"))
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the products, with commas")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ops = CpuOps(args.threads)
    bandwidth = read_bandwidth()
    print(f"{ops.promise}; reading {bandwidth / 1e9:.1f} GB/s")
    if args.only != "products":
        print_attention(ops)
    if args.only != "attention":
        print_products(ops, bandwidth, args.formats.split(","))


def print_attention(ops: CpuOps) -> None:
    """Print attention's microseconds a layer by the type of keys and values, the types taking turns."""
    print("\nattention of 9 heads over 3, of 64 values: microseconds a layer")
    for requests, rows, context in ATTENTION:
        caches = {dtype: [kv_layer(requests * (context + rows), dtype) for _ in range(LAYERS)] for dtype in KEYS}
        q = torch.randn(requests * rows, 9, 64)
        batch = attention_batch(requests, rows, context)
        rounds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in KEYS}
        for _ in range(10 * REPEATS):
            for dtype, layers in caches.items():
                rounds[dtype].append(timed(lambda case=(q, layers, batch): attend(ops, *case)))
        times = (f"{str(dtype)[6:]} {statistics.median(rounds[dtype]) / LAYERS * 1e6:7.1f}" for dtype in KEYS)
        print(f"  {requests} requests of {rows} rows after {context} tokens: " + ", ".join(times))


def attend(ops: CpuOps, q: torch.Tensor, layers: list[KvLayer], batch: AttentionBatch) -> None:
    """Attend over every layer once."""
    for layer in layers:
        ops.attention(q, layer, batch, 0.125, None)


def kv_layer(slots: int, dtype: torch.dtype) -> KvLayer:
    """Return random keys and values."""
    return KvLayer(torch.randn(slots, 3, 64).to(dtype), torch.randn(slots, 3, 64).to(dtype))


def attention_batch(requests: int, rows: int, context: int) -> AttentionBatch:
    """Return requests of as many keys, each with its last rows as queries."""
    keys = context + rows
    return AttentionBatch(
        torch.arange(requests + 1, dtype=torch.int32) * rows,
        torch.full((requests,), keys, dtype=torch.int32),
        torch.arange(requests * keys, dtype=torch.int32).view(requests, keys),
        torch.arange(context, keys).repeat(requests),
        torch.full((requests * rows,), -1),
        1,
    )


def print_products(ops: CpuOps, bandwidth: float, formats: Sequence[str]) -> None:
    """Print one table per shape; a format that cannot have so many columns is left out."""
    for columns, outputs in SHAPES:
        print(f"\n{columns} x {outputs}: microseconds a call for {', '.join(f'M={m}' for m in ROWS)}; floor at M=1")
        for format in formats:
            if format in BLOCK_FORMATS and columns % BLOCK_FORMATS[format].columns:
                continue
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
    if format in BLOCK_FORMATS:
        codes = torch.randint(0, 60, (outputs, BLOCK_FORMATS[format].row_bytes(columns)), dtype=torch.uint8)
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
