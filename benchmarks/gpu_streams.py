"""Choose how products of 40 and 160 rows wait and stream on this GPU: each beside the vendor's library, then layers.

    PYTHONPATH=src python benchmarks/gpu_streams.py --out FOLDER [--seconds 100] [--formats fp8,dense] [--start FILE]

The products of a Llama-8B layer and both heads are timed as they are configured, by torch, and with each candidate; a
candidate counts only if its bits are those of today. The fastest of each then take their places in whole layers with
cold weights (40 requests of 1,152 keys, one node each and four), stretches added by the product or later, and stay if
the layer is faster. Candidates are compiled first, in as many processes as there are cores. What fails is said and
skipped. FOLDER gets `sm_90.json`, for kernels/triton/configs, as soon as there is anything to write.
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

from gpu_layer import pack_layers
from gpu_rows import Layers, said
from gpu_rows_tried import Case
from gpu_streams_tried import FEW, MANY, PASSES, SHAPES, Product, candidates, with_tiles
from gpu_tune import Shape, copies_of, graph_seconds, random_weight, starting_tuning, write_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.linear import Epilogue, Rows
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.products import Products, Weight
from slipstream.kernels.triton.stretches import add_stretches
from slipstream.kernels.triton.tuning import LinearConfig, Tuning, WideConfig
from slipstream.quant.packed import PackedWeight

LAUNCHES, KEPT, LAYERS, CONTEXT = 12, 3, 6, 1152
Task = tuple[Tuning, Product, WideConfig]


def end_of(shape: Shape, num_rows: int, device: torch.device) -> Epilogue:
    """Return what a product ends with in a layer."""
    residual = torch.zeros(num_rows, shape.outputs, device=device, dtype=torch.bfloat16)
    return Epilogue(silu=shape.silu, residual_TN=residual if shape.name in ("o", "down") else None)


def multiplied(products: Products, rows: Rows, weight: Weight, end: Epilogue, zeros_TN: Tensor | None) -> Tensor:
    """Multiply; with zeros, stretches that are left are added to them by a kernel of their own."""
    sums = None if zeros_TN is None else products.stretches(rows, weight)
    if sums is None or zeros_TN is None:
        return products.multiply(rows, weight, end)
    return add_stretches(sums, zeros_TN, None, products.dependent, products.add_warps)[0]


def compile_one(task: Task) -> str:
    """Run tiles on a small weight with the specialisations of the large ones; return what went wrong."""
    tuning, product, config = task
    order = product.order(tuning)
    small = Shape(product.shape.name, 1024, 2 * order.block_k * order.split_k, product.shape.silu)
    own = dataclasses.replace(product, shape=small)
    try:
        with torch.no_grad():
            device = torch.device("cuda")
            used = dataclasses.replace(
                with_tiles(tuning, own, config),
                linear={own.key: LinearConfig(64, order.block_k, order.split_k, 4, 3)},
            )
            products, weight = Products(used, device), random_weight(product.format, small, device)
            weight = products.prepare(weight) if isinstance(weight, PackedWeight) else weight
            rows = products.rows_for(weight, torch.randn(product.rows, small.inputs, device=device).bfloat16())
            zeros = torch.zeros(product.rows, small.outputs, device=device, dtype=torch.bfloat16)
            multiplied(products, rows, weight, end_of(small, product.rows, device), zeros if config.later else None)
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return f"{product} {short(config)}: {said(error)}"
    return ""


def compile_layer(task: tuple[Tuning, str, Case]) -> str:
    """Run a layer as it is configured, and with every stretch added later; return what went wrong."""
    tuning, format, case = task
    try:
        with torch.no_grad():
            layers = layers_of(format)(1, 64, 40, torch.device("cuda"))
            for later in (None, True):
                wide = {
                    name: config if later is None else dataclasses.replace(config, later=later)
                    for name, config in tuning.wide_linear.items()
                }
                layers.pass_of(dataclasses.replace(tuning, wide_linear=wide), case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - what does not run here is said again where it is timed
        return f"layer {format} {case}: {said(error)}"
    return ""


def compile_all(tasks: list[Task], layers: list[tuple[Tuning, str, Case]], pool: Pool) -> None:
    """Compile what will be run, in the pool's processes."""
    started = time.monotonic()
    whole = pool.map_async(compile_layer, layers, 1)
    failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    failed += [error for error in whole.get() if error]
    for error in failed:
        print(f"does not run: {error}")
    total = len(tasks) + len(layers)
    print(f"compiled {total - len(failed)} of {total} in {time.monotonic() - started:.0f} s", flush=True)


