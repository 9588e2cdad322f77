"""Check and time on this GPU what is new between the products of 40 and 160 rows, and tiles for the draft's products.

    PYTHONPATH=src python benchmarks/gpu_small8.py --out FOLDER [--seconds 64]

First every streamed or joined product that is configured is multiplied over rows of every width a token tile has, and
must give the bits of eight rows alone. Then the kernels that add stretches, rotate, and find the best
entry are timed as they were and as they are, alone (what they read lies in the shared cache, as after a product) and in
whole layers, where products also let the kernel after them start late (`spread`). Then tiles of the draft's own
products are tried as `gpu_wide7.py` does. FOLDER gets `sm_90.json` with what is faster. What fails is said and skipped.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpu_small8_before as before
from gpu_rows import Layers, said
from gpu_rows_tried import with_wide
from gpu_tune import LLAMA, Shape, graph_seconds, random_weight, starting_tuning, write_tuning
from gpu_wide7 import Task, compile_one, layers_of, short, time_product
from gpu_wide7_tried import FEW, MANY, PASSES, Product, candidates, with_tiles
from slipstream.kernels.ops import KvLayer, RowSampling
from slipstream.kernels.triton import norm_rope, sample, stretches
from slipstream.kernels.triton.linear import Epilogue
from slipstream.kernels.triton.norm_rope import Norm, Rope, RopeWrite, Stretches
from slipstream.kernels.triton.products import Products, Weight
from slipstream.kernels.triton.tuning import LinearConfig, Tuning, WideConfig
from slipstream.quant.packed import PackedWeight

WIDTHS = {True: (17, 33, 40, 64), False: (65, 100, 128, 160, 192, 256)}
DRAFT = [shape for shape in LLAMA if shape.name in ("draft qkv", "draft fc")]
HEADS, GROUPS, WIDTH, HIDDEN, VOCABULARY, DRAFTED = 32, 8, 128, 4096, 128256, 32000
LAUNCHES, LAYERS, CONTEXT, WARPS, DEPENDENT = 40, 6, 1152, (4, 16), True
Named = tuple[str, Callable[[], tuple[Tensor, ...]]]
Width = tuple[Tuning, str, WideConfig]


def alone(products: Products, weight: Weight, x: Tensor, silu: bool) -> Tensor:
    """Return the product of a few rows."""
    return products.multiply(products.rows_for(weight, x), weight, Epilogue(silu=silu))


def check_widths(task: Width) -> str:
    """Multiply rows of every width by a small weight with a configuration's tiles; say which bits are others."""
    tuning, name, config = task
    key, _, few = name.partition("/")
    format, outputs, inputs = key.split(":")
    order = tuning.linear_config(format, int(outputs), int(inputs), 2 if format == "dense" else 1)
    silu = outputs == "28672"
    shape = Shape("small", 1024, 8 * order.block_k * order.split_k, silu)
    own = f"{format}:{shape.outputs}:{shape.inputs}"
    device, wrong = torch.device("cuda"), []
    linear = {own: LinearConfig(64, order.block_k, order.split_k, 4, 3)}
    narrow = Products(dataclasses.replace(tuning, linear=linear, wide_linear={}), device)
    new = Products(
        dataclasses.replace(tuning, linear=linear, wide_linear={f"{own}/64" if few else own: config}), device
    )
    try:
        with torch.no_grad():
            weight = random_weight(format, shape, device)
            weight = narrow.prepare(weight) if isinstance(weight, PackedWeight) else weight
            x = torch.randn(256, shape.inputs, device=device).bfloat16()
            expected = torch.cat([alone(narrow, weight, x[at : at + 8], silu) for at in range(0, 256, 8)])
            for count in WIDTHS[bool(few)]:
                rows = new.rows_for(weight, x[:count])
                sums = new.stretches(rows, weight) if config.later else None
                if sums is None:
                    wrong += [f"{count} rows, which leave no stretches"] if config.later else []
                    out = new.multiply(rows, weight, Epilogue(silu=silu))
                else:
                    out = stretches.add_stretches(sums, torch.zeros_like(expected[:count]), None, new.dependent)[0]
                wrong += [] if torch.equal(out, expected[:count]) else [f"{count} rows"]
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is worth a line
        return f"{name} {short(config)}: {said(error)}"
    return f"{name} {short(config)}: OTHER BITS over {', '.join(wrong)}" if wrong else ""


