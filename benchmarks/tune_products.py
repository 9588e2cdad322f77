"""Find the tiles of the Triton products and of attention on this GPU, and write them as a configuration file.

    PYTHONPATH=src python -m benchmarks.tune_products --out out/configs [--seconds 150] [--only ...]

Products are timed inside CUDA graphs that walk over copies of the weight too large for the L2 cache; percentages are
of the read bandwidth measured first. A configuration counts only if a row's bits are the same for 1 to 300 rows. One
that fails to compile or run is skipped, and its error printed.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.gemm.dispatch import Products, Weight
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.tuning import (
    AttentionConfig,
    LinearConfig,
    Tuning,
    architecture_of,
    parse_tuning,
    read_tuning,
)
from slipstream.quant.packed import PackedWeight

ROWS_CHECKED = (1, 4, 8, 40, 100, 160, 300)
ROWS_TIMED = (4, 40, 64, 128, 160, 256)
COLD_BYTES = 160 << 20
LAUNCHES = 20
ITEM_BYTES = {"dense": 2.0, "fp8": 1.0, "int8": 1.0, "w4a8": 0.5, "int4_per_channel": 0.5, "int4_group": 0.5}
STORED = {"fp8": "fp8_per_channel", "int8": "w8a8_int8"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of a model: name, outputs, inputs, and whether the SiLU is in its epilogue."""

    name: str
    outputs: int
    inputs: int
    silu: bool = False


LLAMA = (
    Shape("gate_up", 28672, 4096, silu=True),
    Shape("down", 4096, 14336),
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("lm_head", 128256, 4096),
    Shape("draft qkv", 6144, 8192),
    Shape("draft fc", 4096, 12288),
    Shape("draft lm_head", 32000, 4096),
)
SMOLLM = (
    Shape("135M gate_up", 3072, 576, silu=True),
    Shape("135M down", 576, 1536),
    Shape("135M qkv", 960, 576),
    Shape("135M o", 576, 576),
    Shape("135M lm_head", 49152, 576),
    Shape("135M draft qkv", 960, 1152),
    Shape("135M draft fc", 576, 1728),
    Shape("135M draft lm_head", 12288, 576),
)
WORK = [
    *(("dense", shape) for shape in LLAMA),
    *(("fp8", shape) for shape in LLAMA),
    *(("dense", shape) for shape in SMOLLM),
]
FURTHER = [(format, shape) for format in ("w4a8", "int8", "int4_per_channel", "int4_group") for shape in LLAMA[:4]]
WIDE = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 3)]


def starting_tuning(path: Path | None, device: torch.device) -> Tuning:
    """Return the configuration in a file, such as another sweep wrote, or the one that ships."""
    architecture = architecture_of(device)
    if path is None:
        return read_tuning(architecture)
    return parse_tuning(architecture, json.loads(path.read_text(encoding="utf-8")))


def write_tuning(tuning: Tuning, folder: Path) -> None:
    """Write a configuration file, with every field: what one sweep does not tune it leaves as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tuning.architecture}.json"
    data = {field: value for field, value in dataclasses.asdict(tuning).items() if field != "architecture"}
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    """Tune what is asked for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0, help="leave the shapes that are not reached by then")
    parser.add_argument(
        "--only",
        choices=("products", "further", "attention", "wide", "time"),
        help="further: 4-bit and INT8 weights; wide: passes of many rows; time: only time what is configured",
    )
    arguments = parser.parse_args()
    device = torch.device("cuda")
    deadline = time.monotonic() + arguments.seconds
    tuning = read_tuning(architecture_of(device))
    work = FURTHER if arguments.only == "further" else WORK
    if arguments.only in (None, "products", "further"):
        compile_all(tuning, work)
    bandwidth = read_bandwidth(device)
    print(f"{torch.cuda.get_device_name()} reads {bandwidth / 1e12:.3f} TB/s", flush=True)
    if arguments.only == "time":
        time_products(tuning, bandwidth, device)
        return
    if arguments.only in (None, "attention"):
        tuning = tune_attention(tuning, bandwidth, device)
    if arguments.only in (None, "products", "further"):
        tuning = tune_products(tuning, work, bandwidth, device, deadline)
    if arguments.only == "wide":
        for format in ("dense", "fp8"):
            tuning = tune_wide(tuning, format, device)
    write_tuning(tuning, arguments.out)