def still_running(tasks: list[Task], pool: Pool, seconds: float = 40.0) -> set[tuple[Product, WideConfig]]:
    """Return the streamed candidates that ran to their end; if one did not, none: its warps wait for each other."""
    started = time.monotonic()
    pending = [(task, pool.apply_async(compile_one, (task,))) for task in tasks]
    ran, hung = set(), False
    for (_, product, config), result in pending:
        try:
            error = result.get(timeout=max(seconds - (time.monotonic() - started), 0.1))
        except multiprocessing.TimeoutError:
            error, hung = f"{product} {short(config)} did not end", True
        if error:
            print(f"does not run: {error}")
        else:
            ran.add((product, config))
    print(f"streamed: {len(ran)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)
    return set() if hung else ran


def short(config: WideConfig | None) -> str:
    """Return tiles in a word."""
    if config is None:
        return "narrow tiles"
    on = [name for name in ("stream", "at_once", "together", "later") if getattr(config, name)]
    tiles = f"{'2x' if config.pair else ''}{config.block_n}x{config.block_k}/w{config.num_warps}s{config.num_stages}"
    return "-".join([tiles, *(() if config.tma else ("ptr",)), *on])


@dataclasses.dataclass
class Found:
    """What a product took: microseconds today, and those of candidates whose bits are right, the fastest first."""

    today: float
    tried: list[tuple[float, WideConfig]]

    @property
    def better(self) -> WideConfig | None:
        """The fastest, if it beats today's tiles by more than the noise."""
        return self.tried[0][1] if self.tried and self.tried[0][0] < 0.997 * self.today else None


def time_product(tuning: Tuning, product: Product, tried: list[WideConfig], device: torch.device) -> Found:
    """Print what a product takes today and with each candidate, which must have today's bits."""
    weights = copies_of(Products(tuning, device), product.format, product.shape, device)
    x = torch.randn(product.rows, product.shape.inputs, device=device).bfloat16()
    ends, launches = end_of(product.shape, product.rows, device), max(LAUNCHES, len(weights))
    zeros = torch.zeros(product.rows, product.shape.outputs, device=device, dtype=torch.bfloat16)

    def timed(used: Tuning, *, later: bool) -> tuple[float, Tensor]:
        products, extra = Products(used, device), zeros if later else None
        rows = products.rows_for(weights[0], x)
        out = multiplied(products, rows, weights[0], ends, extra)
        seconds = graph_seconds(lambda i: multiplied(products, rows, weights[i % len(weights)], ends, extra), launches)
        return seconds * 1e6, out

    before, expected = timed(tuning, later=False)
    products = Products(tuning, device)
    alone = products.multiply(products.rows_for(weights[0], x[:8]), weights[0], end_of(product.shape, 8, device))
    say = "" if torch.equal(alone, expected[:8]) else "; ROWS ALONE HAVE OTHER BITS"
    print(f"{product}: today {before:6.1f} us{say}", flush=True)
    found = []
    for config in tried:
        try:
            us, out = timed(with_tiles(tuning, product, config), later=config.later)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"  skipped {short(config)}: {said(error)}", flush=True)
            continue
        same = torch.equal(out, expected)
        print(f"  {short(config):40} {us:6.1f} us {100 * us / before:5.1f}%{'' if same else ' OTHER BITS'}", flush=True)
        if same:
            found.append((us, config))
    return Found(before, sorted(found, key=lambda pair: pair[0]))