class Work:
    """Tasks of one kind in the pool's processes, which begin at once."""

    def __init__(self, function: Callable[[Any], str], tasks: Sequence[Any], pool: Pool) -> None:
        self._name, self._tasks = function.__name__, tasks
        self._pending = [pool.apply_async(function, (task,)) for task in tasks]

    def results(self, deadline: float) -> list[bool]:
        """Return which tasks went well; print what went wrong, or did not end."""
        fine = []
        for task, result in zip(self._tasks, self._pending, strict=True):
            try:
                error = result.get(timeout=max(deadline - time.monotonic(), 0.1))
            except Exception as failure:  # noqa: BLE001 - a process that died or hangs is worth a line
                error = f"{task[1:]} did not end: {said(failure)}"
            if error:
                print(f"  {error}", flush=True)
            fine.append(not error)
        print(f"{self._name}: {sum(fine)} of {len(fine)} fine", flush=True)
        return fine


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Put the kernels that were in the places of those that are."""
    places: list[tuple[Any, str, Any]] = [
        (norm_rope, "_rope_kernel", before.rope_kernel),
        (stretches, "_add_kernel", before.add_kernel),
        (sample, "_MANY_BLOCKS", 1 << 60),
    ]
    found = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, found, strict=True):
            setattr(module, name, value)


@contextlib.contextmanager
def with_warps(num_warps: int) -> Iterator[None]:
    """Let rows whose stretches are added have so many warps."""
    found, stretches._WARPS = stretches._WARPS, num_warps
    try:
        yield
    finally:
        stretches._WARPS = found


def small_kernels(num_rows: int, device: torch.device) -> Iterator[Named]:
    """Yield the kernels at work on so many rows; each returns what it computed."""
    norm = Norm(torch.randn(HIDDEN, device=device).bfloat16(), 1e-5)
    residual = torch.randn(num_rows, HIDDEN, device=device).bfloat16()
    for splits in (2, 4):
        sums = Stretches(torch.randn(splits, num_rows, HIDDEN, device=device))
        yield (
            f"add {splits} stretches, norm",
            partial(stretches.add_stretches, sums, residual, norm, dependent=DEPENDENT),
        )
    scales = (torch.rand(num_rows, device=device), torch.rand(HIDDEN, device=device))
    coded = Stretches(torch.randn(4, num_rows, HIDDEN, device=device), scales)
    yield (
        "add 4 stretches, to codes",
        partial(stretches.add_stretches_to_codes, coded, residual, norm, "fp8", DEPENDENT),
    )
    keys, values = (torch.zeros(4096, GROUPS, WIDTH, device=device).bfloat16() for _ in range(2))
    angles = torch.rand(4096, WIDTH // 2, device=device)
    places = torch.randperm(4096, device=device)
    rope = Rope(places[:num_rows].contiguous(), places[-num_rows:].contiguous(), angles, 1 - angles)
    write = RopeWrite((HEADS, GROUPS), rope, KvLayer(keys, values))
    for splits in (2, 4):
        sums = Stretches(torch.randn(splits, num_rows, (HEADS + 2 * GROUPS) * WIDTH, device=device))
        yield f"rotate {splits} stretches", partial(turned, sums, write)
    for entries in (VOCABULARY, DRAFTED):
        logits = torch.randn(num_rows, entries, device=device).bfloat16()
        for warm in (0.0, 0.8):
            numbers = torch.arange(num_rows, device=device)
            sampling = RowSampling(torch.full((num_rows,), warm, device=device), numbers, numbers)
            yield f"best of {entries}, at {warm}", partial(chosen, logits, sampling)


def turned(sums: Stretches, write: RopeWrite) -> tuple[Tensor, ...]:
    """Rotate, and return queries, keys and values."""
    q = norm_rope.rope_and_write(sums, write, None, torch.bfloat16, dependent=DEPENDENT)
    return q, write.layer.keys_SGd, write.layer.values_SGd


def chosen(logits: Tensor, sampling: RowSampling) -> tuple[Tensor, ...]:
    """Return the token of each row."""
    return (sample.choose(logits, sampling, dependent=DEPENDENT),)


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Tell whether tensors have the same bits."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def compile_small(task: tuple[str, int]) -> str:
    """Run one of the kernels in one of the ways it is timed; return what went wrong."""
    way, number = task
    ways = {"before": as_before(), "now": contextlib.nullcontext()}
    try:
        with torch.no_grad(), ways.get(way) or with_warps(int(way)):
            for num_rows in (MANY, FEW):
                list(small_kernels(num_rows, torch.device("cuda")))[number][1]()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - said again where it is timed
        return f"small kernel {task}: {said(error)}"
    return ""


def time_small(device: torch.device) -> list[str]:
    """Compare and time the kernels; return the lines of the table."""
    lines = []
    for num_rows in (MANY, FEW):
        for name, run in small_kernels(num_rows, device):
            try:
                out = tuple(x.clone() for x in run())
                new = graph_seconds(lambda _, run=run: run(), LAUNCHES) * 1e6
                with as_before():
                    same = equal(run(), out)
                    old = graph_seconds(lambda _, run=run: run(), LAUNCHES) * 1e6
            except Exception as error:  # noqa: BLE001 - one failing kernel must not end the run
                lines.append(f"{num_rows:3} rows {name:28} failed: {said(error)}")
            else:
                say = "" if same else " OTHER BITS"
                lines.append(f"{num_rows:3} rows {name:28} {old:6.2f} us before, {new:6.2f} now{say}")
            print(lines[-1], flush=True)
    return lines


def time_layers(tuning: Tuning, device: torch.device, deadline: float) -> tuple[Tuning, list[str]]:
    """Time whole layers with the kernels that were and those that are, then with products that let the next wait.

    Returns the tuning in which those are set that make a layer faster, and the lines of the table.
    """
    best, lines = tuning, []
    for format in ("dense", "fp8"):
        try:
            layers = layers_of(format)(LAYERS, CONTEXT, 40, device)
            for num_rows, case in PASSES.items():
                with as_before():
                    old, expected = layers.us(tuning, case)
                new, out = layers.us(tuning, case)
                say = f"{old:6.1f} us before, {new:6.1f} now{'' if torch.equal(out, expected) else ' OTHER BITS'}"
                for warps in WARPS:
                    with with_warps(warps):
                        us, out = layers.us(tuning, case)
                    say += f", {us:6.1f} with {warps} warps{'' if torch.equal(out, expected) else ' OTHER BITS'}"
                print(f"layer {format:5} {num_rows:3} rows: {say}", flush=True)
                if time.monotonic() < deadline:
                    best, found = spread(layers, best, format, num_rows, expected)
                    say += found
                with as_before():
                    say += f"; before again {layers.us(tuning, case)[0]:6.1f}"
                lines.append(f"layer {format:5} {num_rows:3} rows: {say}")
        except Exception as error:  # noqa: BLE001 - one failing format must not end the run
            lines.append(f"layer {format} failed: {said(error)}")
            print(lines[-1], flush=True)
        layers = None
        torch.cuda.empty_cache()
    return best, lines


def spread(layers: Layers, tuning: Tuning, format: str, num_rows: int, expected: Tensor) -> tuple[Tuning, str]:
    """Let the kernels after products start late, one product after the other; return what makes layers faster."""
    first, _ = layers.us(tuning, PASSES[num_rows])
    best, score = tuning, first
    for name in spread_names(format, num_rows):
        config = best.wide_linear.get(name)
        if config is None:
            continue
        changed = with_wide(name, dataclasses.replace(config, spread=not config.spread))(best)
        us, out = layers.us(changed, PASSES[num_rows])
        print(f"  spread {name:24} {us:6.1f} us{'' if torch.equal(out, expected) else ' OTHER BITS'}", flush=True)
        if us < score * 0.997 and torch.equal(out, expected):
            best, score = changed, us
    again, _ = layers.us(tuning, PASSES[num_rows])
    kept = [name for name, config in best.wide_linear.items() if config != tuning.wide_linear.get(name)]
    return best, f"; spread {first:6.1f} (again {again:6.1f}) -> {score:6.1f} ({', '.join(kept) or 'none'})"


def spread_names(format: str, num_rows: int) -> list[str]:
    """Return the names of a layer's products, in the order they are tried."""
    shapes = {shape.name: shape for shape in LLAMA}
    return [Product(format, shapes[name], num_rows).name for name in ("down", "qkv", "o", "gate_up")]