def candidates(format: str, shape: Shape) -> list[LinearConfig]:
    """Return tiles worth trying: enough programs to fill the device, stages within shared memory."""
    found = []
    for block_n in (32, 64, 128):
        tiles = -(-shape.outputs // block_n)
        for step_bytes in (128, 256, 512):
            block_k = int(step_bytes / ITEM_BYTES[format])
            if ITEM_BYTES[format] == 0.5 and step_bytes != 128:
                continue  # the block of nibbles is the weight's own
            for stages in (3, 5):
                fits = (block_n * step_bytes + 64 * block_k * min(ITEM_BYTES[format] * 2, 2)) * stages <= 220_000
                for split in (1, 2, 4, 8):
                    enough = 128 <= tiles * split <= 640 or (split == 1 and tiles > 100)
                    small = tiles < 128 and split == 1 and shape.inputs < 2048
                    if fits and (enough or small) and shape.inputs >= 2 * block_k * split:
                        found.append(LinearConfig(block_n, block_k, split, 4, stages))
    return found


def tuned_with(tuning: Tuning, format: str, shape: Shape, config: LinearConfig) -> Tuning:
    """Return a tuning in which a shape has this configuration."""
    return dataclasses.replace(tuning, linear={f"{format}:{shape.outputs}:{shape.inputs}": config})


def compile_all(tuning: Tuning, work: list[tuple[str, Shape]]) -> None:
    """Compile every candidate once, in as many processes as there are cores, into Triton's cache."""
    tasks = {(f, s.silu, s.inputs % (c.block_k * c.split_k) == 0, c) for f, s in work for c in candidates(f, s)}
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        failed = [error for error in pool.imap_unordered(compile_one, [(tuning, *t) for t in tasks], 4) if error]
    for error in failed:
        print(f"does not compile: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - start:.0f} s", flush=True)


def compile_one(task: tuple[Tuning, str, bool, bool, LinearConfig]) -> str:
    """Run one configuration on a small weight with the specialisations of the large ones; return what went wrong."""
    tuning, format, silu, even, config = task
    try:
        columns = 2 * config.block_k * config.split_k * 16 + (0 if even or ITEM_BYTES[format] < 1 else 16)
        shape = Shape("small", 2 * config.block_n * 16, columns, silu)
        with torch.no_grad():
            for num_rows in (4, 40, 160):
                run_product(tuned_with(tuning, format, shape, config), format, shape, num_rows)
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return f"{format} {config}: {str(error).splitlines()[-1][:160] if str(error) else type(error).__name__}"
    return ""


def run_product(tuning: Tuning, format: str, shape: Shape, num_rows: int) -> None:
    """Multiply once."""
    device = torch.device("cuda")
    products = Products(tuning, device)
    weight = random_weight(format, shape, device)
    weight = products.prepare(weight) if isinstance(weight, PackedWeight) else weight
    x = torch.randn(num_rows, shape.inputs, device=device).bfloat16()
    products.multiply(products.rows_for(weight, x), weight, epilogue(shape, num_rows, device))
    torch.cuda.synchronize()


def random_weight(format: str, shape: Shape, device: torch.device) -> Weight:
    """Return a weight of random codes, or of small normal numbers."""
    rows, columns = shape.outputs, shape.inputs
    if format == "dense":
        return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5).contiguous()
    scale = torch.full((rows,), 1e-3, device=device)
    if format == "fp8":
        codes = torch.randint(0, 0x78, (rows, columns), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    elif format == "int8":
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
        if format == "int4_group":
            scale = scale[:, None].expand(rows, columns // 32).bfloat16().contiguous()
    return PackedWeight(STORED.get(format, format), rows, columns, codes, {"scale": scale})


def epilogue(shape: Shape, num_rows: int, device: torch.device) -> Epilogue:
    """Return what a product of this shape ends with in a block."""
    if shape.silu:
        return Epilogue(silu=True)
    return Epilogue(residual_TN=torch.zeros(num_rows, shape.outputs, device=device, dtype=torch.bfloat16))


def graph_seconds(step: Callable[[int], object], launches: int, repeats: int = 5) -> float:
    """Return seconds a launch inside a CUDA graph of `launches` calls, the median of replays."""
    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            step(index)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def replayed_us(step: Callable[[], Tensor], replays: int, pool: tuple[int, int] | None = None) -> tuple[float, Tensor]:
    """Return microseconds of a step as a graph, the median of replays one after another, and what it gives."""
    out = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3, out


def tune_products(
    tuning: Tuning, work: list[tuple[str, Shape]], bandwidth: float, device: torch.device, deadline: float
) -> Tuning:
    """Return the tuning with the best configuration of each shape, and of wide tiles per format."""
    best: dict[str, LinearConfig] = dict(tuning.linear)
    for format, shape in work:
        if time.monotonic() > deadline:
            print(f"out of time before {format} {shape.name}")
            continue
        found = tune_shape(tuning, format, shape, bandwidth, device)
        if found is not None:
            best[f"{format}:{shape.outputs}:{shape.inputs}"] = found
    return dataclasses.replace(tuning, linear=best)


def time_products(tuning: Tuning, bandwidth: float, device: torch.device) -> None:
    """Print what the configured products take over passes of 4 to 256 rows, and their share of the bandwidth at 4."""
    for format, shape in WORK[: 2 * len(LLAMA)]:
        weights = copies_of(Products(tuning, device), format, shape, device)
        x = torch.randn(max(ROWS_TIMED), shape.inputs, device=device).bfloat16()
        times = {m: product_seconds(tuning, weights, x[:m], shape) for m in ROWS_TIMED}
        share = weights[0].nbytes / times[ROWS_TIMED[0]] / bandwidth
        text = " ".join(f"M={m} {seconds * 1e6:.1f}" for m, seconds in times.items())
        print(f"{format:9} {shape.name:18} {text} us; {100 * share:.1f}% at M={ROWS_TIMED[0]}", flush=True)


def copies_of(products: Products, format: str, shape: Shape, device: torch.device) -> list[Weight]:
    """Return enough copies of a prepared weight that none stays in the cache."""
    first = random_weight(format, shape, device)
    size = first.nbytes
    weights = [first, *(random_weight(format, shape, device) for _ in range(min(COLD_BYTES // size, 200)))]
    return [products.prepare(w) if isinstance(w, PackedWeight) else w for w in weights]


def tune_shape(
    tuning: Tuning, format: str, shape: Shape, bandwidth: float, device: torch.device
) -> LinearConfig | None:
    """Time the candidates at 4 rows, the best few also at 40, and return the best whose bits are right."""
    weights = copies_of(Products(tuning, device), format, shape, device)
    x = torch.randn(max(ROWS_CHECKED), shape.inputs, device=device).bfloat16()
    timed = []
    for config in candidates(format, shape):
        try:
            timed.append((product_seconds(tuned_with(tuning, format, shape, config), weights, x[:4], shape), config))
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped {format} {shape.name} {config}: {str(error)[:120]!r}")
    timed.sort(key=lambda pair: pair[0])
    ranked = []
    for seconds, config in timed[:5]:
        used = tuned_with(tuning, format, shape, config)
        wrong = bits_differ(used, weights[0], x, shape)
        at_40 = product_seconds(used, weights, x[:40], shape)
        share = weights[0].nbytes / seconds / bandwidth
        say = f"BITS DIFFER at {wrong}" if wrong else ""
        print(f"  {format:9} {shape.name:18} {tuple(dataclasses.astuple(config))!s:24} M=4 {seconds * 1e6:7.1f} us "
              f"{100 * share:5.1f}%  M=40 {at_40 * 1e6:7.1f} us {say}", flush=True)  # fmt: skip
        if not wrong:
            ranked.append((seconds + 0.3 * at_40, config))
    if not ranked:
        return None
    winner = min(ranked, key=lambda pair: pair[0])[1]
    plain = dataclasses.replace(tuned_with(tuning, format, shape, winner), dependent_launch=False)
    rest = {m: product_seconds(tuned_with(tuning, format, shape, winner), weights, x[:m], shape) for m in (1, 160)}
    say = ""
    if format == "dense" and shape in LLAMA:
        say = f"; M=4 without dependent launch {product_seconds(plain, weights, x[:4], shape) * 1e6:.1f} us"
    print(f"{format:9} {shape.name:18} best {dataclasses.astuple(winner)}: M=1 {rest[1] * 1e6:.1f} M=160 "
          f"{rest[160] * 1e6:.1f} us{say}", flush=True)  # fmt: skip
    return winner


def product_seconds(tuning: Tuning, weights: list[Weight], x: Tensor, shape: Shape) -> float:
    """Return seconds a product takes; the rows are turned into codes beforehand."""
    products = Products(tuning, x.device)
    rows, ends = products.rows_for(weights[0], x), epilogue(shape, x.shape[0], x.device)
    return graph_seconds(
        lambda i: products.multiply(rows, weights[i % len(weights)], ends), max(LAUNCHES, len(weights))
    )


def bits_differ(tuning: Tuning, weight: Weight, x: Tensor, shape: Shape) -> list[int]:
    """Return the numbers of rows at which the rows they share with the largest pass have other bits."""
    products = Products(tuning, x.device)
    outs = {
        m: products.multiply(products.rows_for(weight, x[:m]), weight, epilogue(shape, m, x.device))
        for m in ROWS_CHECKED
    }
    whole = outs[max(ROWS_CHECKED)]
    return [m for m, out in outs.items() if not torch.equal(out, whole[:m])]


def tune_wide(tuning: Tuning, format: str, device: torch.device) -> Tuning:
    """Choose the tiles of passes of many rows by the four large products of a block, at 160 and 2048 rows."""
    results = []
    for block_n, block_k, warps, stages in WIDE:
        config = LinearConfig(block_n, int(block_k * 2 / ITEM_BYTES[format]), 1, warps, stages)
        used = dataclasses.replace(tuning, wide={**tuning.wide, format: config})
        try:
            total, text = 0.0, []
            for shape in LLAMA[:4]:
                weights = copies_of(Products(used, device), format, shape, device)[:4]
                x = torch.randn(2048, shape.inputs, device=device).bfloat16()
                at = {m: product_seconds(used, weights, x[:m], shape) for m in (160, 2048)}
                wrong = bits_differ(used, weights[0], x[: max(ROWS_CHECKED)], shape)
                total += at[160] * 8 + at[2048] + (1e9 if wrong else 0)
                teraflops = 2 * 2048 * shape.outputs * shape.inputs / at[2048] / 1e12
                text.append(
                    f"{shape.name} {at[160] * 1e6:.0f} us, {teraflops:.0f} TFLOP/s{' BITS DIFFER' if wrong else ''}"
                )
            print(f"wide {format} {dataclasses.astuple(config)}: {'; '.join(text)}", flush=True)
            results.append((total, config))
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped wide {format} {config}: {str(error)[:120]!r}")
    best = min(results, key=lambda pair: pair[0], default=(1e9, None))
    if best[1] is None or best[0] > 1e8:
        print(f"no wide tiles keep the bits of {format}: the narrow ones are used for all passes")
        return dataclasses.replace(tuning, wide={f: c for f, c in tuning.wide.items() if f != format})
    return dataclasses.replace(tuning, wide={**tuning.wide, format: best[1]})


def tune_attention(tuning: Tuning, bandwidth: float, device: torch.device) -> Tuning:
    """Choose the tiles of attention by time over batch 1, 8 and 40, contexts of 1k and 10k, and 1 and 4 queries."""
    shipped = tuning.attention
    tried = [
        dataclasses.replace(shipped, split=split, block=block, num_warps=warps, num_stages=stages)
        for split, block in ((128, 32), (128, 64), (256, 32), (256, 64), (256, 128), (512, 64))
        for warps, stages in ((2, 4), (4, 3), (4, 5))
    ]
    ranked = []
    cases = [(b, c, q) for b, c in ((1, 1024), (8, 1024), (40, 1024), (1, 10240), (8, 10240)) for q in (1, 4)]
    for config in tried:
        try:
            times = [attention_seconds(tuning, config, case, device) for case in cases]
        except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
            print(f"  skipped attention {config}: {str(error)[:120]!r}")
            continue
        shares = [kv_bytes(case) / t / bandwidth for case, t in zip(cases, times, strict=True)]
        fields = (config.split, config.block, config.num_warps, config.num_stages)
        print(f"attention {fields!s:18} " + " ".join(
            f"{b}x{c // 1024}k/{q}: {t * 1e6:.1f} us {100 * s:.0f}%"
            for (b, c, q), t, s in zip(cases, times, shares, strict=True)), flush=True)  # fmt: skip
        # What a layer spends on weights is about 100 us: time counts, not the share of a tiny read.
        ranked.append((sum(t / (100e-6 + kv_bytes(c) / bandwidth) for c, t in zip(cases, times, strict=True)), config))
    best = min(ranked, key=lambda pair: pair[0])[1]
    print(f"attention best {best}", flush=True)
    return dataclasses.replace(tuning, attention=best)


def kv_bytes(case: tuple[int, int, int]) -> int:
    """Return the bytes of keys and values a pass must read in one layer: 8 heads of 128 in bfloat16."""
    batch, context, _ = case
    return batch * context * 8 * 128 * 2 * 2


def attention_seconds(
    tuning: Tuning, config: AttentionConfig, case: tuple[int, int, int], device: torch.device
) -> float:
    """Return seconds of attention in one layer; layers follow one another as in a model, so the cache is cold."""
    batch, context, queries = case
    page_size, pages = 16, -(-(context + queries) // 16)
    num_layers = max(1, min(16, (2 << 30) // kv_bytes(case)))
    layers = [
        KvLayer(*(torch.randn(batch * pages * page_size, 8, 128, device=device, dtype=torch.bfloat16) for _ in "kv"))
        for _ in range(num_layers)
    ]
    own = torch.arange(context - queries, context, device=device).repeat(batch)
    described = AttentionBatch(
        query_starts_R1=torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=device),
        kv_lens_R=torch.full((batch,), context, dtype=torch.int32, device=device),
        page_table_RP=torch.randperm(batch * pages, device=device).int().view(batch, pages),
        kv_index_T=own,
        ancestors_T=torch.full_like(own, -1),
        page_size=page_size,
        max_queries=queries,
        max_keys=context,
    )
    q = torch.randn(batch * queries, 32, 128, device=device, dtype=torch.bfloat16)
    counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    launch = AttentionLaunch(config, counters, tuning.dependent_launch)
    return graph_seconds(
        lambda i: attention(q, layers[i % num_layers], described, 128**-0.5, None, launch), max(LAUNCHES, num_layers)
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