def time_library(products: list[Product]) -> dict[str, str]:
    """Return what torch's own products take, without a SiLU or a residual; in a process of its own.

    A library that chooses an algorithm while a graph is captured leaves a process that can capture no more.
    """
    device, found = torch.device("cuda"), {}
    for product in products:
        own = Products(starting_tuning(None, device), device)
        try:
            with torch.no_grad():
                weights = copies_of(own, product.format, product.shape, device)
                x = torch.randn(product.rows, product.shape.inputs, device=device).bfloat16()
                found[str(product)] = library(weights, x, own)
        except Exception as error:  # noqa: BLE001 - a library that cannot is only worth a word
            found[str(product)] = f"failed: {said(error)}"
    return found


def library(weights: list[Weight], x: Tensor, products: Products) -> str:
    """Return what torch's product takes; of FP8 also with sums that the matrix units keep to the end."""
    first, launches = weights[0], max(LAUNCHES, len(weights))
    if not isinstance(first, PackedWeight):
        seconds = graph_seconds(lambda i: torch.nn.functional.linear(x, weights[i % len(weights)]), launches)
        return f"{seconds * 1e6:.1f} us"
    rows, found = products.rows_for(first, x), []
    for fast in (False, True):

        def scaled(index: int, fast: bool = fast) -> Tensor:
            weight = weights[index % len(weights)]
            return torch._scaled_mm(
                rows.values_TK, weight.codes.t(), rows.scale_T[:, None], weight.scales["scale"][None, :],
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip

        found.append(f"{graph_seconds(scaled, launches) * 1e6:.1f} us{' (fast sums)' if fast else ''}")
    return ", ".join(found)


class PackedLayers(Layers):
    """Layers whose weights are FP8."""

    def __init__(self, num_layers: int, context: int, most_requests: int, device: torch.device) -> None:
        super().__init__(num_layers, context, most_requests, device)
        pack_layers(self.target, TritonOps(device))


def layers_of(format: str) -> type[Layers]:
    """Return layers with weights of a format."""
    return PackedLayers if format == "fp8" else Layers


def tune_layers(
    format: str, tuning: Tuning, kept: dict[Product, Found], device: torch.device, deadline: float
) -> tuple[Tuning, str]:
    """Put the fastest tiles of each product into whole layers; return the best tuning and a line of the table."""
    layers = layers_of(format)(LAYERS, CONTEXT, 40, device)
    best, table = tuning, []
    for num_rows, case in PASSES.items():
        first, expected = layers.us(tuning, case)
        score = first
        print(f"layer {format} {num_rows} rows as configured: {first:.1f} us", flush=True)
        for product, config in layer_candidates(tuning, kept, num_rows):
            if time.monotonic() > deadline:
                continue
            try:
                changed = with_tiles(best, product, config)
                us, out = layers.us(changed, case)
            except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
                print(f"  skipped {product} {short(config)}: {said(error)}", flush=True)
                continue
            same = torch.equal(out, expected)
            print(f"  {product!s:28} {short(config):44} {us:6.1f} us{'' if same else ' OTHER BITS'}", flush=True)
            if same and us < score * 0.997:
                best, score = changed, us
        last, out = layers.us(best, case)
        again, _ = layers.us(tuning, case)
        same = torch.equal(out, expected)
        table.append(f"{num_rows} rows {first:.1f} (again {again:.1f}) -> {last:.1f} us{'' if same else ' OTHER BITS'}")
    return best, f"layer {format}: " + "; ".join(table)


def layer_candidates(tuning: Tuning, kept: dict[Product, Found], num_rows: int) -> Iterator[tuple[Product, WideConfig]]:
    """Yield the fastest tiles of each product of a layer, stretches added at once and, where there are any, later."""
    for product, found in kept.items():
        if product.rows == num_rows and "head" not in product.shape.name:
            plain = [config for _, config in found.tried if not config.stream]
            streamed = [config for _, config in found.tried if config.stream]
            for config in [*plain[:KEPT], *streamed[: KEPT - 1]]:
                yield product, config
                if product.order(tuning).split_k > 1 and not config.later:
                    yield product, dataclasses.replace(config, later=True)


def tune_format(
    format: str, tuning: Tuning, tried: dict[Product, list[WideConfig]], device: torch.device, deadline: float
) -> tuple[Tuning, dict[Product, Found], str]:
    """Time products, then layers; return the best tuning, what products took, and a line of the table."""
    kept: dict[Product, Found] = {}
    last_product = time.monotonic() + 0.65 * (deadline - time.monotonic())
    for product, configs in tried.items():
        if time.monotonic() > last_product:
            print(f"out of time before {product}", flush=True)
            continue
        try:
            kept[product] = time_product(tuning, product, configs, device)
        except Exception as error:  # noqa: BLE001 - one failing product must not end the run
            print(f"skipped {product}: {said(error)}", flush=True)
        torch.cuda.empty_cache()
    best = tuning
    for product, found in kept.items():
        if "head" in product.shape.name and found.better is not None:
            best = with_tiles(best, product, found.better)
    try:
        best, line = tune_layers(format, best, kept, device, deadline)
    except Exception as error:  # noqa: BLE001 - what was found is worth more than the rest
        line = f"no layers of {format}: {said(error)}"
    torch.cuda.empty_cache()
    return best, kept, line


def main() -> None:
    """Try what is asked for, and write the configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95.0, help="try nothing new after so long")
    parser.add_argument("--formats", default="fp8,dense")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    started = time.monotonic()
    device, formats = torch.device("cuda"), arguments.formats.split(",")
    tuning = best = starting_tuning(arguments.start, device)
    every = [Product(f, shape, rows) for f in formats for rows in (MANY, FEW) for shape in SHAPES]
    tried = {product: candidates(tuning, product) for product in every}
    spawn, cores = multiprocessing.get_context("spawn"), min(multiprocessing.cpu_count(), 14)
    tasks = [(tuning, product, config) for product, configs in tried.items() for config in configs]
    with spawn.Pool(cores) as pool:
        plain = [task for task in tasks if not task[2].stream]
        split = [task for task in plain if task[1].order(tuning).split_k > 1]
        plain += [(t, p, dataclasses.replace(c, later=True)) for t, p, c in split]
        compile_all(plain, [(tuning, format, case) for format in formats for case in PASSES.values()], pool)
    with spawn.Pool(cores) as pool:
        streamed = still_running([task for task in tasks if task[2].stream], pool)
    for product, configs in tried.items():
        tried[product] = [c for c in configs if not c.stream or (product, c) in streamed]
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    took: dict[Product, Found] = {}
    lines = []
    for number, format in enumerate(formats):
        share = (arguments.seconds - (time.monotonic() - started)) / (len(formats) - number)
        own = {product: configs for product, configs in tried.items() if product.format == format}
        best, found, line = tune_format(format, best, own, device, time.monotonic() + share)
        took.update(found)
        lines.append(line)
        write_tuning(best, arguments.out)
    with spawn.Pool(1) as pool:
        try:
            by_torch = pool.apply_async(time_library, (every,)).get(timeout=30)
        except Exception as error:  # noqa: BLE001 - the table is worth more than this column
            by_torch = {}
            print(f"no library: {said(error)}")
    show(tuning, best, took, by_torch)
    print("\n".join(lines), f"\n{time.monotonic() - started:.0f} s", flush=True)


def show(before: Tuning, after: Tuning, took: dict[Product, Found], by_torch: dict[str, str]) -> None:
    """Print the table of products, and what to change."""
    for product, found in took.items():
        us, config = found.tried[0] if found.tried else (float("inf"), None)
        say = f"{found.today:7.1f} us today, {us:7.1f} {short(config):32} torch {by_torch.get(str(product), '-')}"
        print(f"{product!s:30} {say}")
    print("changed:")
    for name, config in after.wide_linear.items():
        if config != before.wide_linear.get(name):
            print(f"  {name:24} {short(before.wide_linear.get(name)):28} -> {short(config)}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