def compile_pass(task: tuple[Tuning, str, int, bool]) -> str:
    """Run a layer as configured, or with products that all let the next kernel start late; say what went wrong."""
    tuning, format, num_rows, late = task
    for name in spread_names(format, num_rows):
        if late and name in tuning.wide_linear:
            tuning = with_wide(name, dataclasses.replace(tuning.wide_linear[name], spread=True))(tuning)
    try:
        with torch.no_grad():
            layers_of(format)(1, 64, 40, torch.device("cuda")).pass_of(tuning, PASSES[num_rows])()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - said again where it is timed
        return f"layer {task[1:]}: {said(error)}"
    return ""


def draft_candidates(tuning: Tuning, product: Product) -> list[WideConfig]:
    """Return tiles for a product of the draft; nobody adds stretches that the layer that fuses states leaves."""
    found = candidates(tuning, product)
    return [config for config in found if not config.later] if product.shape.name == "draft fc" else found


def tune_draft(tuning: Tuning, tried: dict[Product, list[WideConfig]], deadline: float) -> tuple[Tuning, list[str]]:
    """Time tiles of the draft's products; return the tuning with the fastest, and the lines of the table."""
    best, lines = tuning, []
    for product, configs in tried.items():
        if time.monotonic() > deadline:
            print(f"out of time before {product}", flush=True)
            continue
        try:
            found = time_product(tuning, product, configs, torch.device("cuda"))
        except Exception as error:  # noqa: BLE001 - one failing product must not end the run
            print(f"skipped {product}: {said(error)}", flush=True)
            continue
        today = tuning.wide_linear.get(product.name)
        if found.better is not None:
            best = with_tiles(best, product, found.better)
            say = f"{found.tried[0][0]:6.1f} {short(found.better)}"
        else:
            say = "nothing faster"
        lines.append(f"{product} {product.name:22} {found.today:6.1f} us {short(today):22} -> {say}")
        torch.cuda.empty_cache()
    return best, lines


def main() -> None:
    """Check, time, and write the configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=64.0, help="try no further product after so long")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = torch.device("cuda")
    tuning = starting_tuning(None, device)
    every = [Product(format, shape, rows) for format in ("dense", "fp8") for rows in (MANY, FEW) for shape in DRAFT]
    tried = {product: draft_candidates(tuning, product) for product in every}
    tasks: list[Task] = [(tuning, product, config) for product, configs in tried.items() for config in configs]
    widths: list[Width] = [
        (tuning, name, config)
        for name, config in tuning.wide_linear.items()
        if ":" in name and (config.stream or config.together)
    ]
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 15)) as pool:
        passes = [(tuning, f, rows, late) for f in ("dense", "fp8") for rows in PASSES for late in (False, True)]
        small = [(way, number) for way in ("now", "before") for number in range(9)]
        small += [(str(warps), number) for warps in WARPS for number in range(3)]
        whole, checks = Work(compile_pass, passes, pool), Work(check_widths, widths, pool)
        products, kernels = Work(compile_one, tasks, pool), Work(compile_small, small, pool)
        checked = checks.results(started + 45.0)
        whole.results(started + 45.0)
        compiled = products.results(started + 45.0)
        kernels.results(started + 45.0)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    fine = {(product, config) for (_, product, config), ok in zip(tasks, compiled, strict=True) if ok}
    tried = {product: [c for c in configs if (product, c) in fine] for product, configs in tried.items()}
    table = [f"bits over rows of every width: {sum(checked)} of {len(checked)} configurations right"]
    table += time_small(device)
    best, lines = time_layers(tuning, device, started + 0.85 * arguments.seconds)
    table += lines
    write_tuning(best, arguments.out)
    best, lines = tune_draft(best, tried, started + arguments.seconds)
    write_tuning(best, arguments.out)
    print("\n".join([*table, *lines]))
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
